"""A page that shows reconstructions beside the originals, from the reader's own copy of the data."""

import base64
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..core import Step
from ..data import Dataset, to_pixels
from ..data.cifar import LAYOUTS
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build
from ..veil import derive_rng
from . import plots
from .attacked import client_name
from .cells import AttackCell, key
from .entry import Entry
from .figures import Figure, figures_of, results_of, shown
from .pictures import load_split
from .scales import Scale
from .store import STRIP, strip_bytes
from .tables import FEEDBACK, entries

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width,initial-scale=1"><style>
body{{font:15px system-ui,sans-serif;margin:2em auto;max-width:76em;padding:0 1em;overflow-wrap:anywhere}}
p.note{{background:#fff3cd;padding:.5em}}table{{width:100%;table-layout:fixed;border-spacing:0}}
td{{padding:.2em 0;vertical-align:middle}}td:first-child{{width:11em;padding-right:.8em}}
.wide{{overflow-x:auto}}img{{display:block;height:48px;image-rendering:pixelated}}
img.plot{{height:auto;max-width:100%;image-rendering:auto}}
@media(max-width:45em){{table,tbody,tr,td{{display:block}}td:first-child{{width:auto;padding-top:1em}}img.plot{{min-width:50em}}}}
</style></head><body>
<h1>{title}</h1><p class="note">{note}</p>
<p>Above the originals, below what the attacker recovered; a green tile stands for a copy. Where a defense changes the
pictures (ATS) the changed ones stand between, as far as they can be drawn again, and it is these that a gradient gives
away.</p>{body}
</body></html>"""


def page(name: str, scale: Scale, folder: Path, root: str | None) -> str:
    """Return the page of a table as HTML that needs nothing else."""
    parts: dict[str, list[str]] = {}
    lines = entries(name, scale)
    for entry in lines:
        results = results_of(folder, scale.name, entry)
        path = folder / scale.name / f"{key(entry.cell)}.webp"
        if isinstance(entry.cell, AttackCell) and path.exists() and any(r["seed"] == entry.cell.seed for r in results):
            parts.setdefault(entry.part, []).append(_row(entry, results, path, root))
    body = "".join(f"<h2>{escape(part)}</h2><table>{''.join(rows)}</table>" for part, rows in parts.items())
    body += _plots(lines, folder, scale.name)
    if not body:
        where = folder / scale.name
        raise ConfigError(f"{where} holds no picture or curve of {name}: gradveil reproduce {name} writes its table")
    return PAGE.format(title=escape(f"{name}, {scale.name} scale"), note=escape(scale.explained), body=body)


def _row(entry: Entry, results: list[dict[str, Any]], path: Path, root: str | None) -> str:
    drawn = next(r for r in results if r["seed"] == entry.cell.seed)  # the result the strip belongs to
    source = str(drawn["cell"]["data"])
    data = load_split(source, "test", root)
    same = source not in LAYOUTS or _is_copy(data, drawn)
    transformed = bool(drawn.get("transformed_scores"))
    scores = _scores(figures_of(entry, results))
    if transformed:
        scores += " against the changed pictures" if entry.transformed else " against the originals"
    seeds = ", ".join(str(r["seed"]) for r in results)
    of = f"<br>pictures: seed {drawn['seed']}; scores: seeds {seeds}" if len(results) > 1 else ""
    strips = _strips(drawn, path, data if same else None)
    named = transformed or len(strips) != 2  # not plainly originals above their reconstructions
    pictures = "".join(
        (f"<small>{escape(name)}</small>" if named else "")
        + f'<img alt="{escape(name)}" src="data:image/webp;base64,{base64.b64encode(raw).decode()}">'
        for name, raw in strips.items()
    )
    if not same:
        pictures = f"<small>Attacked on another copy of {escape(source)}: no originals.</small> {pictures}"
    pictures = f'<div class="wide">{pictures}</div>'  # one for all strips of a line: they scroll together
    label = escape(entry.label).replace(" %", "&nbsp;%")  # a line of "%" alone reads badly
    return f"<tr><td>{label}<br><small>{escape(scores)}{of}</small></td><td>{pictures}</td></tr>"


def _scores(found: dict[str, Figure]) -> str:
    known = {"SSIM": "plain_ssim", "LPIPS": "lpips"}
    parts = [f"{title} {shown(found[name].mean)}" for title, name in known.items() if name in found]
    if "identified" in found:
        blind = f" (blind {found['blind_identified'].mean:.0f})" if "blind_identified" in found else ""
        parts.append(f"identified {found['identified'].mean:.0f} %{blind}")
    return ", ".join(parts)


def _is_copy(data: Dataset, result: dict[str, Any]) -> bool:
    """Say whether `data` holds the attacked pictures where the result says; it may have been run on the first ones."""
    wanted = result.get("digests", {}).get("test")
    size = result.get("sizes", {}).get("test", len(data))
    return bool(wanted == (data if size >= len(data) else data.subset(range(size))).digest)


def _strips(result: dict[str, Any], path: Path, data: Dataset | None) -> dict[str, bytes]:
    """Return the strips to show, by what they are; without the data there are no originals."""
    recovered = path.read_bytes()
    if not result.get("transformed_scores"):
        name, changed = "reconstructions", None
    else:
        ordered = "trained_on" in result.get("strip_order", "")
        name = f"reconstructions, in the order of the {'changed pictures' if ordered else 'originals'}"
        changed = None if data is None else trained_on(result, data)
        if data is not None and changed is None:
            name += " (the defense's changes were drawn on a GPU and cannot be shown without one)"
    strips = {}
    if data is not None:
        strips["originals"] = strip_bytes(data.pixels(result["victims"][:STRIP]))
    if changed is not None:
        strips["the originals as the defense changed them"] = strip_bytes(changed)
    return {**strips, name: recovered}


def trained_on(result: dict[str, Any], data: Dataset) -> Tensor | None:
    """Return the first attacked pictures as the defense changed them, by drawing again what the clients drew.

    None where a GPU drew it and there is none here: its generator gives other numbers.
    """
    cell, device = AttackCell(**result["cell"]), torch.device(result["device"])
    if device.type == "cuda" and not torch.cuda.is_available():
        return None
    defense = build(DEFENSES, result["definition"]["defense"], "defense").fitted(data.mean, data.std)
    parts = []
    for i, group in enumerate(torch.tensor(result["victims"][:STRIP]).split(cell.batch_size)):
        whole = result["victims"][i * cell.batch_size :][: cell.batch_size]  # all draw together
        rng = derive_rng(cell.seed, client_name(cell, i), cell.rounds + result["waited"][i], device=device.type)
        changed = defense.prepare_batch(data.batch(whole, device), Step(rng))
        parts.append(changed.inputs[: len(group)])
    return to_pixels(torch.cat(parts), data.mean, data.std)


def _plots(lines: list[Entry], folder: Path, scale: str) -> str:
    points, curves = plots.distances(lines, folder, scale), plots.accuracies(lines, folder, scale)
    body = f"<h2>Distance against scores</h2>{_image(plots.draw_distances(points))}" if points else ""
    return body + (f"<h2>{FEEDBACK}</h2>{_image(plots.draw_accuracies(curves))}" if curves else "")


def _image(png: bytes) -> str:
    picture = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<div class="wide"><img class="plot" alt="plot" src="{picture}"></div>'
