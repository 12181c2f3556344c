"""What changed between two reports."""

from dataclasses import dataclass
from typing import Literal

from .report import Judgement, Report
from .verdict import MARGIN, judge

Kind = Literal["better", "worse", "same", "new", "gone"]
SAID_FIRST: tuple[Kind, ...] = ("new", "gone", "worse", "better", "same")
ORDER = {"leaks": 0, "incomplete": 1, "holds": 2}


@dataclass(frozen=True)
class Change:
    """One defense before and after: in the column that changed, or overall if none did."""

    defense: str
    kind: Kind
    before: Judgement | None
    after: Judgement | None


def compare_reports(before: Report, after: Report) -> list[Change]:
    """Return one change for each defense of either report; better means that less was recovered.

    Columns are compared one by one, so that a leak in one cannot hide what another lost: a defense that is worse in
    any column is worse. The verdict decides, worked out again from the rows; between equal verdicts a change of the
    worst mean SSIM below `MARGIN` counts as the same.
    """
    old = {(j.defense, j.column): j for j in judge(before)}
    new = {(j.defense, j.column): j for j in judge(after)}
    found: dict[str, list[Change]] = {}
    for name, column in {**old, **new}:
        was, now = old.get((name, column)), new.get((name, column))
        if column is None:
            kind: Kind = "new" if was is None else "gone" if now is None else "same"
        else:
            kind = _kind(was, now)
        found.setdefault(name, []).append(Change(name, kind, was, now))
    return [min(changes, key=lambda change: SAID_FIRST.index(change.kind)) for changes in found.values()]


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
