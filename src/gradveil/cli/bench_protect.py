"""`gradveil bench protect`: what a client pays for `Veil.protect`, over the gradient it computes anyway."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch.nn.functional import cross_entropy

from .. import models
from ..core import Batch
from ..defenses import DEFENSES
from ..gradients import gradient, parameters
from ..record import command, environment, write_json
from ..spec import build
from ..training.job import pick_device
from ..veil import Veil
from . import out
from .bench import bench_app

DEFAULT = ("none", "dgp", "hardened(balance=0)", "hardened")
BARE = "gradient alone"


@bench_app.command("protect")
def bench_protect(
    model: Annotated[str, typer.Option(help="Any model, on random 32x32 pictures of ten classes.")] = "resnet18",
    batch_size: Annotated[int, typer.Option(min=1, help="Pictures in a batch.")] = 32,
    defense: Annotated[list[str] | None, typer.Option(help=f"Repeatable (default: {', '.join(DEFAULT)}).")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Uploads of each, in turn, after one to warm up.")] = 5,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Milliseconds of one upload by Veil.protect: gradient, defense, bytes.

    The defenses take turns; medians are told, over those of the gradient alone. The guard is left out: it looks once
    at every new model, not at every batch.
    """
    place, rng = pick_device(device), torch.Generator().manual_seed(0)
    net = models.build(model, num_classes=10, input_shape=(3, 32, 32), seed=0).to(place).train()
    inputs = torch.randn(batch_size, 3, 32, 32, generator=rng).to(place)
    batch = Batch(inputs, torch.randint(10, (batch_size,), generator=rng).to(place))
    work: dict[str, Callable[[], object]] = {BARE: lambda: gradient(net, cross_entropy, batch)}
    for name in defense or DEFAULT:
        veil = Veil(build(DEFENSES, name, "defense"), parameters(net), guard=None)
        work[name] = lambda veil=veil: veil.protect(net, cross_entropy, batch)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + 1):
        for name, upload in work.items():
            ms = _milliseconds(upload, place)
            if repeat:
                times[name].append(ms)
    bare = statistics.median(times[BARE])
    table = Table("upload", "ms", "x gradient alone", title=f"{model}, batch {batch_size}, {place}")
    for name, each in times.items():
        ms = statistics.median(each)
        table.add_row(name, f"{ms:.1f} ({min(each):.1f} to {max(each):.1f})", f"{ms / bare:.2f}")
    out.print(table)
    if json_out:
        setting = {"model": model, "batch_size": batch_size, "device": str(place)}
        write_json(json_out, {**setting, "ms": times, "command": command(), "environment": environment()})


def _milliseconds(upload: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    upload()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started)
