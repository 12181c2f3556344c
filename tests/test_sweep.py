import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gradveil.errors import ConfigError
from gradveil.sweep import Job, Outcome, job_id, run_jobs

MODULE = """
import os, time, torch
def draw(job):
    if job.get("fail"):
        raise ValueError("asked to fail")
    if job.get("die"):
        os.kill(os.getpid(), 9)
    if job.get("sleep"):
        open(job["sleep"], "w").close()
        time.sleep(60)
    rng = torch.Generator().manual_seed(job["seed"])
    return {"value": torch.randn(100, 100, generator=rng).mm(torch.ones(100, 1)).sum().item()}
"""
ENTRY = "sweep_work:draw"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "sweep_work.py").write_text(MODULE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / "results"


def jobs(*more: Job) -> list[Job]:
    return [{"seed": 1}, {"seed": 2}, {"seed": 1}, *more]


def test_jobs_run_once_fail_alone_and_resume(folder: Path) -> None:
    told: list[Any] = []
    outcomes = run_jobs(jobs({"fail": True}, {"die": True}), ENTRY, folder, workers=2, tell=lambda *x: told.append(x))
    assert [o.job for o in outcomes] == jobs({"fail": True}, {"die": True})
    assert outcomes[0].result == outcomes[2].result != outcomes[1].result
    assert "asked to fail" in outcomes[3].error
    assert "-9" in outcomes[4].error
    assert told[-1] == (4, 4)  # one of the five is a repetition
    assert len(list(folder.iterdir())) == 2  # no result, no file, no rubbish
    changed = folder / f"{job_id({'seed': 1}, ENTRY)}.json"
    changed.write_text(json.dumps({"result": "from the file"}))
    again = run_jobs(jobs(), ENTRY, folder)
    assert again[1] == outcomes[1]
    assert again[0].result == "from the file"  # and not done again


def test_an_interruption_stops_what_runs_and_starts_nothing(folder: Path, tmp_path: Path) -> None:
    begun = [tmp_path / name for name in ("one", "two")]

    def interrupt(done: int, total: int) -> None:
        while not begun[0].exists():
            time.sleep(0.05)
        raise KeyboardInterrupt

    started = time.monotonic()
    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run_jobs([{"seed": 1}, *({"sleep": str(b)} for b in begun)], ENTRY, folder, tell=interrupt)
    while threading.active_count() > before:
        assert time.monotonic() - started < 50, "jobs go on"
        time.sleep(0.05)
    assert not begun[1].exists()


def test_a_job_is_plain_data() -> None:
    for bad in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(ConfigError, match="plain JSON"):
            job_id(bad, ENTRY)


@pytest.mark.engine
@pytest.mark.slow
def test_ray_gives_the_same_results(folder: Path) -> None:
    pytest.importorskip("ray", reason="the flower extra is not installed")
    here = run_jobs(jobs(), ENTRY, folder / "here", workers=2)
    # In a process of its own: Ray leaves open handles behind, which pytest reports as errors.
    script = (
        "import json, sys, pathlib; from gradveil.sweep import run_jobs; "
        f"out = run_jobs(json.load(sys.stdin), {ENTRY!r}, pathlib.Path(sys.argv[1]), ray='local'); "
        "print(json.dumps(out))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder / "there")],
        input=json.dumps(jobs({"fail": True})), capture_output=True, text=True, check=True,
    )  # fmt: skip
    there = [Outcome(*row) for row in json.loads(done.stdout.splitlines()[-1])]
    assert there[:3] == here
    assert "asked to fail" in there[3].error
    names = sorted(p.name for p in (folder / "here").iterdir())
    assert names == sorted(p.name for p in (folder / "there").iterdir())
    assert all((folder / "here" / n).read_text() == (folder / "there" / n).read_text() for n in names)
