"""The space an attacker searches: model inputs whose pixels lie in 0..1."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

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


def unit(seen: Observation) -> float:
    """Return about how many gradients an upload holds: an update is so many times the local learning rate."""
    return 1.0 if seen.local_lr is None else seen.local_steps * seen.local_lr


def start(seen: Observation, init: str, rng: torch.Generator) -> Tensor:
    """Return where the search begins: `[B, ...]` standard normal model inputs, or pixels uniform in 0..1."""
    shape = (seen.num_examples, *seen.input_shape)
    if init == "normal":
        return torch.randn(shape, generator=rng, device=rng.device).to(device_of(seen))
    low, high = box(seen)
    return low + torch.rand(shape, generator=rng, device=rng.device).to(low.device) * (high - low)


def enlarge(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return small pictures `[N, B, C, h, w]` at the size of an input `(C, H, W)`, bilinearly."""
    flat = nn.functional.interpolate(x.flatten(0, 1), size=shape[1:], mode="bilinear", align_corners=False)
    return flat.view(*x.shape[:2], *shape)


def alike(seen: Sequence[Observation], *, any_defense: bool = False) -> list[list[int]]:
    """Return the indices grouped by client: those with equal weights, shapes and settings can be attacked together.

    `any_defense` leaves the defense out of it.
    """
    if any_defense:
        seen = [replace(one, defense=None) for one in seen]
    groups: list[list[int]] = []
    for i, one in enumerate(seen):
        for group in groups:
            if _equal(seen[group[0]], one):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _equal(a: Observation, b: Observation) -> bool:
    def facts(o: Observation) -> tuple[object, ...]:
        shapes = [(name, g.shape, g.device) for name, g in o.grads.items()]
        client = (o.defense, o.loss_fn, o.local_steps, o.local_lr, o.model.training, type(o.model), str(o.model))
        return (*client, o.num_examples, o.input_shape, o.num_classes, o.mean, o.std, shapes)

    if facts(a) != facts(b):
        return False
    mine, other = a.model.state_dict(), b.model.state_dict()
    return mine.keys() == other.keys() and all(torch.equal(t, other[name]) for name, t in mine.items())


def trained_statistics(model: nn.Module) -> bool:
    """Say whether the BatchNorm running statistics come from data: those a layer is born with fit no picture."""
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    return any(bool((m.running_mean != 0).any()) for m in norms if m.running_mean is not None)
