"""The core idea: keep a band of magnitudes of each gradient tensor and drop both ends.

The large entries carry most of what an attacker needs, the small ones most of the bytes. Dual gradient pruning (DGP,
AAAI 2024) removes both. Wrapped in `ErrorFeedback`, what is removed is added to the next gradient, so training still
gets it in the end. `dgp()` in `gradveil.defenses` is exactly the paper's method.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check, select
from ..core import Defense, Grads, State, Step


class _BandPrune(Defense):
    """Shared by the operators that send a band of ranks of every tensor."""

    @abstractmethod
    def band(self, n: int) -> tuple[int, int]:
        """Return (entries removed at the top, entries sent) for a tensor of `n` entries."""

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        sent = select.prune(list(grads.values()), self._bands(grads))
        return dict(zip(grads, sent, strict=True)), state

    def feed_back(self, grads: Grads, residual: Grads, state: State, step: Step) -> tuple[Grads, Grads, State]:
        old = [residual[name] for name in grads]
        sent, new = select.prune_with_feedback(list(grads.values()), old, self._bands(grads))
        return dict(zip(grads, sent, strict=True)), dict(zip(grads, new, strict=True)), state

    def _bands(self, grads: Grads) -> list[tuple[int, int]]:
        return [self.band(g.numel()) for g in grads.values()]


@dataclass(frozen=True)
class DualPrune(_BandPrune):
    """Remove the `top` share of each tensor by magnitude and the `bottom` share; send the rest unchanged.

    Guarantees: exactly `band(n, top, bottom, rounding)` entries of each tensor are sent, ties broken by index, at
    least one. Sent values keep sign and value. Does not guarantee privacy: an attacker who masks its own gradient
    with the positions that arrived gets the picture back. Use a hardened defense against such an attacker.

    `rounding="ceil"` also removes the largest entry of tensors under 20 entries, such as a 10-class bias, whose
    largest entry names the label. `excess="clip"` is our bounded variant: the top entries are sent too, but clipped
    to the largest magnitude of the band, so inside error feedback they drain instead of piling up for ever. That
    sends `top` more entries; raise `bottom` by as much for the same bytes.

    >>> step = Step(rng=torch.Generator())
    >>> sent, _ = DualPrune(top=0.25, bottom=0.5).apply({"w": torch.tensor([4.0, -3.0, 2.0, 1.0])}, {}, step)
    >>> sent["w"]
    tensor([ 0., -3.,  0.,  0.])

    Reference: Xue et al., "Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks".
    """

    top: float = 0.05
    bottom: float = 0.75
    rounding: str = "floor"
    excess: str = "hold"

    def __post_init__(self) -> None:
        check.fraction(top=self.top, bottom=self.bottom)
        check.one_of(("floor", "round", "ceil"), rounding=self.rounding)
        check.one_of(("hold", "clip"), excess=self.excess)
        if self.top + self.bottom >= 1:
            raise ValueError(f"top + bottom must be below 1 or nothing is sent, got {self.top} + {self.bottom}")

    def band(self, n: int) -> tuple[int, int]:
        """Return (entries removed at the top, entries sent) for a tensor of `n` entries."""
        return select.band(n, self.top, self.bottom, self.rounding)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        sent, state = super().apply(grads, state, step)
        return (self._with_clipped_top(grads, sent) if self.excess == "clip" else sent), state

    def feed_back(self, grads: Grads, residual: Grads, state: State, step: Step) -> tuple[Grads, Grads, State]:
        if self.excess == "hold":
            return super().feed_back(grads, residual, state, step)
        return Defense.feed_back(self, grads, residual, state, step)

    def _with_clipped_top(self, grads: Grads, band: Grads) -> Grads:
        from_top = [(0, top + kept) for top, kept in self._bands(grads)]
        kept = select.prune(list(grads.values()), from_top)
        limits = [_limit(b, k) for b, k in zip(band.values(), kept, strict=True)]
        return {name: k.clamp(-limit, limit) for name, k, limit in zip(grads, kept, limits, strict=True)}


def _limit(band: Tensor, kept: Tensor) -> Tensor:
    """Return the largest size in the band; where that holds only zeros, the smallest at the top: something must go."""
    if not band.numel():
        return band.sum()
    largest, sizes = band.abs().max(), kept.abs()
    smallest = torch.where(sizes > 0, sizes, sizes.max()).min()
    return torch.where(largest > 0, largest, smallest)


@dataclass(frozen=True)
class TopK(_BandPrune):
    """Send the `keep` share of each tensor with the largest magnitudes, at least one entry."""

    keep: float = 0.2

    def __post_init__(self) -> None:
        check.fraction(keep=self.keep)
        check.positive(keep=self.keep)

    def band(self, n: int) -> tuple[int, int]:
        """Return (0, entries sent): Top-k is dual pruning without a top."""
        return select.band(n, 0.0, 1.0 - self.keep)


@dataclass(frozen=True)
class RandomK(Defense):
    """Send a random `keep` share of each tensor, drawn anew every round; the positions say nothing about the data."""

    keep: float = 0.2

    def __post_init__(self) -> None:
        check.fraction(keep=self.keep)
        check.positive(keep=self.keep)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return {name: self._sample(g, step.rng) for name, g in grads.items()}, state

    def _sample(self, g: Tensor, rng: torch.Generator) -> Tensor:
        _, kept = select.band(g.numel(), 0.0, 1.0 - self.keep)
        chosen = torch.randperm(g.numel(), generator=rng, device=rng.device)[:kept].to(g.device)
        flat = g.reshape(-1)
        return torch.zeros_like(flat).index_copy(0, chosen, flat[chosen]).view(g.shape)
