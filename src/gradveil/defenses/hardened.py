"""Hardened release: what leaves the client is drowned in noise that the client itself takes back later.

Dual pruning hides the ends of the magnitudes by not sending them; the positions that do arrive are still enough to
find the picture. Here every value that leaves carries noise as large as the gradient itself, and a quantiser of few
levels, so that small entries are lost in the noise and large ones saturate: both ends are hidden again, this time
also from an attacker who knows the mechanism. The noise and the rounding stay in the residual, so training gets them
back and only the newest noise ever separates the model from undefended training.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check, tree
from ..core import Defense, Grads, State, Step
from ..errors import StateError

# Optimal levels for a normal variable of unit variance (Lloyd and Max), positive half.
_LEVELS = {1: (0.7979,), 2: (0.4528, 1.5104), 3: (0.2451, 0.7560, 1.3439, 2.1520)}


@dataclass(frozen=True)
class Hardened(Defense):
    """Send gradient + residual + noise, rounded to few levels; keep the difference as the next residual.

    `noise` is the standard deviation of the noise in units of the RMS of the gradient tensor; `bits` the levels sent
    (1 to 3 bits, 0 for unrounded float32); `memory` the share of the noise that is taken back later (1: all of it;
    below 1 what an attacker can learn about one batch stays bounded over any number of rounds).
    """

    noise: float = 4.0
    bits: int = 2
    memory: float = 1.0

    def __post_init__(self) -> None:
        check.non_negative(noise=self.noise)
        check.fraction(memory=self.memory)
        if self.bits not in (0, *_LEVELS):
            raise ValueError(f"bits must be 0, 1, 2 or 3, got {self.bits}")

    def init(self, params: Grads) -> State:
        return tree.under("residual", tree.zeros_like(params))

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        sent, held = {}, {}
        for name, g in grads.items():
            if f"residual.{name}" not in state:
                raise StateError(f"the residual does not fit this gradient ({name}): start from defense.init(params)")
            total = g + state[f"residual.{name}"]
            noise = torch.randn(g.shape, generator=step.rng, device=step.rng.device).to(g)
            noise *= self.noise * _rms(g)
            sent[name] = self._round(total + noise)
            held[name] = total - sent[name] + noise * (1 - self.memory)
        return sent, tree.under("residual", held)

    def residual(self, state: State) -> Grads | None:
        return tree.only("residual", state)

    def take_back(self, sent: Grads, state: State) -> State:
        return tree.under("residual", tree.add(tree.only("residual", state), sent))

    def _round(self, values: Tensor) -> Tensor:
        if not self.bits or not values.numel():
            return values
        levels = torch.tensor(_LEVELS[self.bits], device=values.device, dtype=values.dtype) * _rms(values)
        edges = (levels[1:] + levels[:-1]) / 2
        return torch.where(values < 0, -1, 1).to(values) * levels[torch.bucketize(values.abs(), edges)]


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt() if values.numel() else values.sum()
