"""Noise added to what is sent."""

from dataclasses import dataclass

import torch

from .. import check
from ..core import Defense, Grads, State, Step


@dataclass(frozen=True)
class GaussianNoise(Defense):
    """Add N(0, std^2) to every entry: the paper's "DP" with `std` 1e-2.

    Guarantees: independent noise, new every round. Does not guarantee differential privacy: nothing is clipped and
    nothing is accounted. `sent_only` leaves zeros alone, so a pruned gradient stays sparse.
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
            noise = torch.randn(g.shape, generator=step.rng, device=step.rng.device).to(g.device, g.dtype) * self.std
            out[name] = g + (torch.where(g == 0, torch.zeros_like(g), noise) if self.sent_only else noise)
        return out, state
