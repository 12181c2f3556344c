"""Noise added to what is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check
from ..core import Defense, Grads, State, Step
from ..secret import SecretGenerator


def normal_like(g: Tensor, rng: torch.Generator) -> Tensor:
    """Return standard normal noise in the shape, type and place of `g`, drawn where the generator lives."""
    if isinstance(rng, SecretGenerator):
        drawn = rng.normal(g.shape)
    else:
        drawn = torch.randn(g.shape, generator=rng, device=rng.device)
    return drawn.to(g.device, g.dtype)


@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Add N(0, std^2) to every entry: the paper's "DP" with `std` 1e-2.

    Guarantees: independent noise, new every round. Does not guarantee differential privacy: nothing is clipped and
    nothing is accounted (`DPNoise` and `ClipNoise` do both). `std` is absolute, so the same value is nothing on one
    model and drowns the gradient of another. `sent_only` leaves zeros alone, so a pruned gradient stays sparse.

    Compose: after pruning, `Chain(ErrorFeedback(TopK()), GaussianNoise(sent_only=True))`; never inside ErrorFeedback.
    """

    std: float = 1e-2
    sent_only: bool = False

    def __post_init__(self) -> None:
        check.non_negative(std=self.std)

    @property
    def noisy(self) -> bool:
        return True

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        out = {}
        for name, g in grads.items():
            noise = normal_like(g, step.rng) * self.std
            out[name] = g + (torch.where(g == 0, torch.zeros_like(g), noise) if self.sent_only else noise)
        return out, state
