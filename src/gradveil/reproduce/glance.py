"""The paper's main table in its own layout, a defense a row: what each attack recovers, told the defense or not."""

from pathlib import Path
from typing import NamedTuple

from .entry import RIVALS, TITLES, Entry
from .figures import Figure, figures_of, results_of, shown, told_figures, told_results
from .scales import SCALES, attacked_text

OURS = ("adgp", "hardened1")  # what the paper does not measure
TRAINED = {"hardened1": "hardened"}  # single examples are attacked, mixed ones trained


class Glance(NamedTuple):
    """Rows of a table, the headings first, and what the best blind guess reaches in any of them."""

    rows: list[list[str]]
    blind: float
    blind_identified: float


def glance(folder: Path, scale: str) -> Glance:
    """Return a line for each defense.

    A cell is the mean SSIM, in bold that of the attacker who is told the defense, and how often the better of the two
    identifies the picture: noise lowers SSIM long before it hides which picture it was. Both are of the seeds both
    have. The marks belong to the notes below the table.
    """
    rows, floors = [["", *TITLES.values(), "accuracy, %"]], []
    for defense in (*RIVALS, *OURS):
        line = [f"{defense} ¹" if defense == "ats" else defense]
        for attack in TITLES:
            cell = SCALES[scale].attack(attack, defense, "cnn6" if attack == "rgap" else "resnet18")
            entry = Entry("", defense, cell, transformed=defense == "ats")
            own, told = results_of(folder, scale, entry), told_results(folder, scale, entry)
            one, other = {r["seed"] for r in own}, {r["seed"] for r in told}
            both = one & other
            found = figures_of(entry, [r for r in own if r["seed"] in both or not both])
            count = f" (n {found['n'].mean:.0f})" if both and one != other else ""
            line.append(_cell(found | told_figures(entry, [r for r in told if r["seed"] in both])) + count)
            floors.append(found)
        trained = Entry("", defense, run := SCALES[scale].train(TRAINED.get(defense, defense)))
        ended = figures_of(trained, results_of(folder, scale, trained))
        mark = " ²" if run.settings.defense != attacked_text(defense, run.settings.model) else ""
        rows.append([*line, shown(ended["accuracy"].mean, 1) + mark if ended else "–"])
    return Glance(rows, _highest(floors, "blind"), _highest(floors, "blind_identified"))


def _cell(found: dict[str, Figure]) -> str:
    if "plain_ssim" not in found:
        return "–"
    parts = [f"{found['plain_ssim'].mean:.2f}"]
    parts += [f"**{found['told_plain_ssim'].mean:.2f}**"] if "told_plain_ssim" in found else []
    known = [found[name].mean for name in ("identified", "told_identified") if name in found]
    return ", ".join([*parts, *([f"{max(known):.0f} %"] if known else [])])


def _highest(found: list[dict[str, Figure]], name: str) -> float:
    return max((figures[name].mean for figures in found if name in figures), default=0.0)
