"""The space an attacker searches: model inputs whose pixels lie in 0..1."""

import torch
from torch import Tensor

from ..core import Observation


def device_of(seen: Observation) -> torch.device:
    """Return where the gradient lies; the attack runs there."""
    return next(iter(seen.grads.values())).device


def box(seen: Observation) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest model input per channel, shaped to broadcast over a batch of inputs."""
    device = device_of(seen)
    shape = (1, -1, *[1] * (len(seen.input_shape) - 1))
    mean = torch.tensor(seen.mean, device=device).view(shape)
    std = torch.tensor(seen.std, device=device).view(shape)
    return (0.0 - mean) / std, (1.0 - mean) / std
