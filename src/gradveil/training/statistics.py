"""BatchNorm running statistics (and any other buffer) of users who share one model."""

from collections.abc import Sequence

import torch
from torch import nn

from ..core import Tensors


def snapshot(model: nn.Module) -> Tensors:
    """Return a copy of all buffers."""
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def restore(model: nn.Module, saved: Tensors) -> None:
    """Write buffers back."""
    for name, buffer in model.named_buffers():
        buffer.copy_(saved[name])


def floating(buffers: Tensors) -> Tensors:
    """Return the buffers that hold statistics, not counters: what a user would have to send."""
    return {name: b for name, b in buffers.items() if b.is_floating_point()}


def merge(parts: Sequence[Tensors], how: str) -> Tensors:
    """Return the common buffers after a round: the mean of the statistics, or those of the first participant."""
    if how == "first" or len(parts) == 1:
        return parts[0]
    return {
        name: torch.stack([part[name] for part in parts]).mean(0) if first.is_floating_point() else first
        for name, first in parts[0].items()
    }
