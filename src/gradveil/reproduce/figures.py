"""Numbers for tables: means over pictures and seeds with their spread, and where they leave the paper's."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatch
from functools import cache
from importlib import resources
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from . import store, trained
from .cells import AttackCell, CostCell, TrainingCell, completed, definition
from .entry import Entry
from .scales import SCALES

UNKNOWN = "no reason known yet."
UNTESTED = "a guess, not tested:"
METRICS = {"lpips": "LPIPS", "ssim": "SSIM7", "min_lpips": "min LPIPS", "max_ssim": "max SSIM7", "mib": "MiB"}
TESTED = "tested (`results/reasons/{}.json`):"


@dataclass(frozen=True)
class Figure:
    """A mean, and how far it may be off.

    `spread` is two standard errors over all pictures, or half the range of the seeds' means if that is wider. Without
    either (one run, one value) it is 0.
    """

    mean: float
    spread: float

    def leaves(self, paper: float) -> bool:
        """Say whether the paper's value lies outside the spread, beyond what its three digits can say."""
        return abs(self.mean - paper) > max(self.spread, 0.0005 * max(1.0, abs(paper)))


def results_of(folder: Path, scale: str, entry: Entry) -> list[dict[str, Any]]:
    """Return the recorded results of a line on the original data, one for each seed."""
    if isinstance(entry.cell, TrainingCell):
        found = trained.recorded(folder, entry.cell, scale)
    else:
        found = [r for r in store.of_all_seeds(folder, scale, entry.cell) if is_of(r, entry.cell)]
    return [r for r in found if store.on_original(r)]


def is_of(result: dict[str, Any], cell: AttackCell | CostCell) -> bool:
    """Say whether a result is of this cell as it is defined now, but for its seed."""
    if isinstance(cell, AttackCell) and store.plain(completed(result["definition"])) != store.plain(definition(cell)):
        return False
    older = {field.name: field.default for field in fields(cell)}  # what came later had its default
    recorded = {**older, **result["cell"]}
    return all(recorded[name] == value for name, value in vars(cell).items() if name != "seed")


def figures_of(entry: Entry, results: list[dict[str, Any]]) -> dict[str, Figure]:
    """Return every figure of a line. `ssim` follows the paper's convention, `plain_ssim` the usual one."""
    if not results:
        return {}
    match entry.cell:
        case TrainingCell():
            ends = [100 * r["accuracy"] if r["status"] == "finished" else math.nan for r in results]
            return {"accuracy": summarise([[end] for end in ends])}
        case CostCell():
            seconds = [[r["defense_seconds"] * r["rounds_per_epoch"]] for r in results]
            names = ("mib", "paper_mib", "defense_seconds", "encode_seconds")
            return {name: summarise([[r[name]] for r in results]) for name in names} | {"seconds": summarise(seconds)}
    cards = [r["transformed_scores"] if entry.transformed and r["transformed_scores"] else r["scores"] for r in results]
    found = {
        name: summarise([card[column] for card in cards])
        for name, column in (("lpips", "lpips"), ("ssim", "paper_ssim"), ("plain_ssim", "ssim"))
        if column in cards[0]
    }
    for name in ("psnr", "mse"):
        found[name] = summarise([card[name] for card in cards])
    found["max_ssim"] = summarise([[max(_known(card["paper_ssim"]))] for card in cards])
    if "lpips" in cards[0]:
        found["min_lpips"] = summarise([[min(_known(card["lpips"]))] for card in cards])
    if all("identified" in card for card in cards):
        found["identified"] = summarise([[100 * v for v in card["identified"]] for card in cards])
    if all("identified" in card for r in results for card in r["floor"].values()):
        floors = [[100 * max(card["identified"] for card in r["floor"].values())] for r in results]
        found["blind_identified"] = summarise(floors)
    found["distance"] = summarise([r["distance"] for r in results])
    found["blind"] = summarise([[max(card["ssim"] for card in r["floor"].values())] for r in results])
    found["n"] = Figure(sum(r["n"] for r in results), 0.0)
    return found


def told_results(folder: Path, scale: str, entry: Entry) -> list[dict[str, Any]]:
    """Return the results of a line's attacker once it knows the defense, as far as they are recorded."""
    told = SCALES[scale].told(entry.cell) if isinstance(entry.cell, AttackCell) else None
    return results_of(folder, scale, replace(entry, cell=told)) if told else []


def told_figures(entry: Entry, told: list[dict[str, Any]]) -> dict[str, Figure]:
    """Return what stands beside the figures of a line for the attacker who knows the defense."""
    found = figures_of(entry, told)
    return {f"told_{name}": found[name] for name in ("plain_ssim", "identified", "n") if name in found}


def summarise(per_seed: list[list[float]]) -> Figure:
    """Return the mean over all values and the spread of it.

    >>> summarise([[1.0, 3.0], [2.0, 2.0]])
    Figure(mean=2.0, spread=0.7071067811865476)
    """
    groups = [_known(values) for values in per_seed]
    values = [v for group in groups for v in group]
    means = [fmean(group) for group in groups]
    if any(math.isnan(mean) for mean in means):  # a seed without any value: there is no mean over the seeds
        return Figure(math.nan, 0.0)
    error = 2 * pstdev(values) / math.sqrt(len(values))
    return Figure(fmean(values), max(error, (max(means) - min(means)) / 2))


def _known(values: Sequence[float | None]) -> list[float]:
    return [v for v in values if v is not None] or [math.nan]


def deviations(pairs: Sequence[tuple[Entry, dict[str, Figure]]]) -> dict[str, dict[str, list[str]]]:
    """Return reasons, and for each which metrics of which lines leave the paper's figures by more than their spread."""
    said: dict[str, dict[str, list[str]]] = {}
    for entry, found in pairs:
        for name, paper in entry.paper.items():
            if name in found and found[name].leaves(paper):
                said.setdefault(reason(entry, name), {}).setdefault(entry.label, []).append(name)
    return said


def reason(entry: Entry, metric: str) -> str:
    """Return why a figure differs from the paper's, as far as it is known."""
    for known in reasons():
        if fnmatch(entry.cell.stem, known["cells"]) and fnmatch(metric, known["metric"]):
            if known.get("checked"):
                return str(known["reason"])
            standing = TESTED.format(known["tested"]) if "tested" in known else UNTESTED
            return f"{standing} {known['reason']}"
    return UNKNOWN


@cache
def reasons() -> list[dict[str, Any]]:
    """Return the known reasons; of those that match a cell the first counts.

    `checked` is plain from the files of the cell itself, `tested` names the experiment of `examples/reasons.py`.
    """
    text = resources.files("gradveil").joinpath("reproduce/reasons.json").read_text(encoding="utf-8")
    loaded: list[dict[str, Any]] = json.loads(text)
    return loaded


def shown(value: float, digits: int = 3) -> str:
    """Return a number as tables show it; tiny ones keep their size.

    >>> shown(0.31649), shown(7.43e-15), shown(float("nan"))
    ('0.316', '7e-15', '–')
    """
    if not math.isfinite(value):
        return "–"
    if value and abs(value) < 0.5 * 10**-digits:
        return f"{value:.0e}"
    return f"{value:.{digits}f}"
