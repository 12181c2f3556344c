import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradveil.audit import Audit, Plan, subject
from gradveil.audit import spread as module
from gradveil.audit.spread import attack_cell, spread
from gradveil.errors import ConfigError
from gradveil.sweep import Outcome, job_id


def timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: timeless(v) for k, v in value.items() if k not in ("seconds", "created", "time")}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def test_a_spread_audit_gives_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(
        model="lenet", data="digits", pictures=2, batch_size=1, round=1, accuracy_rounds=1,
        defenses=("dgp",), attacks=("gradient_matching(steps=3)",),
    )  # fmt: skip
    done: list[str] = []

    def inline(jobs: list[Any], entry: str, folder: Path, **_: Any) -> list[Outcome]:
        """The same work without the processes, which tests/test_sweep.py is about; one job fails."""
        done.extend(json.dumps(job) for job in jobs)
        results = [attack_cell(json.loads(json.dumps(job))) for job in jobs[:-1]]
        return [
            *(Outcome(job, r, "") for job, r in zip(jobs, results, strict=False)),
            Outcome(jobs[-1], None, "killed"),
        ]

    monkeypatch.setattr(module, "run_jobs", inline)
    before = spread(plan, subject(plan), tmp_path)
    assert len(before.rows) == 3
    together = Audit(plan, subject(plan), before=before).run()  # also does the one that failed
    alone = Audit(plan, subject(plan)).run()
    assert timeless(json.loads(together.to_json())) == timeless(json.loads(alone.to_json()))
    assert len(set(done)) == 4


SMALL = Plan(
    model="mlp(hidden=8)", data="digits", pictures=2, batch_size=1, round=0, accuracy_rounds=0,
    defenses=("dgp",), attacks=("linear_readout",),
)  # fmt: skip


def test_jobs_of_other_weights_are_not_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[Any]] = []

    def note(jobs: list[Any], entry: str, folder: Path, **_: Any) -> list[Outcome]:
        seen.append(jobs)
        return [Outcome(job, None, "not run") for job in jobs]

    monkeypatch.setattr(module, "run_jobs", note)
    other = subject(SMALL)
    next(other.model.parameters()).data += 1
    for found in (subject(SMALL), other):
        spread(SMALL, found, tmp_path)
    names = [{job_id(job, module.ENTRY) for job in jobs} for jobs in seen]
    assert not names[0] & names[1]
    attack_cell(seen[0][0])
    with pytest.raises(ConfigError, match="the weights are not those this audit began with"):
        attack_cell(seen[1][0])


def test_a_spread_audit_has_no_budget(tmp_path: Path) -> None:
    plan = replace(SMALL, budget=1.0)
    with pytest.raises(ConfigError, match="leave out --budget"):
        spread(plan, subject(plan), tmp_path)
