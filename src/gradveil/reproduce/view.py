"""A page that shows reconstructions beside the originals, from the reader's own copy of the data."""

import base64
import io
from html import escape
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import data as datasets
from ..core import Step
from ..data import Dataset, to_pixels
from ..data.cifar import LAYOUTS
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build
from ..training.job import fitted
from ..veil import derive_rng
from .attacked import client_name
from .cells import AttackCell, TrainingCell, key
from .entry import Entry
from .figures import figures_of, results_of, shown
from .scales import Scale
from .store import STRIP, strip_bytes
from .tables import entries

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>
body{{font:15px system-ui,sans-serif;margin:2em auto;max-width:75em;padding:0 1em}}img{{image-rendering:pixelated;
height:48px;display:block;max-width:100%}}img.plot{{height:auto}}td{{padding:.2em .8em .2em 0;vertical-align:middle}}
p.note{{background:#fff3cd;padding:.5em}}@media(max-width:75em){{img{{height:auto}}}}@media(max-width:45em){{
td{{display:block}}}}</style></head><body><h1>{title}</h1><p class="note">{note}</p>
<p>Above the originals, below what the attacker recovered; a green tile stands for a copy. Where a defense changes the
pictures (ATS) the changed ones stand between, and it is these that a gradient gives away.</p>{body}
</body></html>"""


def page(name: str, scale: Scale, folder: Path, root: str | None) -> str:
    """Return the page of a table as HTML that needs nothing else."""
    loaded: dict[str, Dataset] = {}
    parts: dict[str, list[str]] = {}
    lines = entries(name, scale)
    for entry in lines:
        results = results_of(folder, scale.name, entry)
        if results and isinstance(entry.cell, AttackCell):
            path = folder / scale.name / f"{key(entry.cell)}.webp"
            if path.exists():
                parts.setdefault(entry.part, []).append(_row(entry, results, path, loaded, root))
    body = "".join(f"<h2>{escape(part)}</h2><table>{''.join(rows)}</table>" for part, rows in parts.items())
    body += _scatter(lines, folder, scale) + _curves(lines, folder, scale)
    if not body:
        where = folder / scale.name
        raise ConfigError(f"{where} holds no picture or curve of {name}: gradveil reproduce {name} writes its table")
    return PAGE.format(title=escape(f"{name}, {scale.name} scale"), note=escape(scale.explained), body=body)


def _row(entry: Entry, results: list[dict[str, Any]], path: Path, loaded: dict[str, Dataset], root: str | None) -> str:
    data = str(results[0]["cell"]["data"])
    if data not in loaded:
        loaded[data] = datasets.load(data, split="test", root=root)
    same = data not in LAYOUTS or _is_copy(loaded[data], results[0])
    found = figures_of(entry, results)
    scores = ", ".join(
        f"{title} {shown(found[name].mean)}"
        for name, title in (("plain_ssim", "SSIM"), ("lpips", "LPIPS"))
        if name in found
    )
    if results[0].get("transformed_scores"):
        scores += " against the changed pictures" if entry.transformed else " against the originals"
    strips = _strips(results[0], path, loaded[data] if same else None)
    pictures = "".join(
        (f"<small>{escape(name)}</small>" if len(strips) != 2 else "")
        + f'<img alt="{escape(name)}" src="data:image/webp;base64,{base64.b64encode(raw).decode()}">'
        for name, raw in strips.items()
    )
    if not same:
        pictures = f"<small>Attacked on another copy of {escape(data)}: no originals.</small> {pictures}"
    label = escape(entry.label).replace(" %", "&nbsp;%")  # a line of "%" alone reads badly
    return f"<tr><td>{label}<br><small>{escape(scores)}</small></td><td>{pictures}</td></tr>"


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
    defense = fitted(build(DEFENSES, result["definition"]["defense"], "defense"), data)
    parts = []
    for i, group in enumerate(torch.tensor(result["victims"][:STRIP]).split(cell.batch_size)):
        whole = result["victims"][i * cell.batch_size :][: cell.batch_size]  # all draw together
        rng = derive_rng(cell.seed, client_name(cell, i), cell.rounds + result["waited"][i], device=device.type)
        changed = defense.prepare_batch(data.batch(whole, device), Step(rng))
        parts.append(changed.inputs[: len(group)])
    return to_pixels(torch.cat(parts), data.mean, data.std)


def _scatter(lines: list[Entry], folder: Path, scale: Scale) -> str:
    """Return the plot of every score against the relative gradient distance, where a table asks for it."""
    series: dict[str, list[dict[str, Any]]] = {}
    for entry in lines:
        found = figures_of(entry, results_of(folder, scale.name, entry)) if entry.part.startswith("Relative") else None
        if found and isinstance(entry.cell, AttackCell):
            series.setdefault(entry.cell.model, []).append(found)
    if not series:
        return ""
    from matplotlib.figure import Figure

    plot = Figure(figsize=(11, 3), layout="constrained")
    names = [n for n in ("psnr", "mse", "plain_ssim", "lpips") if n in next(iter(series.values()))[0]]
    axes = plot.subplots(1, len(names), squeeze=False)[0]
    for axis, name in zip(axes, names, strict=True):
        for (model, points), marker in zip(series.items(), "o^", strict=False):
            x, y = ([p[n].mean for p in points] for n in ("distance", name))
            axis.scatter(x, y, marker=marker, label=model)
        axis.set(xlabel="relative gradient distance", ylabel=name.removeprefix("plain_"))
    axes[0].legend()
    return f"<h2>Distance against scores</h2>{_image(plot)}"


def _curves(lines: list[Entry], folder: Path, scale: Scale) -> str:
    """Return the accuracy curves of the table's training runs, one plot for each model."""
    runs: dict[str, list[tuple[str, list[dict[str, Any]]]]] = {}
    for entry in lines:
        if isinstance(entry.cell, TrainingCell):
            for result in results_of(folder, scale.name, entry)[:1]:
                runs.setdefault(entry.cell.settings.model, []).append((entry.label, result["curve"]))
    if not runs:
        return ""
    from matplotlib.figure import Figure

    plot = Figure(figsize=(11, 3.5), layout="constrained")
    for axis, (model, curves) in zip(plot.subplots(1, len(runs), squeeze=False)[0], runs.items(), strict=True):
        for label, curve in curves:
            axis.plot([p["epoch"] for p in curve], [100 * p["accuracy"] for p in curve], marker=".", label=label)
        axis.set(title=model, xlabel="epoch", ylabel="test accuracy, %")
        axis.legend(fontsize="x-small")
    return f"<h2>Accuracy</h2>{_image(plot)}"


def _image(plot: Any) -> str:
    handle = io.BytesIO()
    plot.savefig(handle, format="png", dpi=110)
    return f'<img class="plot" alt="plot" src="data:image/png;base64,{base64.b64encode(handle.getvalue()).decode()}">'
