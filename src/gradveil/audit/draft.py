"""A report before the first attack, when it goes on, and what is added to it at the end."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from .. import record, tree
from ..errors import ConfigError
from ..metrics import METRICS
from ..spec import to_spec, to_text
from . import accuracy, scoring
from .plan import Plan, Subject, is_active, is_adaptive
from .report import AttackInfo, DefenseInfo, FastScore, Original, Report
from .risk import rank_correlation

MAY_CHANGE = frozenset({"budget", "device", "accuracy_rounds"})  # settings a resumed audit may change


def metric_ends(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return which end of each score means that more was recovered."""
    return {name: METRICS[name].leak for name in scoring.SHOWN if name in scores}


def empty(plan: Plan, subject: Subject, columns: list[Any]) -> Report:
    """Return the report of an audit that has attacked nothing yet."""
    victims, title = subject.victims, f"{plan.model} on {plan.data}"
    if subject.run is not None and subject.run_round is not None:
        plan = replace(plan, model=subject.run.model, data=subject.run.data)
        title = f"{plan.model} on {plan.data} after {subject.run_round} rounds of training"
    return Report(
        title=title,
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
        attacks=[
            AttackInfo(n, to_text(a), to_spec(a), is_adaptive(n, subject), is_active(a))
            for n, a in subject.attacks.items()
        ],
        defenses=[DefenseInfo(n, to_text(d), to_spec(d), []) for n, d in subject.defenses.items()],
        rows=[],
        digests=digests(subject),
    )


def digests(subject: Subject) -> dict[str, str]:
    """Return what tells the weights and pictures of an audit from others that bear the same names."""
    residuals = {f"{name}.{key}": t for name, state in subject.residuals.items() for key, t in state.items()}
    prior = {} if subject.prior is None else {"generator's weights": tree.digest(subject.prior.state_dict())}
    return prior | {
        "weights": tree.digest(subject.model.state_dict()),
        "pictures under attack": subject.victims.digest,
        "client's other pictures": subject.private.digest,
        "public pictures": subject.public.digest,
        "client's residuals": tree.digest(residuals),
    }


def require_same(before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Raise `ConfigError` if an audit began with other weights or pictures than those that are there now."""
    for what, digest in now.items():
        if before.get(what) != digest:
            raise ConfigError(f"the {what} are not those this audit began with: choose another folder")


def resumed(fresh: Report, before: Report) -> Report:
    """Return the earlier report with its finished rows, if it was of the same audit."""
    for key, value in fresh.settings.items():
        if key not in MAY_CHANGE and before.settings.get(key) != value:
            raise ConfigError(f"the audit to resume had {key} = {before.settings.get(key)!r}, not {value!r}")
    if [d.text for d in before.defenses] != [d.text for d in fresh.defenses]:
        raise ConfigError("the audit to resume had other defenses: choose another folder")
    require_same(before.digests, fresh.digests)
    rows = [row for row in before.rows if row.status in ("ok", "refused")]
    if before.settings.get("accuracy_rounds") != fresh.settings["accuracy_rounds"]:
        before = replace(before, defenses=[replace(d, accuracy=None) for d in before.defenses])
    return replace(before, rows=rows, settings=fresh.settings, environment=fresh.environment, cut=[], findings=[])


def notes(report: Report, subject: Subject) -> list[str]:
    """Return what a reader must know before believing a number."""
    found = []
    if any(d.accuracy is not None for d in report.defenses):
        found.append(accuracy.NOTE.format(rounds=report.settings["accuracy_rounds"]))
    for defense in report.defenses:
        waits = [f"{upload.waited:g} ({upload.column})" for upload in defense.uploads if upload.waited]
        if waits:
            found.append(
                f"{defense.name} sends nothing until enough is mixed: {' and '.join(waits)} empty uploads went before "
                "each attacked one, and their batches are in it."
            )
        aged = any(upload.residual_ratio is not None for upload in defense.uploads)
        if aged and subject.run is not None and defense.name not in subject.residuals:
            found.append(
                f"{defense.name} is not what this run was trained under: its client's residual is not the run's, but "
                f"that of {report.settings['round']} uploads (realistic) or none (diagnostic) of the trained model."
            )
    return found


def correlated(report: Report) -> FastScore | None:
    """Return the fast score with its rank correlation to the best attack on each picture.

    Active attacks are left out: they read another model than the one that was scored.
    """
    if report.fast is None:
        return None
    passive = {attack.name for attack in report.attacks if not attack.active}
    ran = [r for r in report.rows if r.column == "diagnostic" and r.attack in passive and r.status == "ok"]
    pairs: list[tuple[float, float]] = []
    each: list[float | None] = []
    for risk in report.fast.risks:
        rows = [row.scores["ssim"] for row in ran if row.defense == risk.defense]
        found = list(zip(risk.readable, (max(values) for values in zip(*rows, strict=True)), strict=False))
        pairs += found
        each.append(rank_correlation(found))
    known = [value for value in each if value is not None]
    within = fmean(known) if known else None
    return replace(report.fast, correlation=rank_correlation(pairs), pairs=len(pairs), within=within)
