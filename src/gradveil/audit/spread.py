"""An audit over many processes or machines: every cell is a job of its own, and the report is the same.

A cell's result depends on the plan, the weights, the pictures and the cell only, so it does not matter where it runs.
What is left for the caller's `Audit` are the parts all cells share: floors, the fast score, accuracy and the verdicts.
"""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..sweep import Job, run_jobs
from . import draft
from .plan import Cell, Plan, Subject, cells
from .report import DefenseInfo, FastScore, Report
from .run import Audit

ENTRY = "gradveil.audit.spread:attack_cell"


def spread(
    plan: Plan,
    subject: Subject,
    folder: Path,
    *,
    workers: int = 1,
    ray: str | None = None,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> Report:
    """Attack every cell in a process of its own and return a report to go on from: `Audit(..., before=report)`.

    A cell that fails in its process has no row here, so the audit that goes on tries it again and shows how it fails.
    Results stay in `folder`; what is there is not done again.
    """
    if plan.budget:
        raise ConfigError("a budget holds for one process: leave out --budget, or --jobs and --ray")
    # Settings that change no result are no part of a job's name.
    settings = asdict(replace(plan, accuracy_rounds=0, budget=0.0))
    fresh = Audit(plan, subject).report
    jobs: list[Job] = [{"plan": settings, "digests": fresh.digests, "cell": asdict(cell)} for cell in cells(subject)]
    outcomes = run_jobs(jobs, ENTRY, folder, workers=workers, ray=ray, tell=tell)
    parts = [Report.from_json(json.dumps(outcome.result)) for outcome in outcomes if not outcome.error]
    known = [_described(info, parts) for info in fresh.defenses]
    seconds = sum(row.seconds for part in parts for row in part.rows)
    return replace(fresh, rows=[row for part in parts for row in part.rows], defenses=known, seconds=seconds)


def attack_cell(job: Job) -> Any:
    """Do one job: attack one cell, and return its report as plain data."""
    from .assemble import subject

    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in job["plan"].items()}
    plan = Plan(**values)
    running = Audit(plan, subject(plan))
    draft.require_same(job["digests"], running.report.digests)
    running.cells = [Cell(**job["cell"])]
    running.report = replace(running.report, fast=FastScore(0.0, 0, []))  # the caller computes it once for all
    return json.loads(running.run().to_json())


def _described(info: DefenseInfo, parts: list[Report]) -> DefenseInfo:
    """Return what the cells learned about a defense's uploads, each column once."""
    found = {u.column: u for part in parts for d in part.defenses if d.name == info.name for u in d.uploads}
    return replace(info, uploads=[found[column] for column in sorted(found)])
