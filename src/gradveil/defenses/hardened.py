"""Hardened release: what leaves the client is drowned in noise that the client itself takes back later.

Dual pruning hides both ends of the magnitudes by not sending them, but the positions that do arrive are enough to
find the picture. Here every value that leaves carries noise many times the size of the gradient, and is rounded to a
few levels: small entries are lost in the noise and large ones saturate, so both ends are hidden again, this time also
from an attacker who knows the mechanism. Noise and rounding stay in the client's residual and are subtracted from
what it sends next, so they never add up: only the newest noise separates the model from undefended training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from .. import check, tree
from ..core import Defense, Grads, State, Step
from ..errors import StateError
from ..gradients import rows_see_inputs
from ..theory import HIGHEST, LOWEST, PER_OCTAVE
from .noise import normal_like

# What the state holds of each tensor: the least size of the next noise, that of what waits to be sent, the largest
# share of a single example in it, and the size of what was sent last.
_SIZES = ("size", "waiting", "single", "last")
# The best levels for a normal variable of unit variance (Lloyd and Max), positive half, and the error they leave.
_LEVELS = {1: (0.7979,), 2: (0.4528, 1.5104), 3: (0.2451, 0.7560, 1.3439, 2.1520)}
_ERROR = {0: 0.0, 1: 0.3634, 2: 0.1175, 3: 0.0345}
# In a fresh small model the largest entries are 4 to 15 times the RMS: less noise would leave them to be seen.
LEAST_NOISE = 16.0
# From one upload to the next the noise falls no faster. Else a server that makes the gradients shrink, by scaling its
# model down, has the noise of the first uploads taken back and next to none put in its place.
FASTEST_FALL = 0.99
# A fully connected unit's gradient is a picture where one picture excites it. A server that silences all others makes
# it as large against the RMS of the tensor as it likes, so beyond this the noise follows the largest unit. In a layer
# of few units none can stand out much.
PEAK = 2.0
FEW_UNITS = 16


@dataclass(frozen=True)
class Hardened(Defense):
    """Send gradient + residual + noise, rounded to few levels; keep the difference as the next residual.

    `examples` is how many private examples are mixed before anything leaves: a client with smaller batches adds up
    gradients and uploads nothing until then. It is what hides a picture; the noise alone does not, from an attacker
    who searches a generator. `noise` is the standard deviation of the noise in units of the RMS of the gradient tensor,
    or of half of its largest fully connected unit's, rounded up to a power of 2 ** (1 / 4); from upload to upload it
    falls by at most 1 %. Without it the values of one upload carry at most `nats` about the batch, and a small model
    gets noise `LEAST_NOISE`. `bits` is what one entry costs on the wire: 1 to 3, or 0 for unrounded floats. `memory` is
    the share of the noise that is taken back later; 1 costs training least, less than 0.99 bounds what any number of
    later rounds can add about one batch. `balance` is for servers that edit the model until one example outweighs the
    others: where the client knows the largest share of one example (`Veil.protect`), the noise is at least what
    `balance * examples` equal examples would get; 0 leaves that out.

    Guarantees: one upload carries at most `theory.release_information(n, noise, tensors)` nats about all its examples
    together, and at most `theory.example_information` about each where shares are known. The residual stays within a
    few multiples of the noise. Does not guarantee differential privacy: single examples are not clipped and the scale
    of the noise follows the data; and whoever holds candidate pictures can still test whether one of them was used.
    docs/hardened.md has the attacks it was measured against.

    >>> [round(Hardened().strength(n), 1) for n in (15_826, 11_173_962)]  # LeNet, ResNet18
    [16.0, 64.0]
    """

    noise: float | None = None
    examples: int = 32
    bits: int = 2
    memory: float = 1.0
    nats: float = 1364.0
    balance: float = 0.25

    def __post_init__(self) -> None:
        check.positive(nats=self.nats, **({} if self.noise is None else {"noise": self.noise}))
        check.at_least(1, examples=self.examples)
        check.fraction(memory=self.memory, balance=self.balance)
        if self.bits not in _ERROR:
            raise ValueError(f"bits must be 0, 1, 2 or 3, got {self.bits}")

    def init(self, params: Grads) -> State:
        device = next((p.device for p in params.values()), None)
        sizes = tree.tmap(lambda p: torch.zeros(1, device=p.device), params)
        return {
            **tree.under("residual", tree.zeros_like(params)),
            **{name: size for part in _SIZES for name, size in tree.under(part, sizes).items()},
            "mixed": torch.zeros((), dtype=torch.int64, device=device),  # examples since the last upload
        }

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        residual, size = tree.only("residual", state), tree.only("size", state)
        if not residual.keys() == size.keys() == grads.keys():
            raise StateError("the residual does not fit this gradient: start from defense.init(params)")
        count = 1 if self.examples == 1 else step.require_count(self.key())
        mixed = state["mixed"] + count
        # Sizes add up: the extent of a sum of gradients cannot exceed the sum of theirs.
        waiting = {n: w + extent(grads[n][None])[0] for n, w in tree.only("waiting", state).items()}
        single = {n: torch.maximum(s, self._largest(n, grads[n], step)) for n, s in tree.only("single", state).items()}
        if int(mixed) < self.examples:
            sizes = {**tree.under("waiting", waiting), **tree.under("single", single)}
            held = tree.under("residual", tree.add(residual, grads))
            return tree.zeros_like(grads), {**state, **held, **sizes, "mixed": mixed}
        noise = self.strength(sum(g.numel() for g in grads.values()))
        covered = {n: torch.maximum(waiting[n], self.apart(g.dim()) * single[n]) for n, g in grads.items()}
        used = {n: torch.maximum(size[n], covered[n]) for n in grads}
        sent, held = {}, {}
        for name, g in grads.items():
            flat = [t.reshape(1, -1) for t in (g, residual[name], normal_like(g, step.rng))]
            out, rest = self.release(flat[0], flat[1], flat[2], noise, used[name])
            sent[name], held[name] = out.view(g.shape), rest.view(g.shape)
        return sent, {
            **tree.under("residual", held),
            **tree.under("size", tree.tmap(lambda s: FASTEST_FALL * s, used)),
            **tree.under("waiting", tree.zeros_like(waiting)),
            **tree.under("single", tree.zeros_like(single)),
            **tree.under("last", covered),
            "mixed": torch.zeros_like(mixed),
        }

    @property
    def weighs_examples(self) -> bool:
        return self.balance > 0 and self.examples > 1

    def apart(self, axes: int) -> float:
        """Return how many times its largest share a tensor's noise is measured by.

        Biases and norms have too few entries to tell much, and training feels noise on them most: noise that covers
        one example will do.
        """
        if self.balance == 0:
            return 0.0
        return math.sqrt(max(self.balance * self.examples, 1.0)) if axes > 1 else 1.0

    def _largest(self, name: str, grads: Tensor, step: Step) -> Tensor:
        """Return the RMS of the largest share of one example in a tensor, or 0 where that is not known."""
        if step.largest is not None:
            return step.largest[name]
        return rms(grads.flatten()) if step.num_examples == 1 else torch.zeros((), device=grads.device)

    def strength(self, entries: int) -> float:
        """Return the noise, in units of the RMS, for a gradient of so many entries in all its tensors."""
        return self.noise or max(LEAST_NOISE, math.sqrt(entries / (2 * self.nats)))

    def release(
        self, grads: Tensor, residual: Tensor, normal: Tensor, noise: float, size: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (sent, next residual) of one tensor of several clients `[users, n]`, given standard normal noise.

        `size` is what the noise is measured by: at least the `extent` of each client's gradient, or the sum over those
        that were mixed.
        """
        if not grads.numel():
            return grads, residual
        scale = on_grid(noise * size).to(grads.dtype).view(-1, 1)
        drawn = normal * scale
        total = grads + residual
        sent = _round(total + drawn, scale, self.levels(noise))
        held = total - sent
        return sent, held if self.memory == 1 else held.add_(drawn, alpha=1 - self.memory)

    def residual(self, state: State) -> Grads | None:
        return tree.only("residual", state)

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        # What comes back waits again: without its size the next noise would not cover it.
        noise, last = self.strength(sum(s.numel() for s in sent.values())), tree.only("last", state)
        lost = {n: last[n] * bool(s.any()) if newest else self._size_of(s, noise).to(last[n]) for n, s in sent.items()}
        return {
            **state,
            **tree.under("residual", tree.add(tree.only("residual", state), sent)),
            **tree.under("waiting", tree.add(tree.only("waiting", state), lost)),
        }

    def _size_of(self, sent: Tensor, noise: float) -> Tensor:
        """Return, of one tensor that was sent, a size that what it carried cannot exceed: that of its noise."""
        values = sent.float().abs().flatten()
        values, levels = values[values > 0], self.levels(noise)
        if not len(values):
            return sent.new_zeros(1)
        return (values.min() / levels[0] if levels else values.max()).view(1) / noise

    def levels(self, noise: float) -> list[float]:
        """Return the magnitudes that can be sent, in units of its deviation; none if values are not rounded."""
        if not self.bits:
            return []
        # In the long run a value is this noise, the last one taken back, and the rounding of both.
        spread = math.sqrt((2 + noise**-2) / (1 - _ERROR[self.bits]))
        return [level * spread for level in _LEVELS[self.bits]]


