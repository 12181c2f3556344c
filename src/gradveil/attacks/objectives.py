"""What an attacker minimises: pure functions, one value per row.

`mine` and `sent` are `[N, P]`: one row per candidate, all tensors flat in one vector. A masked or weighted comparison
multiplies `mine` by the weights that `sent` was multiplied by before; 0 leaves a coordinate out of every product and
every length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..select import gpu

FLOOR = 1e-8  # of every length in a denominator: a defense that sends only zeros must not give NaN
BLOCK = 2**16  # numbers whose squares are added up in float32: over 10^7, on a CPU, that misses some of the sum


class _Sums(torch.autograd.Function):
    """Per row `sum w a b` and `sum (w a)^2`, or `sum (w a - b)^2` and 0; written out because each pass over 10^8
    numbers counts."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, sent: Tensor, weight: Tensor | None, distance: bool) -> Tensor:
        ctx.distance = distance
        ctx.save_for_backward(mine, sent, weight)
        if _fusible(mine, sent, weight):
            from . import fused

            found: Tensor = fused.sums(mine, sent, weight, distance)
            return found
        seen = mine if weight is None else mine * weight
        if distance:
            square = (seen - sent).square().sum(1)
            return torch.stack([square, torch.zeros_like(square)], 1)
        return torch.stack([(seen * sent).sum(1), length_of(seen).square()], 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None, None, None]:
        mine, sent, weight = ctx.saved_tensors
        if _fusible(mine, sent, weight):
            from . import fused

            return fused.slopes(mine, sent, weight, given.contiguous(), ctx.distance), None, None, None
        first, second = given[:, :1], 2 * given[:, 1:]
        seen = mine if weight is None else mine * weight
        slope = (seen - sent) * (2 * first) if ctx.distance else torch.addcmul(sent * first, seen, second)
        return slope if weight is None else slope * weight, None, None, None


def _fusible(*tensors: Tensor | None) -> bool:
    alike = all(t is None or (t.is_cuda and t.dtype == torch.float32 and t.is_contiguous()) for t in tensors)
    return gpu.AVAILABLE and alike


def _sums(mine: Tensor, sent: Tensor, weight: Tensor | None, distance: bool) -> Tensor:
    found: Tensor = _Sums.apply(mine, sent, weight, distance)  # type: ignore[no-untyped-call]
    return found


def length_of(rows: Tensor) -> Tensor:
    """Return the Euclidean length of every row, to float32's last digits however long they are."""
    parts = [torch.linalg.vector_norm(part, dim=1) for part in rows.split(BLOCK, 1)]
    length: Tensor = torch.linalg.vector_norm(torch.stack(parts, 1), dim=1)
    return length


def cosine(mine: Tensor, sent: Tensor, length: Tensor | None = None, weight: Tensor | None = None) -> Tensor:
    """Return 1 - the cosine of the angle between the rows of `weight * mine` and `sent`, over all tensors together.

    Differentiable once, in `mine` only. `length` is that of `sent`.

    >>> cosine(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([0.8039])
    >>> cosine(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 0.0]]), weight=torch.tensor([[1.0, 0.0]]))
    tensor([0.])
    """
    cross, square = _sums(mine, sent, weight, False).unbind(1)
    known = length_of(sent) if length is None else length
    return 1 - cross / (_root(square) * known.clamp_min(FLOOR))


def l2(mine: Tensor, sent: Tensor, normalise: bool = False, weight: Tensor | None = None) -> Tensor:
    """Return the squared distance of the rows of `weight * mine` and `sent`, divided by the squared length of `sent`
    if `normalise`; differentiable once, in `mine` only."""
    square = _sums(mine, sent, weight, True)[:, 0]
    return square / sent.square().sum(1).clamp_min(FLOOR**2) if normalise else square


def total_variation(x: Tensor) -> Tensor:
    """Return, per row of pictures `[N, B, C, H, W]`, the mean step to the right plus the mean step down."""
    right = (x[..., 1:] - x[..., :-1]).abs().flatten(1).mean(1)
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().flatten(1).mean(1)
    return right + down


def band_violation(mine: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Return how deep each unsent entry lies inside the band that was sent: 0 where it agrees with not being sent.

    `low` and `high` are the smallest and largest magnitude sent. Where nothing was removed at the top (Top-k) `high`
    is infinite, and the distance above `low` counts.
    """
    size = mine.abs()
    return torch.minimum(size - low, high - size).clamp_min(0)


def statistics_gap(activation: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Return per row how far the channel statistics of `[N, B, C, ...]` are from a BatchNorm layer's own."""
    by_channel = activation.transpose(1, 2).flatten(2)
    gap_mean = by_channel.mean(2) - mean
    gap_var = by_channel.var(2, unbiased=False) - var
    return _root(gap_mean.square().sum(1)) + _root(gap_var.square().sum(1))


def _root(square: Tensor) -> Tensor:
    # Floored under the root: the slope of a bare root is infinite at 0.
    return square.clamp_min(FLOOR**2).sqrt()
