"""Rob the clients: a planted layer sorts the pictures of a batch into bins and its gradient shows each bin's content.

All rows of the planted layer measure the same thing, a weighted mean of the picture, against rising thresholds. Row i
is excited by every picture above its threshold, with the same factor for all rows, so its gradient minus that of the
next row is what lies between the two thresholds: a verbatim copy if that is one picture.

Layer-wise pruning ranks the entries of the planted layer among themselves, and the server owns that layer: rows that
are always silent (dead) fill what is pruned at the bottom, rows with a huge gradient (decoys, in pairs whose effects on
the forward pass cancel) fill what is pruned at the top, and the bins travel untouched.

Reference: Fowl et al., "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models".
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import check
from ..core import Attack, Defense, Knowledge, Observation, Reconstruction
from ..errors import NeedError
from .pruning import pruned_shares
from .space import box

PHOTO_MEAN, PHOTO_SPREAD = 0.47, 0.12  # of the mean of a natural photograph, pixels in 0..1
ROUNDING = 1e-6  # rows that differ by less than this share of themselves may be equal
NEVER = 1e4  # spreads above the centre: no picture gets there
NOISE_MARGIN = 1.5  # of mean squares over thousands of entries, whose chance spread is far smaller
QUIET = 0.1  # share of neighbouring rows that no picture separates, at least
SCATTERED = 0.9  # a band of which less arrives was thinned at random


class ImprintBlock(nn.Module):
    """The planted layer. It adds a faint pattern to the picture, so the model behind it still works.

    Where there are more `weights` than pixels, the rest of the layer's inputs are ones.
    """

    pattern: Tensor

    def __init__(self, thresholds: Tensor, outgoing: Tensor, weights: Tensor, pattern: Tensor, shift: float) -> None:
        super().__init__()
        rows = len(thresholds)
        self.shift = shift
        self.ones = len(weights) - pattern.numel()
        self.measure = nn.Linear(len(weights), rows)
        self.mix = nn.Linear(rows, 1, bias=False)
        self.register_buffer("pattern", pattern)
        with torch.no_grad():
            self.measure.weight.copy_(weights.expand(rows, -1))
            self.measure.bias.copy_(-weights.sum() * (thresholds + shift))
            self.mix.weight.copy_(outgoing / weights.sum())

    def forward(self, x: Tensor) -> Tensor:
        """Return the picture with the pattern added, the stronger the brighter the picture."""
        inputs = nn.functional.pad(x.flatten(1) + self.shift, (0, self.ones), value=1.0)
        glow: Tensor = self.mix(torch.relu(self.measure(inputs)))
        return x + glow.view(-1, *[1] * (x.ndim - 1)) * self.pattern


class Planted(nn.Module):
    """A model behind a planted layer."""

    def __init__(self, imprint: ImprintBlock, body: nn.Module) -> None:
        super().__init__()
        self.imprint = imprint
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """Return what the model gives for the changed picture."""
        out: Tensor = self.body(self.imprint(x))
        return out

    @property
    def auxiliary_loss(self) -> Callable[[], Tensor]:
        """The body's own loss term, where it has one: the client must notice no difference."""
        inner: Callable[[], Tensor] = self.body.auxiliary_loss  # type: ignore[assignment]
        return inner


