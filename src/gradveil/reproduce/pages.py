"""docs/results.md, rendered from the recorded results and nothing else. Its prose lies in `results_head.md`,
`notes.json` and `reasons.json`.
"""

import json
import math
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ..data.cifar import LAYOUTS, SIZES
from ..errors import ConfigError
from . import plots
from .cells import AttackCell, key
from .columns import Found, columns_for, paper_only
from .entry import Entry
from .figures import METRICS, deviations, figures_of, results_of, shown, summarise, told_figures, told_results
from .glance import glance
from .scales import SCALES, Scale
from .store import OTHER_COPY, load, on_original
from .tables import DISTANCE, FEEDBACK, TABLES, entries

PLOTS = {DISTANCE: "results-distance.png", FEEDBACK: "results-accuracy.png"}  # beside docs/results.md
OTHER_HEAD = """## Another copy of CIFAR-10

These ran on a copy whose pictures went through JPEG (310 bytes each) and came in another order. That costs accuracy and
makes pictures smoother, so they compare with each other only.
"""
Line = tuple[Entry, list[dict[str, Any]]]  # with its results
MANY = 8  # headings from which a table gets a list of them


@dataclass(frozen=True)
class _Page:
    """Where the results of a page lie, where its pictures are, how the plot of a part is called, and under which
    heading, for which line, each reason was first given.
    """

    folder: Path
    scale: str
    pictures: str
    plots: dict[str, str]
    said: dict[str, tuple[str, str]] = field(default_factory=dict)


def render_table(name: str, scale: Scale, folder: Path, pictures: str) -> str:
    """Return one table, or all, at one scale, the paper's values beside ours; `pictures` leads to the strips."""
    parts = [f"# {name}, {scale.name} scale\n\n{scale.explained}\n"]
    page = _Page(folder, scale.name, pictures, plot_names(scale.name))
    for one in TABLES if name == "all" else (name,):
        parts.append(f"## {one}\n\n{(TABLES[one].__doc__ or '').strip()}\n")
        parts += [_part(page, title, part) for title, part in _parts(page, entries(one, scale)).items()]
    return "\n".join(parts)


