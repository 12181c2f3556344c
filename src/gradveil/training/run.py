"""A whole run in one folder: settings, metrics, checkpoint, result."""

import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import record
from ..config import dump_toml
from ..errors import ConfigError, GradientError
from ..gradients import parameters
from ..spec import to_spec
from .fast import FastTrainer, unsupported
from .job import Job, assemble
from .log import Log, read_rounds
from .loop import Trainer
from .privacy import spent, stated
from .rounds import Round
from .settings import Settings

CHECKPOINT = "checkpoint.safetensors"
BYTES = ("bytes_up", "bytes_down", "paper_up", "paper_down")
MEASURED = (*BYTES, "density", "residual_ratio", "gamma")
TIMES = ("defense_seconds", "encode_seconds")  # as medians: the first round also compiles


def trainer_for(job: Job) -> Trainer | FastTrainer:
    """Return the engine the settings ask for; `auto` is the fast one on a GPU if it can run the job."""
    wanted = job.settings.engine
    if wanted == "fast" or (wanted == "auto" and job.device.type == "cuda" and unsupported(job) is None):
        return FastTrainer(job)
    return Trainer(job)


def holds_run(folder: Path) -> bool:
    """Say whether a run was started in this folder."""
    return (folder / CHECKPOINT).exists() or (folder / "metrics.jsonl").exists()


def run(
    settings: Settings,
    folder: str | Path,
    *,
    resume: bool = False,
    minutes: float | None = None,
    on_rounds: Callable[[Job, list[Round]], None] = lambda job, rounds: None,
) -> dict[str, Any]:
    """Train, and return the result, which is also written to `result.json` in `folder`.

    With `resume` a run goes on from its checkpoint, or starts if there is none; without it, a folder that holds a run
    is refused. After `minutes` it stops at the next round boundary with a checkpoint. Training that meets NaN or
    infinity ends with status "diverged".
    """
    folder = Path(folder)
    checkpoint = folder / CHECKPOINT
    if not resume and holds_run(folder):
        raise ConfigError(f"{folder} already holds a run: continue it with --resume, or choose another folder")
    deadline = math.inf if minutes is None else time.monotonic() + 60 * minutes
    job = assemble(settings)
    trainer = trainer_for(job)
    if resume and checkpoint.exists():
        trainer.load(checkpoint)
    log = Log(folder, trainer.round)
    (folder / "settings.toml").write_text(dump_toml(settings) + _resolved_text(trainer), encoding="utf-8")
    try:
        status = _train(trainer, log, checkpoint, deadline, on_rounds)
    finally:
        log.settle()
        log.close()
    if status != "diverged":
        trainer.save(checkpoint)
    result = summary(trainer, status, read_rounds(folder / "metrics.jsonl"))
    record.write_json(folder / "result.json", result)
    return result


def _train(
    trainer: Trainer | FastTrainer,
    log: Log,
    checkpoint: Path,
    deadline: float,
    on_rounds: Callable[[Job, list[Round]], None],
) -> str:
    """Run the rounds that are left, and return how that ended."""
    every = trainer.job.settings.checkpoint_every
    try:
        while trainer.round < trainer.job.rounds:
            if time.monotonic() > deadline:
                return "stopped"
            before = trainer.round
            rounds = trainer.advance()
            log.write(rounds)
            on_rounds(trainer.job, rounds)
            if every and trainer.round // every > before // every:
                log.settle()
                trainer.save(checkpoint)
    except GradientError:
        return "diverged"
    return "finished"


def _resolved(trainer: Trainer | FastTrainer) -> dict[str, str]:
    engine = "fast" if isinstance(trainer, FastTrainer) else "reference"
    return {"engine": engine, "device": str(trainer.job.device), "augment": trainer.job.feed.augment}


def _resolved_text(trainer: Trainer | FastTrainer) -> str:
    """Return what `auto` and `paper` came to as TOML comments: the settings themselves can be run on another device."""
    rates = ", ".join(f"{epoch}:{rate:g}" for epoch, rate in trainer.job.settings.schedule())
    private = stated(spent(trainer.job, trainer.job.rounds))
    lines = {"lr": rates, **_resolved(trainer), "rounds": trainer.job.rounds, "differential privacy": private}
    return "".join(f"# resolved: {name} = {json.dumps(value)}\n" for name, value in lines.items())


def summary(trainer: Trainer | FastTrainer, status: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a run as plain data. Nothing in it is picked by its test accuracy: the last one counts."""
    job = trainer.job
    evaluated = [r for r in rounds if "accuracy" in r]
    measured = [r for r in rounds if r.get("users_measured")]
    seconds = sum(r["seconds"] for r in rounds)
    return {
        "kind": "training",
        "status": status,
        "settings": asdict(job.settings),
        "resolved": {
            **_resolved(trainer),
            "defense": to_spec(job.defense),
            "schedule": job.settings.schedule(),
            "rounds_per_epoch": job.rounds_per_epoch,
            "rounds": job.rounds,
            "parameters": sum(p.numel() for p in parameters(job.model).values()),
            "pictures_per_user": [len(shard) for shard in job.feed.shards],
        },
        "digests": job.digests,
        "command": record.command(),
        "environment": record.environment(),
        "rounds_done": trainer.round,
        # A run that diverged may have sent in rounds that were not counted.
        "privacy": spent(job, job.rounds if status == "diverged" else trainer.round),
        "seconds": seconds,
        "seconds_per_round": seconds / len(rounds) if rounds else None,
        "accuracy": evaluated[-1]["accuracy"] if evaluated else None,
        "curve": [{"epoch": r["epoch"] + 1, "accuracy": r["accuracy"], "loss": r["loss"]} for r in evaluated],
        "per_user_and_round": {name: _mean(measured, name) for name in MEASURED}
        | {name: _median(measured, name) for name in TIMES},
        "rounds_measured": len(measured),
        "users_measured": _mean(measured, "users_measured"),
        "feedback": _thin([{k: r[k] for k in ("index", "residual_ratio", "gamma")} for r in measured]),
    }


def _mean(rounds: list[dict[str, Any]], name: str) -> float | None:
    values = [r[name] for r in rounds if name in r]
    return sum(values) / len(values) if values else None


def _median(rounds: list[dict[str, Any]], name: str) -> float | None:
    values = [r[name] for r in rounds if name in r]
    return statistics.median(values) if values else None


def _thin(rows: list[dict[str, Any]], most: int = 100) -> list[dict[str, Any]]:
    """Return at most about `most` of the rows, evenly spread: enough for a curve."""
    return rows[:: max(1, len(rows) // most)]
