"""`gradveil bench select`: the selection operator against the obvious ways to write it."""

import functools
import gc
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table
from torch import Tensor

from .. import models, select
from ..record import command, environment, write_json
from . import out
from .bench import bench_app

Pair = tuple[list[Tensor], list[Tensor]]


def per_layer_topk(values: list[Tensor], residuals: list[Tensor], bands: list[tuple[int, int]]) -> Pair:
    """The formulation most code uses: `torch.topk` tensor by tensor."""
    sent, held = [], []
    for value, residual, (top, kept) in zip(values, residuals, bands, strict=True):
        total = value + residual
        flat = total.reshape(-1)
        chosen = flat.abs().topk(top + kept).indices[top:]
        band = torch.zeros_like(flat).index_copy_(0, chosen, flat[chosen]).view(value.shape)
        sent.append(band)
        held.append(total - band)
    return sent, held


def plain_sort(values: list[Tensor], residuals: list[Tensor], bands: list[tuple[int, int]]) -> Pair:
    """The rule itself, by a stable sort of every tensor."""
    totals = [v + r for v, r in zip(values, residuals, strict=True)]
    sent = [torch.where(select.band_mask(t, *b), t, torch.zeros_like(t)) for t, b in zip(totals, bands, strict=True)]
    return sent, [t - s for t, s in zip(totals, sent, strict=True)]


def one_add(values: list[Tensor], residuals: list[Tensor], bands: list[tuple[int, int]]) -> Pair:
    """One addition over the same numbers: what the memory alone costs."""
    return [v + r for v, r in zip(values, residuals, strict=True)], residuals


def _milliseconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the best of `repeats` runs: on a shared machine the least disturbed one."""
    best = float("inf")
    for _ in range(repeats):
        gc.collect()
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            work()
            end.record()
            torch.cuda.synchronize()
            best = min(best, start.elapsed_time(end))
        else:
            began = time.perf_counter()
            work()
            best = min(best, (time.perf_counter() - began) * 1e3)
    return best


def _graphed(values: list[Tensor], residuals: list[Tensor], bands: list[tuple[int, int]]) -> Callable[[], None]:
    """Return the operator on fixed buffers inside a CUDA graph, as training uses it."""
    from ..select.gpu import Selector

    sent, held = [torch.empty_like(v) for v in values], [torch.empty_like(v) for v in values]
    selector = Selector(values, residuals, sent, held, bands)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        selector.run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selector.run()
    return graph.replay


@bench_app.command("select")
def bench_select(
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU")] = "cpu",
    repeats: Annotated[int, typer.Option(help="runs of each; the best one counts")] = 7,
    scale: Annotated[int, typer.Option(help="repeat the ResNet18 tensors this many times, to see growth")] = 1,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
) -> None:
    """Time dual pruning with error feedback on a gradient of ResNet18's shapes (62 tensors, 11.17 M numbers)."""
    where = torch.device(device)
    net = models.build("resnet18", num_classes=10, input_shape=(3, 32, 32), seed=0)
    rng = torch.Generator(where).manual_seed(0)
    shapes = [p.shape for p in net.parameters()] * scale
    # Heavy tails and a different scale for every layer, as gradients have.
    normal = functools.partial(torch.randn, generator=rng, device=where)
    values = [normal(s) ** 3 * (0.1 + torch.rand(1, generator=rng, device=where)) for s in shapes]
    residuals = [normal(s) for s in shapes]
    bands = [select.band(v.numel(), 0.05, 0.75) for v in values]
    entries = sum(v.numel() for v in values)

    select.prune_with_feedback(values, residuals, bands)  # compiles
    times = {
        "torch.add, tensor by tensor": _milliseconds(lambda: one_add(values, residuals, bands), where, repeats),
        "per-layer torch.topk": _milliseconds(lambda: per_layer_topk(values, residuals, bands), where, repeats),
        "per-layer sort": _milliseconds(lambda: plain_sort(values, residuals, bands), where, min(repeats, 3)),
        "gradveil": _milliseconds(lambda: select.prune_with_feedback(values, residuals, bands), where, repeats),
    }
    if where.type == "cuda":
        times["gradveil in a CUDA graph"] = _milliseconds(_graphed(values, residuals, bands), where, 50)
    extra = _extra_memory(values, residuals, bands, where)

    table = Table("method", "ms", "x faster than topk", "ns per entry", title=f"{entries:,} entries on {device}")
    for name, ms in times.items():
        ratio = times["per-layer torch.topk"] / ms
        table.add_row(name, f"{ms:.3f}", f"{ratio:.1f}", f"{ms * 1e6 / entries:.3f}")
    out.print(table)
    out.print(f"memory beyond inputs and outputs: {extra:.2f} of the gradient")
    if json_out:
        figures = {"entries": entries, "ms": times, "extra_memory": extra}
        write_json(json_out, {**figures, "command": command(), "environment": environment()})


def _extra_memory(
    values: list[Tensor], residuals: list[Tensor], bands: list[tuple[int, int]], where: torch.device
) -> float:
    """Return peak bytes beyond inputs and the two outputs, over the bytes of the gradient."""
    size = sum(v.numel() * v.element_size() for v in values)
    if where.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        select.prune_with_feedback(values, residuals, bands)
        peak = torch.cuda.max_memory_allocated() - before
    else:
        tracemalloc.start()  # numpy reports its arrays to it; the outputs are numpy arrays here
        select.prune_with_feedback(values, residuals, bands)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return max(peak - 2 * size, 0) / size
