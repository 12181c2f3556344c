"""docs/results.md, rendered from the recorded results and nothing else."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cells import CostCell, TrainingCell, key
from .figures import Figure, deviations, figures_of, results_of, shown, summarise
from .scales import SCALES
from .store import OTHER_COPY, load, on_original
from .tables import TABLES, Entry, entries

Found = dict[str, Figure]
Column = tuple[str, Callable[[Entry, Found], str]]

HEAD = """# Results

<!-- Rendered from results/ by `gradveil reproduce render`: change the results or the renderer, not this page. -->

Every line comes from a result file under `results/` that holds the command, commit, hardware, seconds, seed and the
score of every single picture. "Paper" is what the DGP paper (AAAI 2024) prints. Where ours differs from it by more than
the spread, a sentence below the table says why, or what we guess. A `+` behind a commit means that the code had changes
that were not committed. Uploads without content are never scored.

- LPIPS: low means recovered. SSIM: high means recovered. "SSIM (paper's)" uses a flat 7x7 window and a data range
  of 2, which the paper's figures fit and under which plain grey scores about 0.25; "SSIM" is the usual one. "Blind" is
  the SSIM of the best guess that never looks at the gradient.
- "Identified": how often the private picture is the reconstruction's nearest among 99 others and the pictures of its
  own upload, by MSE, SSIM or LPIPS, whichever ranks it best.
- ± is two standard errors over all pictures, or half the range of the seeds' means if that is wider.
- A green tile among the reconstructions is a copy of the private picture (above 40 dB), left out because pictures of a
  dataset are not kept here. `gradveil reproduce view` shows all originals, from your own copy of the data.
- CIFAR-10 is the original, known by its digest. Results on other copies stand apart, at the end.
- Unless a line says otherwise the attacked model is freshly initialised and in evaluation mode, labels are given, and
  the upload is the client's first (no error-feedback history). The paper leaves all of these open; lines with the other
  values stand under "beyond".
"""
OTHER_HEAD = """## Another copy of CIFAR-10

These ran on a copy whose pictures went through JPEG (310 bytes each) and came in another order. That costs accuracy and
makes pictures smoother, so they compare with each other only.
"""
QUICK_HEAD = """## Quick scale

{note}. One line for each recorded cell.
"""


def render(folder: Path) -> str:
    """Return the page for the results in `folder`."""
    parts = [HEAD]
    for name, make in TABLES.items():
        parts.append(f"## {name}\n\n{(make.__doc__ or '').strip()}\n")
        for title, lines in _parts(entries(name, SCALES["full"])).items():
            parts.append(_part(folder, title, lines))
    parts += [_other_copies(folder), _quick(folder)]
    return "\n".join(parts)


def _parts(lines: list[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in lines:
        found.setdefault(entry.part, []).append(entry)
    return found


def _part(folder: Path, title: str, lines: list[Entry]) -> str:
    results = [results_of(folder, "full", entry) for entry in lines]
    figures = [figures_of(entry, found) for entry, found in zip(lines, results, strict=True)]
    if not any(results):
        names = "; ".join(entry.label for entry in lines)
        return f"### {title}\n\nNot run: {names}.\n"
    columns = _columns(lines)
    rows = [["", *(name for name, _ in columns), "n", "seeds", "run"]]
    run: list[tuple[Entry, Found]] = []
    for entry, found, figure in zip(lines, results, figures, strict=True):
        if not found:
            rows.append([entry.label, *[_paper_only(name, entry) for name, _ in columns], "", "", "not run"])
            continue
        cells = [show(entry, figure) for _, show in columns]
        count = sum(r["n"] for r in found) if "n" in found[0] else len(found)
        rows.append([entry.label, *cells, str(count), ", ".join(str(_seed(r)) for r in found), _run(found[-1])])
        run.append((entry, figure))
    text = f"### {title}\n\n{table(rows)}"
    said = deviations(run)
    if said:
        text += "\n" + "".join(f"- {sentence}\n" for sentence in said)
    return text + _strips(lines, results)


def _columns(lines: list[Entry]) -> list[Column]:
    """Return the columns a part needs: ours, and the paper's where it prints any."""
    first = lines[0].cell
    if isinstance(first, TrainingCell):
        return _pair("accuracy, %", "accuracy", lines, 2)
    if isinstance(first, CostCell):
        counted: Column = ("paper's count, MiB", lambda _, f: shown(f["paper_mib"].mean))
        cost = [*_pair("on the wire, MiB", "mib", lines), *_pair("s per epoch", "seconds", lines)]
        return [cost[0], counted, *cost[1:]]
    found = [*_pair("LPIPS", "lpips", lines), *_pair("SSIM (paper's)", "ssim", lines)]
    found += [("SSIM", _ours("plain_ssim", 3)), ("blind", lambda _, f: shown(f["blind"].mean))]
    found += [("identified, %", lambda _, f: shown(f["identified"].mean, 0) if "identified" in f else "–")]
    if any("min_lpips" in entry.paper for entry in lines):
        found += [*_pair("min LPIPS", "min_lpips", lines), *_pair("max SSIM (paper's)", "max_ssim", lines)]
    if lines[0].part.startswith("Relative"):
        found = [("distance", _ours("distance", 3)), ("PSNR", _ours("psnr", 1)), ("MSE", _ours("mse", 4)), *found]
    return found


