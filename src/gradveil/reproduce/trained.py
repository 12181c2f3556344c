"""Accuracies: recorded training runs found by their settings, and run only when asked to."""

import shlex
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ..data import Split
from ..data.cifar import LAYOUTS, SIZES
from ..defenses import DEFENSES
from ..errors import NeedError
from ..spec import build, to_text
from ..training import Settings
from ..training.run import run
from . import store
from .cells import TrainingCell, key
from .pictures import load_split
from .weights import RUNS, copy_of, placed

# What may differ between a run and the table it stands in: where and how fast it ran, not what was trained.
FREE = frozenset(
    {"root", "device", "engine", "precision", "deterministic", "eval_every", "wire_every", "checkpoint_every", "seed"}
    | {"delta"}
)
SHOWN = ("model", "data", "defense", "algorithm", "local_steps", "alpha", "epochs", "rounds", "seed")
ENDED = ("finished", "diverged")  # that a defense cannot be trained with is a result too
MOST = 100  # points of a curve that are kept


def recorded(folder: Path, cell: TrainingCell, place: str) -> list[dict[str, Any]]:
    """Return every run that ended with the cell's settings, whatever its seed, in the order of the seeds.

    Runs on the original data lie in `training/` as `gradveil train` writes them, and among the results of a scale;
    those on other copies in a place of their own.
    """
    apart = place == store.OTHER_COPY
    files = [*([] if apart else (folder / "training").glob("**/*.json"))]
    files += (folder / place).glob(f"{cell.stem}_seed*.json")
    found: dict[int, dict[str, Any]] = {}
    for path in sorted(files):
        result = store.load(path)
        ended = result.get("kind") == "training" and result.get("status") in ENDED
        if ended and store.on_original(result) != apart and _same(result, cell.settings):
            found.setdefault(int(result["settings"]["seed"]), result)
    return [found[seed] for seed in sorted(found)]


def _same(result: dict[str, Any], wanted: Settings) -> bool:
    """Say whether a run trained what is wanted; a setting it does not know had its default."""
    known, asked = result["settings"], asdict(wanted)
    special = {"defense", "lr"}  # several texts mean the same
    if any(known.get(f.name, f.default) != asked[f.name] for f in fields(Settings) if f.name not in FREE | special):
        return False
    if known["lr"] != wanted.lr and Settings(model=wanted.model, lr=known["lr"]).schedule() != wanted.schedule():
        return False
    mine, other = (to_text(build(DEFENSES, text, "defense")) for text in (known["defense"], wanted.defense))
    return mine == other


def perform(cell: TrainingCell, *, root: str | None, device: str, minutes: float | None) -> dict[str, Any]:
    """Train, going on from an earlier sitting, and return the result; raises `TimeoutError` if time ran out."""
    _require_whole(cell.settings.data, root)
    folder = RUNS / f"{key(cell)}_{copy_of(cell.settings.data, root)}"
    result = run(placed(cell.settings, root, device), folder, resume=True, minutes=minutes)
    if result["status"] == "stopped":
        raise TimeoutError(f"stopped after {result['rounds_done']} rounds")
    curve = result["curve"]
    return {**result, "curve": curve[:: max(1, len(curve) // MOST)], "feedback": []}


def _require_whole(name: str, root: str | None) -> None:
    """Refuse a part of a dataset that no digest tells from the whole: its accuracy would stand beside others."""
    splits: tuple[Split, ...] = ("train", "test")
    for split in splits if name in LAYOUTS and not LAYOUTS[name].digests else ():
        found = len(load_split(name, split, root))
        if found < SIZES[split]:
            raise NeedError(f"{name} has {found} {split} pictures here, and an accuracy needs all {SIZES[split]}")


def command(cell: TrainingCell, file: Path, root: str | None, device: str) -> str:
    """Return the command line that makes the cell's run on this machine and puts its result where it is found."""
    defaults, wanted = asdict(Settings()), asdict(placed(cell.settings, root, device))
    chosen = {name: value for name, value in wanted.items() if value != defaults[name] or name in SHOWN}
    words = ["gradveil", "train", "--out", f"runs/{key(cell)}"]
    for name, value in chosen.items():
        if value not in ("", 0, 0.0) or name == "seed":
            words += [f"--{name.replace('_', '-')}", f"{value}"]
    keep = ["mkdir", "-p", str(file.parent)], ["cp", f"runs/{key(cell)}/result.json", str(file)]
    return " && ".join(shlex.join(part) for part in (words, *keep))
