"""Fewer bits for every entry that is sent."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check
from ..core import Defense, Grads, State, Step

MANY = 16  # bits whose levels are too many for a table on the wire


@dataclass(frozen=True)
class Quantize(Defense):
    """Round the sent (non-zero) entries of each tensor to 2^bits values, half of them negative.

    The levels lie evenly between the smallest and the largest magnitude sent: in the narrow band that dual pruning
    leaves they are finer than levels from zero would be. Sixteen bits take floats with shorter mantissas instead.
    Zeros stay zero and sent entries stay non-zero. The wire charges at most about `bits` for each, sign included.

    Guarantees: `rounding="nearest"` moves no magnitude by more than half a level; `"stochastic"` is unbiased, every
    entry being its own value on average. One bit keeps the sign and the mean magnitude ("nearest"), or draws the sign
    so that the average is right ("stochastic", very noisy). Does not guarantee privacy. A type of `bits` or less is
    left as it is.

    Compose: last inside error feedback, `ErrorFeedback(Chain(DualPrune(), Quantize(4)))`: what rounding loses is
    sent later. Alone it forgets the loss.

    >>> step = Step(rng=torch.Generator())
    >>> Quantize(bits=2).apply({"w": torch.tensor([0.0, -1.0, 1.4, 3.0])}, {}, step)[0]["w"]
    tensor([ 0., -1.,  1.,  3.])
    """

    bits: int = 8
    rounding: str = "nearest"

    def __post_init__(self) -> None:
        if self.bits not in (1, 2, 4, 8, 16):
            raise ValueError(f"bits must be one of 1, 2, 4, 8, 16, got {self.bits}")
        check.one_of(("nearest", "stochastic"), rounding=self.rounding)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return {name: self._round(g, step.rng) for name, g in grads.items()}, state

    def _round(self, g: Tensor, rng: torch.Generator) -> Tensor:
        sent = g != 0
        if self.bits == 1 and self.rounding == "nearest":  # one level, their mean: an attacker repeats this every step
            size = g.abs().sum(dtype=torch.float64) / sent.sum().clamp_min(1)
            return torch.copysign(size.to(g.dtype), g).mul_(sent)
        values = g[sent].double()
        if values.numel() == 0 or 8 * g.element_size() <= self.bits:
            return g.clone()
        magnitudes = values.abs()
        low, high = (float(end) for end in torch.aminmax(magnitudes))
        if self.bits == 1:
            rounded = _between(values, values.new_tensor([-high, high]), self._chance(values, rng))
        else:
            table = self._levels(low, high, g)
            rounded = _between(magnitudes, table, self._chance(values, rng)).copysign(values)
        return torch.zeros_like(g).masked_scatter(sent, rounded.to(g.dtype))

    def _levels(self, low: float, high: float, g: Tensor) -> Tensor:
        """Return the magnitudes that may be sent, rising, all of them numbers of g's type."""
        count = 1 << (self.bits - 1)
        if self.bits < MANY:
            table = torch.linspace(low, high, count, dtype=torch.float64)
        else:
            table = _short_floats(low, high, count, g.dtype)
        distinct: Tensor = torch.unique_consecutive(table.to(g.dtype))
        return distinct.double().to(g.device)

    def _chance(self, values: Tensor, rng: torch.Generator) -> Tensor:
        """Return the share of the way to the next level from which an entry goes up."""
        if self.rounding == "nearest":
            return values.new_tensor(0.5)
        return torch.rand(values.shape, generator=rng, device=rng.device, dtype=torch.float64).to(values.device)


def _between(values: Tensor, table: Tensor, chance: Tensor) -> Tensor:
    """Return the level below or above each value, above where it lies further on the way than `chance`."""
    below = (torch.searchsorted(table, values, right=True) - 1).clamp(0, max(len(table) - 2, 0))
    lower, upper = table[below], table[(below + 1).clamp(max=len(table) - 1)]
    return torch.where((values - lower) > chance * (upper - lower), upper, lower)


def _short_floats(low: float, high: float, count: int, dtype: torch.dtype) -> Tensor:
    """Return at most `count` floats that enclose the band, the last bits of all of them zero.

    Bit patterns of positive floats rise with their values, so levels are every 2^k-th pattern. The wire leaves the
    zero bits out; 32,768 levels of another kind would need a table longer than the values.
    """
    bits = torch.int64 if dtype == torch.float64 else torch.int32
    ends = torch.tensor([low, high, torch.finfo(dtype).max], dtype=dtype).view(bits).tolist()
    zero_bits = max((ends[1] - ends[0]) // (count - 2), 1).bit_length()
    first, last = ends[0] >> zero_bits, -(-ends[1] >> zero_bits)
    patterns: Tensor = torch.arange(first, last + 1) << zero_bits
    return patterns.clamp(ends[0] if first == 0 else 0, ends[2]).to(bits).view(dtype)
