"""The client's own look at the model it was sent, before any gradient is computed on it.

A malicious server can put a layer into the model, or write weights into an existing one, so that single pictures come
out of the gradient whole. The guard asks five questions:

- Is this the structure the user defined, or saw first? (`fingerprint`)
- Would a layer sort pictures into bins? Two rows whose measurements of a natural picture agree to within the gap of
  their thresholds are nested: whatever excites the one excites the other, and the difference of their gradients shows
  what lies between. An imprint consists of such rows; in an honest layer, fresh or trained, they do not occur.
- Is every number finite? One that is not, in a unit that never fires, leaves gradients whole and blinds all sums.
- Is most of a layer silent, so that what is left stands out of a defense's noise? Rows that repeat each other, units of
  the first layer that fire for few pictures, if any (also trap weights), inputs whose outgoing weights are zero.
- Did a layer become another one since the last round, or is this a model that was answered before?

`docs/guard.md` holds the measured rates and what slips through.
"""

import math
import secrets
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import check
from ..core import Tensors
from ..errors import GuardError
from ..gradients import rows_see_inputs
from .looks import low_band, nested_shares, rare_share, repeated_share, sketched
from .memory import REMEMBERED, Seen, changes, difference, fingerprint, sketch, tensors_of, watched

__all__ = ["REMEMBERED", "Finding", "Guard", "Seen", "fingerprint"]

ROWS = 512  # rows compared in one layer, drawn anew each time so that a server cannot place pairs apart
FEWEST_ROWS = 16  # a layer with fewer cannot sort a batch, and too few pairs would make the shares chance
FEWEST_COLUMNS = 16
# Beyond these shares silence is no pruning: a head of ten rows of which 1 % is kept still uses a tenth of its inputs.
SILENCED_INPUTS, SILENCED_ROWS = 0.95, 0.75
ROUNDING = 1e-5  # of a column against its size
MOVED = 0.05  # relative change since the weights were last looked at that calls for another look
SAME = 1e-7  # relative change of the middle weight matrix below which a model counts as answered before