@dataclass(frozen=True)
class Imprint(Attack):
    """Plant `bins` rows in front of any model and read one picture out of every bin that holds one.

    `decoys` and `dead` are the shares of all planted rows that shield the bins from pruning: `fitted` sets them from
    the defense, `bins` stays the number of useful rows. `center` and `spread` describe the mean of a picture in
    model-input space: `fitted` assumes natural photographs, `measured` takes them from public pictures.

    Guarantees: without a defense, an exact copy of every picture that is alone in its bin; with the layout fitted to
    layer-wise pruning, the same past it. Two pictures in one bin come out as their mixture.
    """

    bins: int = 200
    decoys: float = 0.0
    dead: float = 0.0
    center: float = 0.0
    spread: float = 0.46
    shift: float = 3.0
    gain: float = 1e-7
    decoy_gain: float = 1e3

    def __post_init__(self) -> None:
        check.at_least(2, bins=self.bins)
        check.fraction(decoys=self.decoys, dead=self.dead)
        check.positive(spread=self.spread, gain=self.gain, decoy_gain=self.decoy_gain)
        if self.decoys + self.dead > 0.99:
            raise ValueError(f"decoys + dead must leave room for bins, got {self.decoys} + {self.dead}")

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"active"})

    def fitted(self, defense: Defense | None, mean: tuple[float, ...], std: tuple[float, ...]) -> "Imprint":
        center = 0.0 if any(mean) else PHOTO_MEAN / std[0]  # normalised pictures have mean 0 by design
        spread = PHOTO_SPREAD * sum(1 / s for s in std) / len(std)
        black = max(m / s for m, s in zip(mean, std, strict=True))
        top, bottom, density = pruned_shares(defense) if defense is not None else (0.0, 0.0, 1.0)
        bins = self.bins
        if density < SCATTERED:
            # Pruned at random: shields are no use, but rows between two pictures are equal, so more rows fill the gaps.
            top, bottom, bins = 0.0, 0.0, math.ceil(2 * bins / density)
        return replace(
            self, bins=bins, decoys=top, dead=bottom, center=center, spread=spread, shift=black + 0.25 / min(std)
        )

    def measured(self, pictures: Tensor) -> "Imprint":
        """Return this attack with its bins laid where public pictures `[N, ...]`, given as model inputs, lie."""
        means = pictures.flatten(1).mean(1)
        return replace(self, center=float(means.mean()), spread=float(means.std()))

    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        thresholds, outgoing = self._layout()
        # Random signs: a uniform glow is just what a BatchNorm behind the first convolution takes out again.
        pattern = torch.randint(2, input_shape, generator=rng, device=rng.device).float().cpu() * 2 - 1
        # Uneven weights: pictures of few grey levels often share a plain mean.
        weights = 0.5 + torch.rand(math.prod(input_shape), generator=rng, device=rng.device).cpu()
        # `nn.Linear` draws from the global generator before its values are replaced: leave no trace there.
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            block = ImprintBlock(thresholds, outgoing, self.gain * weights / weights.sum(), pattern, self.shift)
        like = next(model.parameters())
        return Planted(block.to(like.device, like.dtype), copy.deepcopy(model)).train(model.training)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        name, block = planted_in(seen.model)
        prefix = f"{name}.measure"
        weight = seen.grads[f"{prefix}.weight"][: self.bins].double()
        bias = seen.grads[f"{prefix}.bias"][: self.bins].double()
        planted = block.measure.weight.detach()[0].double()
        edges = -block.measure.bias.detach()[: self.bins].double() / planted.sum()
        low, high = box(seen)
        pictures = read_bins(weight, bias, edges, planted / planted.sum(), seen.num_examples).to(low.dtype) - self.shift
        inputs = pictures.reshape(-1, *seen.input_shape).clamp(low, high)
        return Reconstruction(inputs, info={"bins": self.bins, "filled": len(inputs)})

    def _layout(self) -> tuple[Tensor, Tensor]:
        """Return the thresholds and outgoing weights of all rows: bins, then decoys, then dead rows."""
        rows = math.ceil(self.bins / (1 - self.decoys - self.dead))
        # Rounded up, decoys to pairs: a spare decoy or dead row costs nothing, a missing one costs a bin.
        while (decoys := 2 * math.ceil(self.decoys * rows / 2)) + math.ceil(self.dead * rows) + self.bins > rows:
            rows += 1
        dead = rows - self.bins - decoys
        share = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        lowest = torch.tensor([-10.0], dtype=torch.float64)
        bins = torch.cat([lowest, torch.special.ndtri(share)])
        spreads = torch.cat([bins, lowest.expand(decoys), torch.full((dead,), NEVER, dtype=torch.float64)])
        signs = torch.tensor([1.0, -1.0]).repeat(decoys // 2)
        outgoing = torch.cat([torch.ones(self.bins), self.decoy_gain * signs, torch.ones(dead)])
        return (self.center + self.spread * spreads).float(), outgoing / self.bins


def read_bins(weight: Tensor, bias: Tensor, edges: Tensor, measure: Tensor, count: int) -> Tensor:
    """Return up to `count` pictures `[R, N]`, one for each step between rows that differ, likeliest first.

    `edges` `[rows]` are the thresholds on `picture @ measure`. Rows with no picture between them are equal: pooling
    such a run averages noise away and fills what random pruning took from one row with what it left of another.
    """
    weight = torch.cat([weight, torch.zeros_like(weight[:1])])  # above the last row there is nothing
    bias = torch.cat([bias, torch.zeros_like(bias[:1])])
    ends = torch.cat([_steps(weight).nonzero()[:, 0], torch.tensor([len(weight) - 1], device=weight.device)])
    run = torch.searchsorted(ends, torch.arange(len(weight), device=weight.device))
    rows, _ = _pooled(weight, run, len(ends))
    factors, known = _pooled(bias[:, None], run, len(ends))
    content, factor = rows[:-1] - rows[1:], (factors[:-1] - factors[1:])[:, 0]
    low = edges[ends[:-1]]
    high = torch.cat([edges, edges[-1:] + (edges[-1] - edges[-2])])[ends[:-1] + 1]
    if not len(content):
        return weight.new_zeros(0, weight.shape[1])
    # Where no bias entry of a run arrived the bin itself says how bright the picture is.
    by_bin = content @ measure / ((low + high) / 2)
    usable = known[:-1, 0] & (known[1:, 0] | (ends[1:] == len(weight) - 1)) & (factor != 0)
    factor = torch.where(usable, factor, by_bin)
    pictures = content / factor[:, None]
    # A picture must measure what its bin stands for. More guesses than examples would let the pairing choose.
    means = pictures @ measure
    off = torch.maximum(low - means, means - high).clamp_min(0) / (high - low)
    strength = content.norm(dim=1)
    order = torch.argsort(off.nan_to_num(math.inf).clamp(0.1, 1e3) - 0.01 * strength / strength.max())
    return torch.nan_to_num(pictures[order[:count]])


def _steps(weight: Tensor) -> Tensor:
    """Return `[rows - 1]`: whether a row differs from the next, judged by the entries that arrived of both."""
    sent = weight != 0
    empty = ~sent.any(1)
    both = (sent[:-1] & sent[1:]) | empty[:-1, None] | empty[1:, None]
    gap = ((weight[:-1] - weight[1:]) * both).square().sum(1) / both.sum(1).clamp_min(1)
    # Some neighbours are equal even in a large batch, so a small gap is noise; a picture stands out from it, and from
    # rounding.
    level = weight.square().mean(1)
    return gap > torch.maximum(NOISE_MARGIN * gap.quantile(QUIET), ROUNDING**2 * (level[:-1] + level[1:]))


def _pooled(rows: Tensor, run: Tensor, runs: int) -> tuple[Tensor, Tensor]:
    """Return the mean of what arrived in each run of rows, 0 where nothing did, and whether something did."""
    sent = (rows != 0).to(rows.dtype)
    total = rows.new_zeros(runs, rows.shape[1]).index_add(0, run, rows)
    count = rows.new_zeros(runs, rows.shape[1]).index_add(0, run, sent)
    return total / count.clamp_min(1), count > 0


def planted_in(model: nn.Module) -> tuple[str, ImprintBlock]:
    """Return the name of the planted layer and the layer itself."""
    for name, module in model.named_modules():
        if isinstance(module, ImprintBlock):
            return name, module
    raise NeedError("nothing is planted in this model: call plant before the client computes its gradient")
