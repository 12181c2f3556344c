"""A report before the first attack, when it goes on, and what is added to it at the end."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import Any

from .. import record
from ..errors import ConfigError
from ..metrics import METRICS
from ..spec import to_spec, to_text
from . import accuracy, scoring
from .plan import Plan, Subject, is_adaptive
from .report import AttackInfo, DefenseInfo, FastScore, Original, Report
from .risk import rank_correlation

MAY_CHANGE = frozenset({"budget", "device"})  # settings a resumed audit may change


def metric_ends(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return which end of each score means that more was recovered."""
    return {name: METRICS[name].leak for name in scoring.SHOWN if name in scores}


def empty(plan: Plan, subject: Subject, columns: list[Any]) -> Report:
    """Return the report of an audit that has attacked nothing yet."""
    victims = subject.victims
    model = plan.model if subject.run_round is None else f"{plan.model} after {subject.run_round} rounds"
    return Report(
        title=f"{model} on {plan.data}",
        created=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        seconds=0.0,
        settings={key: list(value) if isinstance(value, tuple) else value for key, value in asdict(plan).items()},
        environment=record.environment(),
        seed=plan.seed,
        metrics={},
        lineup=0,
        chance=1.0,
        originals=[
            Original(i, victims.classes[int(victims.labels[i])], scoring.to_png(victims.pixels([i])[0]))
            for i in range(len(victims))
        ],
        columns=columns,
        floors=[],
        attacks=[AttackInfo(n, to_text(a), to_spec(a), is_adaptive(a)) for n, a in subject.attacks.items()],
        defenses=[DefenseInfo(n, to_text(d), to_spec(d), []) for n, d in subject.defenses.items()],
        rows=[],
    )


def resumed(fresh: Report, before: Report) -> Report:
    """Return the earlier report with its finished rows, if it was of the same audit."""
    for key, value in fresh.settings.items():
        if key not in MAY_CHANGE and before.settings.get(key) != value:
            raise ConfigError(f"the audit to resume had {key} = {before.settings.get(key)!r}, not {value!r}")
    if [d.text for d in before.defenses] != [d.text for d in fresh.defenses]:
        raise ConfigError("the audit to resume had other defenses: choose another folder")
    rows = [row for row in before.rows if row.status in ("ok", "refused")]
    return replace(before, rows=rows, settings=fresh.settings, environment=fresh.environment, cut=[], findings=[])


def notes(report: Report) -> list[str]:
    """Return what a reader must know before believing a number."""
    found = []
    if any(d.accuracy is not None for d in report.defenses):
        found.append(accuracy.NOTE.format(rounds=report.settings["accuracy_rounds"]))
    for defense in report.defenses:
        for upload in defense.uploads:
            if upload.waited:
                found.append(
                    f"{defense.name} sends nothing until enough is mixed: in the {upload.column} column "
                    f"{upload.waited:g} empty uploads went before each attacked one, and their batches are in it."
                )
    return found


def correlated(report: Report) -> FastScore | None:
    """Return the fast score with its rank correlation to the best attack on each picture."""
    if report.fast is None:
        return None
    scores, results = [], []
    for risk in report.fast.risks:
        rows = [r for r in report.rows if r.column == "diagnostic" and r.defense == risk.defense and r.status == "ok"]
        best = [max(values) for values in zip(*(row.scores["ssim"] for row in rows), strict=True)]
        scores += risk.readable[: len(best)]
        results += best[: len(risk.readable)]
    return replace(report.fast, correlation=rank_correlation(scores, results), pairs=len(results))
