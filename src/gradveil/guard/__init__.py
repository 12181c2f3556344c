"""The client's own look at the model it was sent, before any gradient is computed on it.

A malicious server can put a layer into the model, or write weights into an existing one, so that single pictures come
out of the gradient whole. The guard asks four questions:

- Is this the structure the user defined, or saw first? (`fingerprint`)
- Would a layer sort pictures into bins? Two rows whose measurements of a natural picture agree to within the gap of
  their thresholds are nested: whatever excites the one excites the other, and the difference of their gradients shows
  what lies between. An imprint consists of such rows; in an honest layer, fresh or trained, they do not occur.
- Do the units of the first layer fire for few pictures, if any? (trap weights, dead rows)
- Did a layer become another one since the last round, or is this a model that was answered before?

`docs/guard.md` holds the measured rates and what slips through.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import check
from ..core import Tensors
from ..errors import GuardError, StateError
from .looks import low_band, nested_shares, rare_share, sketched

ROWS = 512  # rows compared in one layer, drawn anew each time so that a server cannot place pairs apart
FEWEST_ROWS = 16  # a layer with fewer cannot sort a batch, and too few pairs would make the shares chance
FEWEST_COLUMNS = 16
WHOLE_PICTURE = 64  # kernel pixels from which a convolution measures a picture rather than an edge
SOME = 32  # rows enough to tell how large a column is
MOVED = 0.05  # relative change since the weights were last looked at that calls for another look
SAME = 1e-7  # relative change of the middle weight matrix below which a model counts as answered before
REMEMBERED = 16  # models that a new one is compared with
SKETCH = 64  # numbers kept of each weight matrix from round to round
COLUMNS = 16  # of it that they are made of


@dataclass(frozen=True)
class Finding:
    """Something in one layer that honest training does not produce."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}"


@dataclass(frozen=True)
class Seen:
    """What a client remembers of the last model it accepted: its structure and a few numbers of every weight."""

    structure: tuple[str, ...]
    seed: int  # settles which entries the sketch reads
    sketches: Tensor  # [models, tensors, SKETCH], the newest last
    inspected: Tensor  # [tensors, SKETCH] when the weights were last looked at

    def state_dict(self) -> Tensors:
        """Return this memory as tensors."""
        text = torch.frombuffer(bytearray("\n".join(self.structure).encode()), dtype=torch.uint8)
        seed = torch.tensor(self.seed)
        return {"structure": text, "seed": seed, "sketches": self.sketches, "inspected": self.inspected.clone()}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Tensor]) -> Self:
        """Rebuild the memory; raises `StateError` if it is none."""
        if saved.keys() != {"structure", "seed", "sketches", "inspected"}:
            raise StateError("the guard's memory is incomplete: restore the state file, or delete its guard entries")
        text = bytes(saved["structure"].tolist()).decode()
        return cls(tuple(text.split("\n")), int(saved["seed"]), saved["sketches"].cpu(), saved["inspected"].cpu())