def _pair(title: str, metric: str, lines: list[Entry], digits: int = 3) -> list[Column]:
    pair: list[Column] = [(title, _ours(metric, digits))]
    if any(metric in entry.paper for entry in lines):
        pair.append((f"paper {title}", lambda entry, _: _printed(entry, metric)))
    return pair


def _ours(metric: str, digits: int) -> Callable[[Entry, Found], str]:
    def show(_: Entry, found: Found) -> str:
        if metric not in found:
            return "–"
        figure = found[metric]
        spread = f" ± {shown(figure.spread, digits)}" if figure.spread else ""
        return f"{shown(figure.mean, digits)}{spread}"

    return show


def _printed(entry: Entry, metric: str) -> str:
    return f"{entry.paper[metric]:g}" if metric in entry.paper else "–"


def _paper_only(title: str, entry: Entry) -> str:
    names = {
        "LPIPS": "lpips",
        "SSIM (paper's)": "ssim",
        "min LPIPS": "min_lpips",
        "max SSIM (paper's)": "max_ssim",
        "accuracy, %": "accuracy",
        "on the wire, MiB": "mib",
        "s per epoch": "seconds",
    }
    return _printed(entry, names[title.removeprefix("paper ")]) if title.startswith("paper ") else ""


def _run(result: dict[str, Any]) -> str:
    """Return hardware, date and commit of a result."""
    where = result["environment"]
    used_gpu = str(result.get("device") or result.get("resolved", {}).get("device", "")).startswith("cuda")
    hardware = where["gpu"] if used_gpu else f"{where['cores']} CPU cores"
    commit = where["commit"] or "unknown"
    commit = commit[:10] + ("+" if commit.endswith("+") else "")
    ended = ", diverged" if result.get("status") == "diverged" else ""
    return f"{hardware}, {where['time'][:10]}, `{commit}`{ended}"


def _seed(result: dict[str, Any]) -> int:
    return int(result["settings"]["seed"] if result["kind"] == "training" else result["seed"])


def _strips(lines: list[Entry], results: list[list[dict[str, Any]]]) -> str:
    """Return the reconstructions of a part, folded; the originals are shown by `gradveil reproduce view` only."""
    shown_ = {key(e.cell): e.label for e, found in zip(lines, results, strict=True) if found and "victims" in found[0]}
    if not shown_:
        return ""
    rows = "".join(f"| {label} | ![{label}](../results/full/{name}.webp) |\n" for name, label in shown_.items())
    return f"\n<details><summary>Reconstructions</summary>\n\n| | |\n|---|---|\n{rows}\n</details>\n"


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of them the headings, as a Markdown table."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"


def _other_copies(folder: Path) -> str:
    files = [*(folder / "full").glob("*.json"), *(folder / OTHER_COPY).glob("*.json")]
    rows = [["cell", "accuracy, %", "SSIM", "LPIPS", "n", "run"]]
    for path in sorted(files, key=lambda path: path.name):
        result = load(path)
        if on_original(result):
            continue
        if result["kind"] == "training":
            ended = result["accuracy"] if result["status"] == "finished" else math.nan
            figures = [shown(100 * ended, 2), "", "", "1"]
        else:
            means = [shown(summarise([result["scores"][name]]).mean) for name in ("ssim", "lpips")]
            figures = ["", *means, str(result["n"])]
        rows.append([f"`{path.stem}`", *figures, _run(result)])
    return f"{OTHER_HEAD}\n{table(rows)}" if len(rows) > 1 else ""


def _quick(folder: Path) -> str:
    scale = SCALES["quick"]
    text = QUICK_HEAD.format(note=scale.note)
    rows = [["cell", "SSIM", "LPIPS", "accuracy, %", "MiB", "n", "seconds", "run"]]
    done = set()
    for entry in entries("all", scale):
        results = results_of(folder, "quick", entry)
        if not results or key(entry.cell) in done:
            continue
        done.add(key(entry.cell))
        found, last = figures_of(entry, results), results[-1]
        means = [shown(found[m].mean) if m in found else "" for m in ("plain_ssim", "lpips", "accuracy", "mib")]
        rows.append([f"`{entry.cell.stem}`", *means, str(last.get("n", 1)), f"{last['seconds']:.1f}", _run(last)])
    return text + ("\n" + table(rows) if len(rows) > 1 else "\nNot run.\n")
