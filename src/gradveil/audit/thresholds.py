"""Thresholds on a report, for CI and for clients that refuse to train under a defense that leaks."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from .report import COLUMNS, Column, Report
from .verdict import BASELINE, against_floor, counted, judge


@dataclass(frozen=True)
class Thresholds:
    """What every gated defense must satisfy; None means no limit."""

    max_ssim: float | None = None  # worst mean SSIM of any attack
    max_picture_ssim: float | None = None  # SSIM of the best recovered picture
    max_lead: float | None = None  # worst mean SSIM minus that of the best blind guess
    max_bytes: float | None = None  # share of the bare gradient
    min_accuracy: float | None = None
    require: str | None = None  # a verdict
    columns: tuple[Column, ...] = COLUMNS

    @property
    def on_leaks(self) -> bool:
        """Whether anything limits what attacks recover."""
        return any(limit is not None for limit in (self.max_ssim, self.max_picture_ssim, self.max_lead))


def failures(report: Report, limits: Thresholds, defenses: Sequence[str] = ()) -> list[str]:
    """Return why the report does not pass, one line each; empty means that it passes.

    Verdicts are worked out again from the rows, so an edited verdict in the file changes nothing. A value that is
    missing fails its limit: what was not measured is not safe. Without names all but the bare gradient are gated.
    """
    known = [d.name for d in report.defenses]
    for name in defenses:
        if name not in known:
            raise ConfigError(f"the report has no defense {name!r}; it has {', '.join(known)}")
    gated = list(defenses) or [name for name in known if name != BASELINE]
    if not gated:
        return ["the report has no defense but the bare gradient: nothing can pass"]
    return [line for name in gated for line in _check(report, limits, name)]


def _check(report: Report, limits: Thresholds, name: str) -> list[str]:
    found = {j.column: j for j in judge(report) if j.defense == name}
    out = []
    if limits.require is not None:
        verdicts = {column: found[column].verdict for column in limits.columns}
        out += [
            f"{name}: {v} in the {c} column, not {limits.require}" for c, v in verdicts.items() if v != limits.require
        ]
    for column in limits.columns:
        part = found[column]
        lead = None if part.worst is None or part.floor is None else part.worst - part.floor
        out += _over(f"{name}: worst mean SSIM in the {column} column", part.worst, limits.max_ssim)
        out += _over(
            f"{name}: best recovered picture in the {column} column", part.worst_picture, limits.max_picture_ssim
        )
        out += _over(f"{name}: lead over blind guessing in the {column} column", lead, limits.max_lead)
        if limits.on_leaks:
            out += [
                f"{name}: {attack} has no result in the {column} column" for attack in _silent(report, column, name)
            ]
    info = next(d for d in report.defenses if d.name == name)
    share = max((u.bytes_sent / u.bytes_dense for u in info.uploads), default=None)
    out += _over(f"{name}: share of bytes sent", share, limits.max_bytes)
    if limits.min_accuracy is not None and (info.accuracy is None or info.accuracy < limits.min_accuracy):
        got = "was not measured" if info.accuracy is None else f"is {info.accuracy:.3f}"
        out.append(f"{name}: accuracy {got}, at least {limits.min_accuracy:g} is required")
    return out


def _silent(report: Report, column: Column, defense: str) -> list[str]:
    """Return the attacks that failed, were cut or never ran: what they would have recovered is not known."""
    rows = {attack.name: counted(report, column, defense, attack.name) for attack in report.attacks}
    return [attack for attack, row in rows.items() if row is None or against_floor(report, row) is None]


def _over(what: str, value: float | None, limit: float | None) -> list[str]:
    if limit is None or (value is not None and value <= limit):
        return []
    return [f"{what} was not measured"] if value is None else [f"{what} is {value:.3f}, the limit is {limit:g}"]
