"""The selection rule, written plainly: the oracle of every faster form.

Order the entries of one tensor by falling magnitude, equal magnitudes by rising index. The first `top` entries and
the last `bottom` entries are removed; what is left is the band that is sent.
"""

import math

import torch
from torch import Tensor

from .. import check

ROUNDINGS = ("floor", "round", "ceil")


def share_count(n: int, share: float, rounding: str) -> int:
    """Return how many of `n` entries a share stands for; 1e-9 forgives 0.29 * 100 = 28.999999999999996.

    >>> share_count(10, 0.05, "floor"), share_count(10, 0.05, "ceil"), share_count(100, 0.29, "floor")
    (0, 1, 29)
    """
    exact = n * share
    if rounding == "floor":
        return math.floor(exact + 1e-9)
    if rounding == "ceil":
        return math.ceil(exact - 1e-9)
    return math.floor(exact + 0.5)


def band(n: int, top: float, bottom: float, rounding: str = "floor") -> tuple[int, int]:
    """Return (entries removed at the top, entries sent) for a tensor of `n` entries.

    At least one entry is sent when n >= 1: first the bottom count gives way, then the top count.

    >>> band(100, 0.05, 0.75), band(10, 0.05, 0.75), band(10, 0.05, 0.75, "ceil"), band(1, 0.05, 0.75, "ceil")
    ((5, 20), (0, 3), (1, 1), (0, 1))
    >>> band(0, 0.05, 0.75)
    (0, 0)
    """
    check.one_of(ROUNDINGS, rounding=rounding)
    if n == 0:
        return 0, 0
    top_count = min(share_count(n, top, rounding), n - 1)
    bottom_count = min(share_count(n, bottom, rounding), n - 1 - top_count)
    return top_count, n - top_count - bottom_count


def band_mask(values: Tensor, top_count: int, kept: int) -> Tensor:
    """Return True where an entry ranks in [top_count, top_count + kept)."""
    flat = values.reshape(-1)
    # A stable ascending sort of the negated magnitudes keeps equal ones in index order.
    order = torch.argsort(-flat.abs().double(), stable=True)
    mask = torch.zeros(flat.numel(), dtype=torch.bool, device=values.device)
    mask[order[top_count : top_count + kept]] = True
    return mask.view(values.shape)
