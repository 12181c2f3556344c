"""Sums over rows of gradients on a GPU, one pass forward and one back. Importing this file needs Triton.

Ten candidates of ResNet18 are 10^8 numbers: written as tensor operations, comparing them with an upload reads and
writes them seventeen times, which is a quarter of an attack's step.
"""
# mypy: ignore-errors

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sums(
    mine, sent, weight, sums, length, blocks, WEIGHTED: tl.constexpr, DISTANCE: tl.constexpr, BLOCK: tl.constexpr
):
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    i = block * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    a = tl.load(mine + row * length + i, mask=inside, other=0.0)
    b = tl.load(sent + row * length + i, mask=inside, other=0.0)
    if WEIGHTED:
        a *= tl.load(weight + row * length + i, mask=inside, other=0.0)
    out = sums + 2 * (row * blocks + block)
    if DISTANCE:
        tl.store(out, tl.sum((a - b) * (a - b), axis=0))
    else:
        tl.store(out, tl.sum(a * b, axis=0))
        tl.store(out + 1, tl.sum(a * a, axis=0))


@triton.jit
def _slopes(
    mine, sent, weight, given, slopes, length, WEIGHTED: tl.constexpr, DISTANCE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < length
    a = tl.load(mine + row * length + i, mask=inside, other=0.0)
    b = tl.load(sent + row * length + i, mask=inside, other=0.0)
    first = tl.load(given + 2 * row)
    w = tl.full([BLOCK], 1.0, tl.float32)
    if WEIGHTED:
        w = tl.load(weight + row * length + i, mask=inside, other=0.0)
        a *= w
    slope = 2 * first * (a - b) if DISTANCE else first * b + 2 * tl.load(given + 2 * row + 1) * a
    tl.store(slopes + row * length + i, slope * w, mask=inside)


def sums(mine: Tensor, sent: Tensor, weight: Tensor | None, distance: bool) -> Tensor:
    """Return `[N, 2]`: per row `sum w a b` and `sum (w a)^2`, or `sum (w a - b)^2` and 0 for a distance."""
    rows, length = mine.shape
    blocks = triton.cdiv(length, BLOCK)
    parts = torch.zeros(rows, blocks, 2, device=mine.device)
    kinds = {"WEIGHTED": weight is not None, "DISTANCE": distance, "BLOCK": BLOCK, "num_warps": 8}
    _sums[(blocks, rows)](mine, sent, sent if weight is None else weight, parts, length, blocks, **kinds)
    return parts.sum(1)


def slopes(mine: Tensor, sent: Tensor, weight: Tensor | None, given: Tensor, distance: bool) -> Tensor:
    """Return the slope in `mine` of what `sums` returns, for the slopes `given [N, 2]` of its result."""
    rows, length = mine.shape
    out = torch.empty_like(mine)
    kinds = {"WEIGHTED": weight is not None, "DISTANCE": distance, "BLOCK": BLOCK, "num_warps": 8}
    grid = (triton.cdiv(length, BLOCK), rows)
    _slopes[grid](mine, sent, sent if weight is None else weight, given, out, length, **kinds)
    return out
