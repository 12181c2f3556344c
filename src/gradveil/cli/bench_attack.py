"""`gradveil bench attack`: one step of gradient matching on many pictures at once, against one after the other."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor, nn

from ..attacks.matching import GradientMatching
from ..attacks.matching_cost import MatchingCost
from ..attacks.objectives import total_variation
from ..attacks.optimise import Adam
from ..attacks.simulate import Vmapped
from ..attacks.space import box
from ..capture import captured, full_precision
from ..core import Observation
from ..record import command, environment, write_json
from . import out
from .attack_job import AttackJob, AttackSettings
from .bench import bench_app


@bench_app.command("attack")
def bench_attack(
    model: Annotated[str, typer.Option(help="Any model; empty: lenet on a CPU, resnet18 on a GPU.")] = "",
    data: Annotated[str, typer.Option(help="Any dataset.")] = "photos",
    pictures: Annotated[int, typer.Option(help="0: 8 on a CPU, 20 on a GPU.")] = 0,
    defense: Annotated[
        str, typer.Option(help="What the clients do; pruning adds a mask to every comparison.")
    ] = "none",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    steps: Annotated[int, typer.Option(help="Steps in each timing.")] = 20,
    repeats: Annotated[int, typer.Option(help="Timings of each way, taken in turns; the median counts.")] = 5,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Milliseconds of one step of IG for all pictures, against the plain loop that attacks one after the other.

    The loop is what published code does: autograd with a graph of its own for every picture, sums tensor by tensor,
    torch's Adam. All ways are timed in turns within this run, in true float32, and their slopes are compared first.
    """
    gpu = AttackJob(AttackSettings(device=device)).device.type == "cuda"
    count = pictures or (20 if gpu else 8)
    name = model or ("resnet18" if gpu else "lenet")
    job = AttackJob(AttackSettings(model=name, data=data, pictures=count, defense=defense, device=device))
    seen = [job.observe(i) for i in range(count)]
    with full_precision():
        ways, difference = _ways(seen)
        milliseconds: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(repeats):
            for way, step in ways.items():
                milliseconds[way].append(_time(step, steps, gpu))
    median = {way: statistics.median(values) for way, values in milliseconds.items()}
    loop = next(iter(median.values()))
    table = Table("way", "ms per step, all pictures", "x loop", title=f"IG on {name}, {count} pictures, {job.device}")
    for way, value in median.items():
        table.add_row(way, f"{value:.2f}", f"{loop / value:.1f}")
    out.print(table)
    memory = torch.cuda.max_memory_allocated() / 2**30 if gpu else None
    out.print(
        f"largest relative difference of the slopes: {difference:.1e}" + (f"; {memory:.1f} GiB" if memory else "")
    )
    if json_out:
        figures = {"model": name, "data": data, "pictures": count, "defense": defense, "milliseconds": milliseconds}
        figures |= {"slope_difference": difference, "gib": memory, "threads": torch.get_num_threads()}
        write_json(json_out, {**figures, "command": command(), "environment": environment()})


def _ways(seen: list[Observation]) -> tuple[dict[str, Callable[[], object]], float]:
    """Return the steps to time, the loop first, and how far their first slopes differ."""
    attack, first = GradientMatching(), seen[0]
    rng = torch.Generator().manual_seed(0)
    begin = torch.randn(len(seen), 1, *first.input_shape, generator=rng).to(next(iter(first.grads.values())).device)
    labels = torch.stack([one.labels for one in seen if one.labels is not None])
    targets = [attack.aim(one) for one in seen]
    cost = attack.cost(first, targets, labels)
    through_vmap = MatchingCost(Vmapped(first, False, False), targets, cost.tv.tolist(), labels, cost.terms)  # type: ignore[union-attr]
    loop = Loop(seen, begin, cost)
    steppers = {"layer rules": cost, "vmap": through_vmap}
    slopes = [_slope(c, begin) for c in steppers.values()]
    right = loop.slopes()
    difference = max(float((s - right).abs().max() / right.abs().max()) for s in slopes)
    ways: dict[str, Callable[[], object]] = {"one by one": loop}
    for name, one in steppers.items():
        adam = Adam(one, [begin], box(first), attack.descent())
        adam.prepare(0, ())
        ways[f"{name}, eager"] = adam
        if begin.is_cuda:
            graphed = Adam(one, [begin], box(first), attack.descent())
            graphed.prepare(0, ())
            ways[f"{name}, CUDA graph"] = captured(graphed, graphed.buffers)
    return ways, difference


def _slope(cost: MatchingCost, begin: Tensor) -> Tensor:
    x = begin.clone().requires_grad_()
    return torch.autograd.grad(cost([x], torch.zeros((), device=x.device))[0].sum(), x)[0]


class Loop:
    """IG as published: picture after picture, tensor by tensor."""

    def __init__(self, seen: list[Observation], begin: Tensor, cost: MatchingCost) -> None:
        self.seen = [replace(one, model=one.model.requires_grad_()) for one in seen]
        self.pictures = [x.clone().requires_grad_() for x in begin]
        self.optimizers = [torch.optim.Adam([x], lr=0.1) for x in self.pictures]
        self.box = box(seen[0])
        self.tv = [0.0] * len(seen) if cost.tv is None else cost.tv.tolist()
        weights = [None] * len(seen) if cost.compare.weight is None else list(cost.compare.weight)
        sizes = [g.numel() for g in seen[0].grads.values()]
        self.weights = [None if w is None else w.split(sizes) for w in weights]

    def slopes(self) -> Tensor:
        """Return the slopes at where the pictures are now."""
        return torch.stack([self._slope(i) for i in range(len(self.seen))])

    def __call__(self) -> None:
        """Take one step on every picture."""
        for i, (x, optimizer) in enumerate(zip(self.pictures, self.optimizers, strict=True)):
            x.grad = self._slope(i).sign()
            optimizer.step()
            with torch.no_grad():
                x.copy_(torch.clamp(x, *self.box))

    def _slope(self, i: int) -> Tensor:
        one, x, weights = self.seen[i], self.pictures[i], self.weights[i]
        loss = nn.functional.cross_entropy(one.model(x), one.labels)  # type: ignore[arg-type]
        mine = torch.autograd.grad(loss, list(one.model.parameters()), create_graph=True)
        product, own, known = (torch.zeros((), device=x.device) for _ in range(3))
        for k, (g, sent) in enumerate(zip(mine, one.grads.values(), strict=True)):
            shown = g if weights is None else g * weights[k].view_as(g)
            product = product + (shown * sent).sum()
            own = own + shown.square().sum()
            known = known + sent.square().sum()
        cost = 1 - product / (own.sqrt() * known.sqrt()) + self.tv[i] * total_variation(x[None])[0]
        slope: Tensor = torch.autograd.grad(cost, x)[0]
        return slope


def _time(step: Callable[[], object], steps: int, gpu: bool) -> float:
    step()
    if gpu:
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        step()
    if gpu:
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / steps