@dataclass(frozen=True)
class Finding:
    """Something in one layer that honest training does not produce."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}"


@dataclass(frozen=True)
class Guard:
    """Refuses a manipulated model.

    Guarantees: a model with other modules, shapes or hyperparameters than the pinned one is refused. Does not
    guarantee that every malicious weight is found, nor anything about a server whose code the client runs: a weaker
    trap can hide, which is why the defense behind the guard must hold as well.

    Args:
        pinned: `fingerprint` of the user's own model, see `pin`; None pins what arrives first.
        pairs: share of a layer's rows that may be nested with another one, or repeat it, by chance.
        groups: share of a layer's rows that may be nested with several others.
        traps: share of the first layer's units that may fire for few pictures only.
        gain: largest outgoing weight over the middle one.
        jump: largest relative change of a weight matrix between two rounds; None for a client that joins rarely.
        repeats: how often a model of the last `REMEMBERED` may come again, as good as unchanged in most of its weight
            matrices; None: as often as the server likes.

    >>> Guard.pin(nn.Linear(2, 3)).admit(nn.Linear(2, 4))
    Traceback (most recent call last):
    ...
    gradveil.errors.GuardError: the model is not the one you defined (it adds ': Linear(in_features=2, out_features=4, \
bias=True)'): no gradient is computed on it
    """

    pinned: tuple[str, ...] | None = None
    pairs: float = 0.15
    groups: float = 0.04
    traps: float = 0.1
    gain: float = 100.0
    jump: float | None = 0.75
    repeats: int | None = None

    def __post_init__(self) -> None:
        check.fraction(pairs=self.pairs, groups=self.groups, traps=self.traps)
        check.positive(gain=self.gain, **({} if self.jump is None else {"jump": self.jump}))
        if self.repeats is not None:
            check.at_least(0, repeats=self.repeats)
            if self.repeats >= REMEMBERED:
                raise ValueError(f"repeats must be below {REMEMBERED}, the models remembered, got {self.repeats}")

    @classmethod
    def pin(cls, model: nn.Module | Tensors, **limits: Any) -> Self:
        """Return a guard that accepts models of exactly this structure; build the model from your own code.

        Pin what will be looked at: the module itself, or its tensors by name where only those arrive.
        """
        return cls(pinned=fingerprint(model), **limits)

    def admit(
        self,
        model: nn.Module | Tensors,
        seen: Seen | None = None,
        *,
        input_shape: tuple[int, ...] | None = None,
        rng: torch.Generator | None = None,
    ) -> Seen:
        """Return what to remember of this model, or raise `GuardError` if it must not be given a gradient."""
        structure = fingerprint(model)
        pinned = self.pinned or (seen.structure if seen else structure)
        if structure != pinned:
            raise GuardError(
                f"the model is not the one you defined ({difference(structure, pinned)}): no gradient is computed on it"
            )
        rng = rng or _unpredictable()
        seed = seen.seed if seen else int(torch.randint(2**62, (), generator=rng, device=rng.device))
        weights = watched(model)
        sketches = sketch(weights, seed)
        before = sketches[None][:0] if seen is None else seen.sketches[1 - REMEMBERED :]
        now = Seen(structure, seed, torch.cat([before, sketches[None]]), sketches)
        findings = self._compare(seen, sketches, list(weights)) if seen else []
        if seen is None or max(changes(seen.inspected, sketches), default=0.0) > MOVED:
            findings += self.inspect(model, input_shape=input_shape, rng=rng)
        else:
            now = replace(now, inspected=seen.inspected)
        if findings:
            raise GuardError(
                "the model looks manipulated, no gradient is computed on it: "
                + "; ".join(map(str, findings[:3]))
                + ". If you know why, loosen the limit in Guard(...), or pass guard=None"
            )
        return now

    @torch.no_grad()
    def inspect(
        self,
        model: nn.Module | Tensors,
        *,
        input_shape: tuple[int, ...] | None = None,
        rng: torch.Generator | None = None,
    ) -> list[Finding]:
        """Return what looks planted in the weights, layer by layer.

        `input_shape` of one example says which layers see the picture itself; without it, a layer with as many inputs
        as a square picture has is taken for one, and the first such layer for the model's first.
        """
        rng = rng or _unpredictable()
        tensors = tensors_of(model)
        found = []
        first = True
        for name, weight in tensors.items():
            if not weight.is_floating_point():  # indices are no weights
                continue
            if not bool(torch.isfinite(weight).all()):  # one such entry would blind every sum below
                found.append(Finding(name, "it holds NaN or infinity"))
                continue
            if not rows_see_inputs(weight.shape):
                continue
            shape = _picture_shape(weight, input_shape)
            bias = tensors.get(f"{name.removesuffix('weight')}bias")
            # With more inputs than pixels a layer may hold the picture and constants beside it.
            sees = shape is not None or (input_shape is not None and weight[0].numel() > math.prod(input_shape))
            reason = self._reason(weight, bias, shape, sees and first, rng)
            first = first and not sees
            if reason:
                found.append(Finding(name.removesuffix(".weight"), reason))
        return found

    def _reason(
        self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...] | None, first: bool, rng: torch.Generator
    ) -> str | None:
        weight = weight.detach().flatten(1)
        chosen = torch.randperm(len(weight), generator=rng, device=rng.device)[:ROWS].to(weight.device)
        rows = weight.index_select(0, chosen).double()
        if rows.shape[1] < FEWEST_COLUMNS:
            return None
        reason = self._silent(weight)
        if reason:
            return reason
        if len(rows) < FEWEST_ROWS:
            return None
        # A unit's gradient does not tell how large its weights are, so a planted row may be as small as it likes.
        size = rows.abs().amax(1)
        size = torch.where(size > 0, size, torch.ones_like(size))
        rows = (rows / size[:, None]).float()
        # A transposed convolution has its outputs in the second dimension: its bias says nothing about rows.
        fits = bias is not None and bias.shape == weight.shape[:1]
        bias = (bias.detach()[chosen].double() / size).float() if bias is not None and fits else None
        looks = [sketched(rows, rng)] + ([] if shape is None else [low_band(rows, shape)])
        widest = max(look.shape[1] for look in looks)
        looks = [F.pad(look, (0, widest - look.shape[1])) for look in looks]
        pairs, groups = nested_shares(torch.stack(looks), bias)
        if pairs > self.pairs or groups > self.groups:
            return f"{pairs:.0%} of its rows sort pictures into bins (an imprint)"
        repeated = repeated_share(looks[0])
        if repeated > self.pairs:
            return f"{repeated:.0%} of its rows repeat another one (an imprint, or all silent but a few)"
        if first and bias is not None:
            rare = rare_share(rows, bias, looks[-1], centred=shape is None)
            if rare > self.traps:
                return f"{rare:.0%} of its units fire for few pictures, if any (trap weights or dead rows)"
        return None

    def _silent(self, weight: Tensor) -> str | None:
        """Say whether a layer silences most units before it, or most of its own: what is left would stand out."""
        # Of all rows, not of those drawn: one entry is enough to give a unit its gradient. A unit that leads to all
        # classes alike gets none, so what counts is how a column differs from its mean.
        centred = weight - weight.mean(0) if len(weight) > 1 else weight
        columns = centred.abs().amax(0).double()
        columns = columns.where(columns > ROUNDING * weight.abs().amax(0), 0)
        leading = float((columns > 0).float().mean())
        if 0 < leading < 1 - SILENCED_INPUTS:
            return f"{1 - leading:.0%} of its inputs lead nowhere (silenced rows before it)"
        gain = float(columns.max() / columns[columns > 0].median())  # NaN where there is nothing
        if gain > self.gain:
            return f"outgoing weights {gain:.0f} times as large as the middle one (decoys)"
        alive = float(weight.any(1).float().mean())
        if 0 < alive < 1 - SILENCED_ROWS and len(weight) >= FEWEST_ROWS:
            return f"{1 - alive:.0%} of its rows are zero (all silent but a few)"
        return None

    def _compare(self, seen: Seen, now: Tensor, names: list[str]) -> list[Finding]:
        """Return what changed too much since the last round, or not at all since one of the last."""
        moved = changes(seen.sketches[-1], now)
        found = [
            Finding(name.removesuffix(".weight"), f"it changed by {share:.0%} since the last round (another layer)")
            for name, share in zip(names, moved, strict=True)
            # Biases start near zero, so any change of theirs is large.
            if self.jump is not None and share > self.jump and not name.endswith("bias")
        ]
        # The middle one: a server that edits a few weights has still frozen the rest.
        repeats = sum(median(changes(old, now)) < SAME for old in seen.sketches) if names else 0
        if self.repeats is not None and repeats > self.repeats:
            found.append(Finding("the whole model", f"the same weights came {repeats + 1} times (a frozen model)"))
        return found


def _picture_shape(weight: Tensor, input_shape: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the shape of the picture that a row measures, if it is one."""
    inputs = weight.shape[1:]
    if len(inputs) == 3:
        return tuple(inputs)
    if input_shape is not None:
        return input_shape if len(input_shape) == 3 and math.prod(input_shape) == inputs.numel() else None
    for channels in (3, 1):
        side = math.isqrt(inputs.numel() // channels)
        if side >= 2 and channels * side * side == inputs.numel():
            return channels, side, side
    return None


def _unpredictable() -> torch.Generator:
    """Return a generator no server can foresee: it must not know which rows and columns are looked at."""
    return torch.Generator().manual_seed(secrets.randbits(63))
