"""Weights of trained models, for attacks after some epochs: trained once, kept, and gone on from."""

import shutil
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import torch

from .. import data as datasets
from ..core import Tensors
from ..errors import ConfigError
from ..training import Settings, load_checkpoint
from ..training.job import pick_device
from ..training.run import CHECKPOINT, run
from .cells import AttackCell
from .scales import Scale

RUNS = Path("runs") / "reproduce"


@lru_cache(maxsize=4)
def copy_of(data: str, root: str | None) -> str:
    """Return a word for the copy of a dataset that is at hand: runs on two copies must not go on from each other."""
    return datasets.load(data, split="train", root=root).digest[:8]


def placed(settings: Settings, root: str | None, device: str) -> Settings:
    """Return the settings for this machine. On a CPU bf16 is slower than float32; but for LeNet both end alike."""
    precision = settings.precision if pick_device(device).type == "cuda" else "float32"
    return replace(settings, root=root or "", device=device, precision=precision)


def trained_weights(
    cell: AttackCell, scale: Scale, root: str | None, device: torch.device, minutes: float | None
) -> Tensors:
    """Return the undefended model's weights after the cell's epochs; every defense is attacked on the same ones.

    Training continues from the run of fewer epochs if there is one, and is found again by the next cell. Raises
    `TimeoutError` if it is not done after `minutes`; the next call goes on.
    """
    settings = Settings(
        model=cell.model,
        data=cell.data,
        defense="none",
        epochs=cell.epochs,
        eval_every=cell.epochs,
        seed=cell.seed,
        **scale.weights,
    )
    base = f"weights_{scale.name}_{cell.model}_{cell.data}_{copy_of(cell.data, root)}_seed{cell.seed}"
    folder = RUNS / f"{base}_epochs{cell.epochs}"
    if not folder.exists():
        earlier = [e for e in scale.epochs if e < cell.epochs and (RUNS / f"{base}_epochs{e}" / CHECKPOINT).exists()]
        if earlier:
            shutil.copytree(RUNS / f"{base}_epochs{max(earlier)}", folder)
    result = run(placed(settings, root, str(device)), folder, resume=True, minutes=minutes)
    if result["status"] == "stopped":
        raise TimeoutError(f"training stopped after {result['rounds_done']} rounds")
    if result["status"] != "finished":
        raise ConfigError(f"training for {cell.epochs} epochs ended as {result['status']}: see {folder}")
    return load_checkpoint(folder / CHECKPOINT).model
