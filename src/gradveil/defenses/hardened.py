"""Hardened release: what leaves the client is drowned in noise that the client itself takes back later.

Dual pruning hides both ends of the magnitudes by not sending them, but the positions that do arrive are enough to
find the picture. Here every value that leaves carries noise many times the size of the gradient, and is rounded to a
few levels: small entries are lost in the noise and large ones saturate, so both ends are hidden again, this time also
from an attacker who knows the mechanism. Noise and rounding stay in the client's residual and are subtracted from
what it sends next, so they never add up: only the newest noise separates the model from undefended training.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .. import check, tree
from ..core import Defense, Grads, State, Step
from ..errors import StateError

# The best levels for a normal variable of unit variance (Lloyd and Max), positive half, and the error they leave.
_LEVELS = {1: (0.7979,), 2: (0.4528, 1.5104), 3: (0.2451, 0.7560, 1.3439, 2.1520)}
_ERROR = {0: 0.0, 1: 0.3634, 2: 0.1175, 3: 0.0345}


@dataclass(frozen=True)
class Hardened(Defense):
    """Send gradient + residual + noise, rounded to few levels; keep the difference as the next residual.

    `examples` is how many private examples are mixed before anything leaves: a client with smaller batches adds up
    gradients and uploads nothing until then. `noise` is the standard deviation of the noise in units of the RMS of
    the gradient tensor. `bits` is what one entry costs on the wire: 1 to 3, or 0 for unrounded floats. `memory` is
    the share of the noise that is taken back later; 1 costs training least, less than 1 bounds what any number of
    later rounds can add about one batch.

    Guarantees: one upload carries at most `theory.release_information(n, noise)` nats about all its examples
    together. The residual stays within a few multiples of the noise. Does not guarantee differential privacy: single
    examples are not clipped and the scale of the noise follows the data; and whoever holds candidate pictures can
    still test whether one of them was used. docs/hardened.md has the attacks it was measured against.
    """

    noise: float = 64.0
    examples: int = 32
    bits: int = 2
    memory: float = 1.0

    def __post_init__(self) -> None:
        check.positive(noise=self.noise)
        check.at_least(1, examples=self.examples)
        check.fraction(memory=self.memory)
        if self.bits not in _ERROR:
            raise ValueError(f"bits must be 0, 1, 2 or 3, got {self.bits}")

    def init(self, params: Grads) -> State:
        # Examples and gradients since the last upload; beside the tensors, so that all state is in one place.
        zero = torch.zeros((), dtype=torch.int64, device=next((p.device for p in params.values()), None))
        return {**tree.under("residual", tree.zeros_like(params)), "mixed": zero, "gradients": zero.clone()}

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        residual = tree.only("residual", state)
        if residual.keys() != grads.keys():
            raise StateError("the residual does not fit this gradient: start from defense.init(params)")
        count = 1 if self.examples == 1 else step.require_count(self.key())
        mixed, gradients = state["mixed"] + count, state["gradients"] + 1
        if int(mixed) < self.examples:
            held = tree.under("residual", tree.add(residual, grads))
            return tree.zeros_like(grads), {**held, "mixed": mixed, "gradients": gradients}
        sent, held = {}, {}
        for name, g in grads.items():
            normal = torch.randn(g.shape, generator=step.rng, device=step.rng.device).to(g)
            flat = [t.reshape(1, -1) for t in (g, residual[name], normal)]
            out, rest = self.release(flat[0], flat[1], flat[2], int(gradients))
            sent[name], held[name] = out.view(g.shape), rest.view(g.shape)
        none = torch.zeros_like(mixed)
        return sent, {**tree.under("residual", held), "mixed": none, "gradients": none.clone()}

    def release(self, grads: Tensor, residual: Tensor, normal: Tensor, gradients: int = 1) -> tuple[Tensor, Tensor]:
        """Return (sent, next residual) of one tensor of several clients `[users, n]`, given standard normal noise.

        Where several gradients were mixed, the noise is as if they all pointed the same way: never too small.
        """
        if not grads.numel():
            return grads, residual
        scale = self.noise * gradients * grads.square().mean(-1, keepdim=True).sqrt()
        noise = normal * scale
        total = grads + residual
        sent = self._round(total + noise, scale)
        held = total - sent
        return sent, held if self.memory == 1 else held.add_(noise, alpha=1 - self.memory)

    def residual(self, state: State) -> Grads | None:
        return tree.only("residual", state)

    def take_back(self, sent: Grads, state: State) -> State:
        return {**state, **tree.under("residual", tree.add(tree.only("residual", state), sent))}

    def levels(self) -> list[float]:
        """Return the magnitudes that can be sent, in units of the noise; none if values are not rounded."""
        if not self.bits:
            return []
        # In the long run a value is this noise, the last one taken back, and the rounding of both.
        spread = math.sqrt((2 + self.noise**-2) / (1 - _ERROR[self.bits]))
        return [level * spread for level in _LEVELS[self.bits]]

    def _round(self, values: Tensor, scale: Tensor) -> Tensor:
        levels = self.levels()
        if not levels:
            return values
        size = values.abs()
        rounded = torch.full_like(values, levels[0])
        for low, high in pairwise(levels):
            rounded += (size > scale * (low + high) / 2) * (high - low)
        return torch.copysign(rounded * scale, values)