def rms(grads: Tensor) -> Tensor:
    """Return the root mean square of every row; in float32, since the squares of a half would underflow."""
    norm: Tensor = torch.linalg.vector_norm(grads.float(), dim=-1)
    return norm / math.sqrt(max(grads.shape[-1], 1))


def extent(grads: Tensor) -> Tensor:
    """Return what the noise of one tensor of several clients `[users, *shape]` is measured by: its RMS, or `peak`."""
    whole = rms(grads.flatten(1) if grads.ndim > 1 else grads[:, None])
    return torch.maximum(whole, peak(grads)) if has_peaks(grads.shape[1:]) else whole


def peak(grads: Tensor) -> Tensor:
    """Return the RMS of the largest row of each client `[users, rows, *inputs]`, over `PEAK`."""
    return rms(grads.flatten(2)).amax(1) / PEAK


def has_peaks(shape: Sequence[int]) -> bool:
    """Say whether a tensor of this shape has rows that see a whole input, and enough for one to stand out."""
    return rows_see_inputs(shape) and shape[0] > FEW_UNITS


def on_grid(scale: Tensor) -> Tensor:
    """Return the next of `theory.SCALES` sizes: what is sent tells no more of a gradient's exact size.

    Zero stays zero. What is larger than all of them becomes infinite, so that the upload is refused as not finite.

    >>> on_grid(torch.tensor([0.0, 1e-30, 1.0, 1.1, 3.0, 1e30]))
    tensor([0.0000e+00, 2.3283e-10, 1.0000e+00, 1.1892e+00, 3.3636e+00,        inf])
    """
    exponent = (scale.log2() * PER_OCTAVE).ceil().clamp_min(PER_OCTAVE * LOWEST)
    size = torch.exp2(exponent / PER_OCTAVE).masked_fill(exponent > PER_OCTAVE * HIGHEST, math.inf)
    return torch.where(scale == 0, scale, size)


def _round(values: Tensor, scale: Tensor, levels: list[float]) -> Tensor:
    if not levels:
        return values * (scale != 0)  # without noise nothing leaves: the residual holds older gradients
    size = values.abs()
    rounded = torch.full_like(values, levels[0])
    for low, high in pairwise(levels):
        rounded += (size > scale * (low + high) / 2) * (high - low)
    return torch.copysign(rounded * scale, values)