@dataclass(frozen=True)
class Guard:
    """Refuses a manipulated model.

    Guarantees: a model with other modules, shapes or hyperparameters than the pinned one is refused. Does not
    guarantee that every malicious weight is found, nor anything about a server whose code the client runs: a weaker
    trap can hide, which is why the defense behind the guard must hold as well.

    Args:
        pinned: `fingerprint` of the user's own model, see `pin`; None pins what arrives first.
        pairs: share of a layer's rows that may be nested with another one, by chance.
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
                f"the model is not the one you defined ({_difference(structure, pinned)}): "
                "no gradient is computed on it"
            )
        rng = rng or torch.Generator().manual_seed(0)
        seed = seen.seed if seen else int(torch.randint(2**62, (), generator=rng, device=rng.device))
        watched = _watched(model)
        sketches = _sketches(watched, seed)
        before = sketches[None][:0] if seen is None else seen.sketches[1 - REMEMBERED :]
        now = Seen(structure, seed, torch.cat([before, sketches[None]]), sketches)
        findings = self._compare(seen, sketches, list(watched)) if seen else []
        if seen is None or max(_changes(seen.inspected, sketches), default=0.0) > MOVED:
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
        rng = rng or torch.Generator().manual_seed(0)
        tensors = _tensors(model)
        found = []
        first = True
        for name, weight in tensors.items():
            if weight.ndim < 2 or not _measures_pictures(weight):
                continue
            shape = _picture_shape(weight, input_shape)
            bias = tensors.get(f"{name.removesuffix('weight')}bias")
            reason = self._reason(weight, bias, shape, shape is not None and first, rng)
            first = first and shape is None
            if reason:
                found.append(Finding(name.removesuffix(".weight"), reason))
        return found

    def _reason(
        self, weight: Tensor, bias: Tensor | None, shape: tuple[int, ...] | None, first: bool, rng: torch.Generator
    ) -> str | None:
        weight = weight.detach().flatten(1)
        chosen = torch.randperm(len(weight), generator=rng, device=rng.device)[:ROWS].to(weight.device)
        rows = weight.index_select(0, chosen).float()
        if rows.shape[1] < FEWEST_COLUMNS:
            return None
        columns = rows[:SOME].square().sum(0).sqrt()
        gain = float(columns.max() / columns[columns > 0].median())  # NaN where there is nothing
        if gain > self.gain:
            return f"outgoing weights {gain:.0f} times as large as the middle one (decoys)"
        if len(rows) < FEWEST_ROWS:
            return None
        bias = None if bias is None else bias.detach()[chosen].float()
        looks = [sketched(rows, rng)] + ([] if shape is None else [low_band(rows, shape)])
        widest = max(look.shape[1] for look in looks)
        looks = [F.pad(look, (0, widest - look.shape[1])) for look in looks]
        pairs, groups = nested_shares(torch.stack(looks), bias)
        if pairs > self.pairs or groups > self.groups:
            return f"{pairs:.0%} of its rows sort pictures into bins (an imprint)"
        if first and bias is not None:
            rare = rare_share(rows, bias, looks[-1])
            if rare > self.traps:
                return f"{rare:.0%} of its units fire for few pictures, if any (trap weights or dead rows)"
        return None

    def _compare(self, seen: Seen, now: Tensor, names: list[str]) -> list[Finding]:
        """Return what changed too much since the last round, or not at all since one of the last."""
        change = _changes(seen.sketches[-1], now)
        found = [
            Finding(name.removesuffix(".weight"), f"it changed by {share:.0%} since the last round (another layer)")
            for name, share in zip(names, change, strict=True)
            # Biases start near zero, so any change of theirs is large.
            if self.jump is not None and share > self.jump and not name.endswith("bias")
        ]
        # The middle one: a server that edits a few weights has still frozen the rest.
        repeats = sum(median(_changes(old, now)) < SAME for old in seen.sketches) if names else 0
        if self.repeats is not None and repeats > self.repeats:
            found.append(Finding("the whole model", f"the same weights came {repeats + 1} times (a frozen model)"))
        return found


def fingerprint(model: nn.Module | Tensors) -> tuple[str, ...]:
    """Return the structure of a model: every module with its settings, every parameter and buffer with its shape.

    >>> fingerprint(nn.Linear(2, 3))
    (': Linear(in_features=2, out_features=3, bias=True)', 'weight [3, 2] float32', 'bias [3] float32')
    """
    modules, tensors = [], list(model.items()) if isinstance(model, dict) else []
    if isinstance(model, nn.Module):
        modules = [f"{name}: {type(m).__name__}({m.extra_repr()})" for name, m in model.named_modules()]
        tensors = [*model.named_parameters(), *model.named_buffers()]
    return (*modules, *(f"{n} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in tensors))


def _tensors(model: nn.Module | Tensors) -> Tensors:
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else model


def _measures_pictures(weight: Tensor) -> bool:
    """Say whether a row sees a whole input: a small kernel's gradient sums over all places and shows no picture."""
    return weight.ndim == 2 or math.prod(weight.shape[2:]) >= WHOLE_PICTURE


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


def _watched(model: nn.Module | Tensors) -> Tensors:
    """Return the weights a swapped layer would show in, and the biases whose thresholds would sort pictures."""
    tensors = {name: t.detach() for name, t in _tensors(model).items()}
    return {
        name: t
        for name, t in tensors.items()
        if t.ndim >= 2 or (name.endswith("bias") and tensors.get(f"{name[:-4]}weight", t).ndim == 2)
    }


def _changes(old: Tensor, new: Tensor) -> list[float]:
    """Return the relative change of every tensor; 0 for one that was and is zero."""
    size = torch.maximum(old.norm(dim=1), new.norm(dim=1)).clamp_min(torch.finfo(torch.float32).tiny)
    changes: list[float] = ((new - old).norm(dim=1) / size).tolist()
    return changes


def _sketches(watched: Tensors, seed: int) -> Tensor:
    """Return `[tensors, SKETCH]`: signed sums over all rows of a few secret columns, which no planted row can avoid."""
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (COLUMNS * max(map(len, watched.values()), default=0),), generator=rng) * 2.0 - 1
    sums = []
    for t in watched.values():
        rows = t.reshape(len(t), -1)
        columns = torch.randint(rows.shape[1], (min(COLUMNS, rows.shape[1]),), generator=rng)
        picked = rows.index_select(1, columns.to(t.device)).float().flatten()
        picked = picked * signs[: len(picked)].to(t.device)
        sums.append(F.pad(picked, (0, -len(picked) % SKETCH)).view(-1, SKETCH).sum(0))
    return torch.stack(sums).cpu() if sums else torch.zeros(0, SKETCH)


def _difference(now: tuple[str, ...], pinned: tuple[str, ...]) -> str:
    added = [line for line in now if line not in set(pinned)]
    missing = [line for line in pinned if line not in set(now)]
    return f"it adds {added[0]!r}" if added else f"it lacks {missing[0]!r}" if missing else "the order differs"
