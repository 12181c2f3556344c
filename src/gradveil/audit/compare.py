"""What changed between two reports."""

from dataclasses import dataclass
from typing import Literal

from .report import Judgement, Report
from .verdict import MARGIN

Kind = Literal["better", "worse", "same", "new", "gone"]
ORDER = {"leaks": 0, "incomplete": 1, "holds": 2}


@dataclass(frozen=True)
class Change:
    """One defense before and after."""

    defense: str
    kind: Kind
    before: Judgement | None
    after: Judgement | None


def compare_reports(before: Report, after: Report) -> list[Change]:
    """Return one change for each defense of either report; better means that less was recovered.

    The verdict decides; between equal verdicts a change of the worst mean SSIM below `MARGIN` counts as the same.
    """
    old = {j.defense: j for j in before.judgements if j.column is None}
    new = {j.defense: j for j in after.judgements if j.column is None}
    return [Change(name, _kind(old.get(name), new.get(name)), old.get(name), new.get(name)) for name in {**old, **new}]


def settings_changed(before: Report, after: Report) -> dict[str, tuple[object, object]]:
    """Return the settings that differ: two audits compare fairly only where these do not matter."""
    keys = {**before.settings, **after.settings, "seed": 0}
    old, new = {**before.settings, "seed": before.seed}, {**after.settings, "seed": after.seed}
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _kind(old: Judgement | None, new: Judgement | None) -> Kind:
    if old is None or new is None:
        return "new" if old is None else "gone"
    if old.verdict != new.verdict:
        return "better" if ORDER[new.verdict] > ORDER[old.verdict] else "worse"
    if old.worst is None or new.worst is None or abs(new.worst - old.worst) < MARGIN:
        return "same"
    return "better" if new.worst < old.worst else "worse"