def render(folder: Path) -> str:
    """Return the page for the results in `folder`."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: results lie where gradveil reproduce wrote them (--out)")
    parts: list[str] = []
    contents = [["table", "what", "lines recorded"]]
    any_recorded = False
    page = _Page(folder, "full", "../results/full", PLOTS)
    for name, make in TABLES.items():
        what, found = (make.__doc__ or "").strip(), _parts(page, entries(name, SCALES["full"]))
        recorded = [bool(results) for lines in found.values() for _, results in lines]
        contents.append([f"[{name}](#{name})", what, f"{sum(recorded)} of {len(recorded)}"])
        parts.append(f"## {name}\n\n{what} `gradveil reproduce {name} --scale full`\n")
        if len(found) > MANY:
            parts.append("".join(f"- [{title}](#{_anchor(title)})\n" for title in found))
        parts += [_part(page, title, part) for title, part in found.items()]
        any_recorded |= any(recorded)
    parts.append(_other_copies(folder))
    if not (any_recorded or parts[-1]):
        raise ConfigError(f"{folder} holds no result of full scale: name the folder that does with --out")
    rows, blind, picked = glance(folder, "full")
    short = {"glance": table(rows), "blind": f"{blind:.2f}", "picked": f"{picked:.0f}"}
    return "\n".join([_prose("results_head.md").format(contents=table(contents), **short), *parts])


@cache
def notes(kind: str) -> dict[str, str]:
    """Return what stands under headings: of the `table` at any scale, or of its `recorded` runs at full scale."""
    return dict(json.loads(_prose("notes.json"))[kind])


def _prose(name: str) -> str:
    return resources.files("gradveil").joinpath("reproduce", name).read_text(encoding="utf-8")


def plot_names(scale: str) -> dict[str, str]:
    """Return the names of the plots beside the pages of `render_table`, of which one folder holds both scales.

    >>> list(plot_names("quick").values())
    ['results-distance-quick.png', 'results-accuracy-quick.png']
    """
    return {title: f"{Path(name).stem}-{scale}.png" for title, name in PLOTS.items()}


def plots_of(folder: Path, scale: str = "full", names: dict[str, str] = PLOTS) -> dict[str, bytes]:
    """Return the plots that belong beside a page for the results in `folder`, as PNG by their `names`."""
    lines = entries("figures", SCALES[scale])
    points, curves = plots.distances(lines, folder, scale), plots.accuracies(lines, folder, scale)
    found = {names[DISTANCE]: plots.draw_distances(points)} if points else {}
    return found | ({names[FEEDBACK]: plots.draw_accuracies(curves)} if curves else {})


def _parts(page: _Page, lines: list[Entry]) -> dict[str, list[Line]]:
    """Return lines and their results by heading."""
    found: dict[str, list[Line]] = {}
    for entry in lines:
        found.setdefault(entry.part, []).append((entry, results_of(page.folder, page.scale, entry)))
    return found


def _part(page: _Page, title: str, part: list[Line]) -> str:
    """Return one heading with its table."""
    lines, results = [entry for entry, _ in part], [found for _, found in part]
    figures = [
        figures_of(entry, found) | told_figures(entry, told_results(page.folder, page.scale, entry)) if found else {}
        for entry, found in part
    ]
    told = notes("table") | (notes("recorded") if page.scale == "full" else {})
    text = "\n\n".join([f"### {title}", *([told[title]] if title in told else []), *_of_part(results)]) + "\n\n"
    if not any(results) and not any(entry.paper for entry in lines):
        return f"{text}Not run: {'; '.join(entry.label for entry in lines)}.\n"
    columns = columns_for(lines, figures)
    attacked = isinstance(lines[0].cell, AttackCell)
    rows = [["", *(name for name, _ in columns), *(["n"] if attacked else []), "seeds", "run"]]
    run: list[tuple[Entry, Found]] = []
    for entry, found, figure in zip(lines, results, figures, strict=True):
        if found:
            cells = [show(entry, figure) for _, show in columns]
            count = [f"{figure['n'].mean:.0f}"] if attacked else []
            rows.append([entry.label, *cells, *count, ", ".join(str(_seed(r)) for r in found), _run(found)])
            run.append((entry, figure))
        elif entry.paper:
            cells = [paper_only(name, entry) for name, _ in columns]
            rows.append([entry.label, *cells, *([""] if attacked else []), "", "not run"])
    text += table(rows)
    missing = [entry.label for entry, found in part if not (found or entry.paper)]
    text += f"\nNot run: {'; '.join(missing)}.\n" if missing else ""
    text += _sentences(title, run, page.said) if page.scale == "full" else ""
    text += f"\n![{title}]({page.plots[title]})\n" if any(results) and title in page.plots else ""
    return text + _strips(page, part)


def _of_part(results: list[list[dict[str, Any]]]) -> list[str]:
    """Return a sentence for each dataset of which only the first pictures were at hand."""
    known = [r for found in results for r in found if "sizes" in r]
    used = {(r["cell"]["data"], r["sizes"]["test"], r["sizes"]["train"]) for r in known}
    return [
        f"Of {LAYOUTS[data].title} the first {test} test pictures and the first {train} training pictures were at "
        "hand: those attacked, and those an attacker has besides, are drawn from them."
        for data, test, train in sorted(used)
        if data in LAYOUTS and (test, train) != (SIZES["test"], SIZES["train"])
    ]


def _sentences(title: str, run: list[tuple[Entry, Found]], said: dict[str, tuple[str, str]]) -> str:
    """Return a sentence for each reason why lines differ from the paper; one given before is pointed at."""
    text = ""
    for why, lines in deviations(run).items():
        first, line = said.setdefault(why, (title, next(iter(lines))))
        pointer = f"as for {line} under [{first}](#{_anchor(first)})."
        text += f"- {_which(lines, run)}: {why if first == title else pointer}\n"
    return f"\nDifferent from the paper:\n\n{text}" if text else ""


def _which(lines: dict[str, list[str]], run: list[tuple[Entry, Found]]) -> str:
    """Return lines and their metrics as text; where they are nearly all the paper has, the others are named."""
    metrics = next(iter(lines.values()))
    others = [e.label for e, _ in run if e.label not in lines and not e.paper.keys().isdisjoint(metrics)]
    if len(lines) > 1 and 4 * len(others) < len(lines) and all(found == metrics for found in lines.values()):
        lines = {" but ".join(["all lines", *(["; ".join(others)] if others else [])]): metrics}
    return "; ".join(f"{line} ({', '.join(METRICS.get(m, m) for m in found)})" for line, found in lines.items())


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _run(results: list[dict[str, Any]]) -> str:
    """Return hardware, dates and commits of results, each once."""
    found: list[list[str]] = [[], [], []]
    for result in results:
        where = result["environment"]
        used_gpu = str(result.get("device") or result.get("resolved", {}).get("device", "")).startswith("cuda")
        commit = where["commit"] or "unknown"
        commit = commit[:10] + ("+" if commit.endswith("+") else "")
        hardware = where["gpu"] if used_gpu else f"{where['cores']} CPU cores"
        for kept, value in zip(found, (hardware, where["time"][:10], f"`{commit}`"), strict=True):
            kept += [value] if value not in kept else []
    ended = ", diverged" if any(result.get("status") == "diverged" for result in results) else ""
    return ", ".join(value for kept in found for value in kept) + ended


def _seed(result: dict[str, Any]) -> int:
    return int(result["settings"]["seed"] if result["kind"] == "training" else result["seed"])


def _strips(page: _Page, part: list[Line]) -> str:
    """Return the reconstructions of a part, folded; the originals are shown by `gradveil reproduce view` only."""
    shown_ = {key(entry.cell): entry.label for entry, found in part if found and "victims" in found[0]}
    if not shown_:
        return ""
    rows = "".join(f"| {label} | ![{label}]({page.pictures}/{name}.webp) |\n" for name, label in shown_.items())
    return f"\n<details><summary>Reconstructions</summary>\n\n| | |\n|---|---|\n{rows}\n</details>\n"


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of them the headings, as a Markdown table."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"


def _other_copies(folder: Path) -> str:
    files = [*(folder / "full").glob("*.json"), *(folder / OTHER_COPY).glob("*.json")]
    rows = [["cell", "accuracy, %", "SSIM", "blind", "LPIPS", "n", "run"]]
    for path in sorted(files, key=lambda path: path.name):
        result = load(path)
        if on_original(result):
            continue
        if result["kind"] == "training":
            ended = result["accuracy"] if result["status"] == "finished" else math.nan
            figures = [shown(100 * ended, 2), "", "", "", ""]
        else:
            ssim, lpips = (shown(summarise([result["scores"][name]]).mean) for name in ("ssim", "lpips"))
            blind = shown(max(card["ssim"] for card in result["floor"].values()))
            figures = ["", ssim, blind, lpips, str(result["n"])]
        rows.append([f"`{path.stem}`", *figures, _run([result])])
    return f"{OTHER_HEAD}\n{table(rows)}" if len(rows) > 1 else ""
