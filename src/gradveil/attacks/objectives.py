"""What an attacker minimises: pure functions, one value per row.

`mine` and `sent` are `[N, P]`: one row per candidate, all tensors flat in one vector. A masked or weighted comparison
multiplies both by the same weights first; 0 leaves a coordinate out of every product and every length.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

FLOOR = 1e-8  # of every length in a denominator: a defense that sends only zeros must not give NaN


class _Inner(torch.autograd.Function):
    """`sum a b` and `sum a^2` per row with `b` constant; written out because each pass over 10^8 numbers counts."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(mine, sent)
        return (mine * sent).sum(1), torch.linalg.vector_norm(mine, dim=1).square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_cross: Tensor, d_square: Tensor) -> tuple[Tensor, None]:
        mine, sent = ctx.saved_tensors
        return torch.addcmul(sent * d_cross[:, None], mine, 2 * d_square[:, None]), None


def inner(mine: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    """Return per row `sum mine * sent` and `sum mine^2`; differentiable once, in `mine` only."""
    cross, square = _Inner.apply(mine, sent)  # type: ignore[no-untyped-call]
    return cross, square


def cosine(mine: Tensor, sent: Tensor, length: Tensor | None = None) -> Tensor:
    """Return 1 - the cosine of the angle between the rows, over all tensors together; `length` is that of `sent`.

    >>> cosine(torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([0.8039])
    >>> mask = torch.tensor([[1.0, 0.0]])
    >>> cosine(mask * torch.tensor([[1.0, 5.0]]), torch.tensor([[2.0, 0.0]]))
    tensor([0.])
    """
    cross, square = inner(mine, sent)
    known: Tensor = torch.linalg.vector_norm(sent, dim=1) if length is None else length
    return 1 - cross / (_root(square) * known.clamp_min(FLOOR))


def l2(mine: Tensor, sent: Tensor, normalise: bool = False) -> Tensor:
    """Return the squared distance of the rows, divided by the squared length of `sent` if `normalise`."""
    square = (mine - sent).square().sum(1)
    return square / sent.square().sum(1).clamp_min(FLOOR) if normalise else square


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
