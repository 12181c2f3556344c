"""Exact selection of a band of magnitudes, layer by layer."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .plain import band, band_mask

__all__ = ["band", "band_mask", "prune", "prune_with_feedback"]


def prune(values: Sequence[Tensor], bands: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return each tensor with everything outside its band set to zero."""
    return [torch.where(band_mask(v, *b), v, torch.zeros_like(v)) for v, b in zip(values, bands, strict=True)]


def prune_with_feedback(
    values: Sequence[Tensor], residuals: Sequence[Tensor], bands: Sequence[tuple[int, int]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (sent, next residual) of value + residual."""
    totals = [v + r for v, r in zip(values, residuals, strict=True)]
    sent = prune(totals, bands)
    return sent, [t - s for t, s in zip(totals, sent, strict=True)]
