"""Augmentation of whole batches."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check


def random_crop_flip(images: Tensor, rng: torch.Generator, pad: int = 4) -> Tensor:
    """Shift each picture by up to `pad` pixels over a zero border, and mirror every second one, at random.

    Works on any dtype and device; `rng` may live on another device than the pictures. Zero is black for bytes and the
    mean colour for normalised inputs.
    """
    check.at_least(0, pad=pad)
    n, channels, height, width = images.shape

    def draw(high: int) -> Tensor:
        return torch.randint(high, (n, 1), generator=rng, device=rng.device).to(images.device)

    def span(length: int) -> Tensor:
        return torch.arange(length, device=images.device)

    rows = draw(2 * pad + 1) + span(height)
    columns = torch.where(draw(2) == 1, width - 1 - span(width), span(width)) + draw(2 * pad + 1)
    padded = F.pad(images, (pad, pad, pad, pad))
    which = (span(n).view(n, 1, 1, 1), span(channels).view(1, channels, 1, 1))
    return padded[*which, rows.view(n, 1, height, 1), columns.view(n, 1, 1, width)]
