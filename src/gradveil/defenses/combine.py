"""Defenses made of defenses."""

from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn

from .. import tree
from ..core import Batch, Defense, Grads, Masks, Need, State, Step
from ..errors import StateError


@dataclass(frozen=True)
class Identity(Defense):
    """Send the gradient as it is: the undefended baseline."""

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return dict(grads), state


@dataclass(frozen=True)
class ErrorFeedback(Defense):
    """Add what was held back before, apply `inner`, hold back what it removed.

    Guarantees: the sum of everything sent plus the residual equals the sum of all gradients, to rounding. The
    residual is in gradient units and starts at zero. It stays bounded only where `inner` is a contraction: Top-k is,
    dual pruning is not, because its top entries never leave (watch `Veil.health`).
    """

    inner: Defense

    def __post_init__(self) -> None:
        if self.inner.noisy:
            raise ValueError(
                f"error feedback around {self.inner.key()} would send its noise back next round; "
                "put the noise outside: Chain(ErrorFeedback(...), noise)"
            )
        if "per_example" in self.inner.needs:
            raise ValueError(f"{self.inner.key()} takes per-example gradients: put it first in a Chain")
        if self.inner.residual(self.inner.init({"probe": torch.zeros(1)})) is not None:
            raise ValueError(f"{self.inner.key()} keeps a residual of its own: a second one would send all twice")

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs

    def init(self, params: Grads) -> State:
        # Half precision would round the sum away; what a cast takes from a sent value stays in the residual.
        residual = tree.tmap(lambda p: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)), params)
        return {**tree.under("residual", residual), **tree.under("inner", self.inner.init(params))}

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        residual = self._residual_for(grads, state)
        sent, residual, inner = self.inner.feed_back(grads, residual, tree.only("inner", state), step)
        return sent, {**tree.under("residual", residual), **tree.under("inner", inner)}

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        residual = tree.add(self._residual_for(sent, state), sent)
        return {**state, **tree.under("residual", residual)}

    def residual(self, state: State) -> Grads | None:
        return tree.only("residual", state)

    def propose(self, grads: Grads, state: State, step: Step) -> Masks:
        total = tree.add(grads, self._residual_for(grads, state))
        return self.inner.propose(total, tree.only("inner", state), step)

    def fitted(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "ErrorFeedback":
        return ErrorFeedback(self.inner.fitted(mean, std))

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return self.inner.prepare_model(model)

    def prepare_batch(self, batch: Batch, step: Step) -> Batch:
        return self.inner.prepare_batch(batch, step)

    def _residual_for(self, grads: Grads, state: State) -> Grads:
        residual = tree.only("residual", state)
        missing = [name for name in grads if name not in residual]
        if missing or any(residual[name].shape != grads[name].shape for name in grads):
            where = missing[0] if missing else "a tensor of another shape"
            raise StateError(f"the residual does not fit this gradient ({where}): start from defense.init(params)")
        return residual


@dataclass(frozen=True, init=False)
class Chain(Defense):
    """Apply defenses one after the other; model and batch changes happen in the same order."""

    parts: tuple[Defense, ...]

    def __init__(self, *defenses: Defense, parts: tuple[Defense, ...] = ()) -> None:
        # `Chain(a, b)` for people, `Chain(parts=(a, b))` for data.
        object.__setattr__(self, "parts", (*defenses, *parts))
        if not self.parts:
            raise ValueError("Chain needs at least one defense")
        late = [part.key() for part in self.parts[1:] if "per_example" in part.needs]
        if late:
            raise ValueError(f"{late[0]} takes per-example gradients, so it must come first in a Chain")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset().union(*(part.needs for part in self.parts))

    @property
    def noisy(self) -> bool:
        return any(part.noisy for part in self.parts)

    @property
    def weighs_examples(self) -> bool:
        return any(part.weighs_examples for part in self.parts)

    def init(self, params: Grads) -> State:
        return {k: v for i, part in enumerate(self.parts) for k, v in tree.under(str(i), part.init(params)).items()}

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        after: State = {}
        for i, part in enumerate(self.parts):
            grads, inner = part.apply(grads, tree.only(str(i), state), step)
            after |= tree.under(str(i), inner)
        return grads, after

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        # What failed to arrive belongs to the last part that remembers; earlier parts already let go of it.
        for i in reversed(range(len(self.parts))):
            inner = tree.only(str(i), state)
            if self.parts[i].residual(inner) is not None:
                return {**state, **tree.under(str(i), self.parts[i].take_back(sent, inner, newest=newest))}
        return super().take_back(sent, state, newest=newest)

    def residual(self, state: State) -> Grads | None:
        held = [part.residual(tree.only(str(i), state)) for i, part in enumerate(self.parts)]
        known = [r for r in held if r is not None]
        return reduce(tree.add, known) if known else None

    def propose(self, grads: Grads, state: State, step: Step) -> Masks:
        for i, part in enumerate(self.parts):
            if "mask" in part.needs:
                return part.propose(grads, tree.only(str(i), state), step)
            grads, _ = part.apply(grads, tree.only(str(i), state), step)
        return super().propose(grads, state, step)

    def fitted(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Chain":
        return Chain(*(part.fitted(mean, std) for part in self.parts))

    def prepare_model(self, model: nn.Module) -> nn.Module:
        return reduce(lambda m, part: part.prepare_model(m), self.parts, model)

    def prepare_batch(self, batch: Batch, step: Step) -> Batch:
        return reduce(lambda b, part: part.prepare_batch(b, step), self.parts, batch)
