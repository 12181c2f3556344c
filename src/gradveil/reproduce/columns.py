"""The columns of a table of results: our figures, and what the paper prints beside them."""

from collections.abc import Callable

from .cells import CostCell, TrainingCell
from .entry import Entry
from .figures import Figure, shown

Found = dict[str, Figure]
Column = tuple[str, Callable[[Entry, Found], str]]

PRINTED = {  # columns of what the paper prints -> its metric
    "paper LPIPS": "lpips",
    "paper SSIM7": "ssim",
    "paper min LPIPS": "min_lpips",
    "paper max SSIM7": "max_ssim",
    "paper accuracy, %": "accuracy",
    "paper prints, MiB": "mib",
    "paper prints, s per epoch": "seconds",
}


def columns_for(lines: list[Entry], figures: list[Found]) -> list[Column]:
    """Return the columns a part needs: ours, the paper's where it prints any, and what it did not ask."""
    first = lines[0].cell
    if isinstance(first, TrainingCell):
        return _pair("accuracy, %", "accuracy", lines, 2)
    if isinstance(first, CostCell):
        counted: Column = ("paper's count, MiB", lambda _, f: shown(f["paper_mib"].mean))
        cost = [*_pair("on the wire, MiB", "mib", lines), *_pair("our s per epoch", "seconds", lines)]
        return [cost[0], counted, *cost[1:]]
    found = [*_pair("LPIPS", "lpips", lines), *_pair("SSIM7", "ssim", lines)]
    found += [("SSIM", _ours("plain_ssim", 3)), ("blind", lambda _, f: shown(f["blind"].mean))]
    found += [("identified, % (blind)", _identified)]
    if any("min_lpips" in entry.paper for entry in lines):
        found += [*_pair("min LPIPS", "min_lpips", lines), *_pair("max SSIM7", "max_ssim", lines)]
    if any("told_plain_ssim" in figure for figure in figures):
        found += [("told the defense: SSIM, identified", _told)]
    if lines[0].part.startswith("Relative"):
        found = [("distance", _ours("distance", 3)), ("PSNR", _ours("psnr", 1)), ("MSE", _ours("mse", 4)), *found]
    return found


def _pair(title: str, metric: str, lines: list[Entry], digits: int = 3) -> list[Column]:
    pair: list[Column] = [(title, _ours(metric, digits))]
    if any(metric in entry.paper for entry in lines):
        heading = next(heading for heading, name in PRINTED.items() if name == metric)
        pair.append((heading, lambda entry, _: _printed(entry, metric)))
    return pair


def _ours(metric: str, digits: int) -> Callable[[Entry, Found], str]:
    def show(_: Entry, found: Found) -> str:
        if metric not in found:
            return "–"
        figure = found[metric]
        spread = f" ± {shown(figure.spread, digits)}" if figure.spread else ""
        return f"{shown(figure.mean, digits)}{spread}"

    return show


def _identified(_: Entry, found: Found) -> str:
    if "identified" not in found:
        return "–"
    floor = f" ({found['blind_identified'].mean:.0f})" if "blind_identified" in found else ""
    return f"{found['identified'].mean:.0f}{floor}"


def _told(_: Entry, found: Found) -> str:
    if "told_plain_ssim" not in found:
        return "–"
    picked = f", {found['told_identified'].mean:.0f} %" if "told_identified" in found else ""
    count = f", n {found['told_n'].mean:.0f}" if found["told_n"] != found["n"] else ""
    return f"**{shown(found['told_plain_ssim'].mean)}**{picked}{count}"


def _printed(entry: Entry, metric: str) -> str:
    return f"{entry.paper[metric]:g}" if metric in entry.paper else "–"


def paper_only(title: str, entry: Entry) -> str:
    """Return what a line that was not run shows under a heading: the paper's value, if it prints one."""
    return _printed(entry, PRINTED[title]) if title in PRINTED else ""
