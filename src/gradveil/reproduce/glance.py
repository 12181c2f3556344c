"""The paper's main table in its own layout, a defense a row: what each attack recovers, told the defense or not."""

from pathlib import Path
from typing import NamedTuple

from .entry import RIVALS, TITLES, Entry
from .figures import Figure, figures_of, results_of, shown, told_figures
from .scales import SCALES

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
    identifies the picture: noise lowers SSIM long before it hides which picture it was.
    """
    rows, floors = [["", *TITLES.values(), "accuracy, %"]], []
    for defense in (*RIVALS, *OURS):
        line = [defense]
        for attack in TITLES:
            cell = SCALES[scale].attack(attack, defense, "cnn6" if attack == "rgap" else "resnet18")
            entry = Entry("", defense, cell, transformed=defense == "ats")
            found = figures_of(entry, results_of(folder, scale, entry))
            line.append(_cell(found | told_figures(folder, scale, entry)))
            floors.append(found)
        trained = Entry("", defense, SCALES[scale].train(TRAINED.get(defense, defense)))
        ended = figures_of(trained, results_of(folder, scale, trained))
        rows.append([*line, shown(ended["accuracy"].mean, 1) if ended else "–"])
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
