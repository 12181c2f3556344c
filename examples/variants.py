"""Releases that were tried beside the recommended one: small defenses through the product's own contract.

`examples/frontier.py` knows them by name beside the product's own. What each of them buys, and why none of them is in
the product, is measured in docs/hardened.md.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gradveil import check, select, tree
from gradveil.core import Defense, Grads, Masks, Need, State, Step
from gradveil.defenses import Chain, DualPrune, ErrorFeedback, Quantize, RandomK
from gradveil.veil import derive_rng


@dataclass(frozen=True)
class Gathered(Defense):
    """Mix several private batches before an upload of `inner`; until then nothing leaves.

    Only before the first upload (`always=False`: a residual warmed in private, after which every round sends), or
    before each one (local accumulation). `inner` must keep a residual, which is where the batches wait.
    """

    inner: Defense
    batches: int = 4
    always: bool = False

    def __post_init__(self) -> None:
        check.at_least(1, batches=self.batches)
        if self.inner.residual(self.inner.init({"probe": torch.zeros(1)})) is None:
            raise ValueError(f"{self.inner.key()} keeps no residual to gather batches in: wrap it in ErrorFeedback")

    @property
    def needs(self) -> frozenset[Need]:
        return self.inner.needs

    def init(self, params: Grads) -> State:
        return {**tree.under("inner", self.inner.init(params)), "waiting": torch.zeros((), dtype=torch.int64)}

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        inner, waiting = tree.only("inner", state), state["waiting"]
        if int(waiting) < self.batches - 1:
            held = self.inner.take_back(grads, inner)
            return tree.zeros_like(grads), {**tree.under("inner", held), "waiting": waiting + 1}
        sent, inner = self.inner.apply(grads, inner, step)
        return sent, {**tree.under("inner", inner), "waiting": torch.zeros_like(waiting) if self.always else waiting}

    def residual(self, state: State) -> Grads | None:
        return self.inner.residual(tree.only("inner", state))

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        return {**state, **tree.under("inner", self.inner.take_back(sent, tree.only("inner", state), newest=newest))}

    def propose(self, grads: Grads, state: State, step: Step) -> Masks:
        return self.inner.propose(grads, tree.only("inner", state), step)


@dataclass(frozen=True)
class Rotating(Defense):
    """Dual pruning of every `every`-th entry, the next ones in the next round; `top` and `bottom` are shares of those.

    Inside error feedback an entry then leaves as the sum over at least `every` private batches, from round `every` on.
    """

    every: int = 4
    top: float = 0.05
    bottom: float = 0.15

    def __post_init__(self) -> None:
        check.at_least(1, every=self.every)
        DualPrune(self.top, self.bottom)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return tree.tmap(lambda g: self._turn(g, step.round), grads), state

    def _turn(self, g: Tensor, round_: int) -> Tensor:
        whole = torch.zeros_like(g).reshape(-1)
        part = g.reshape(-1)[round_ % self.every :: self.every]
        if part.numel():
            band = select.band(part.numel(), self.top, self.bottom)
            whole[round_ % self.every :: self.every] = select.prune([part.contiguous()], [band])[0]
        return whole.view(g.shape)


@dataclass(frozen=True)
class NoisyBand(Defense):
    """Dual pruning with feedback whose sent band carries noise that is taken back in later rounds.

    The noise is `noise` times the RMS of the band, but never more than `limit` times the RMS of the gradient: the
    residual raises the band, and without the limit the noise it scales raises the residual again, until it diverges.
    """

    noise: float = 0.5
    limit: float = 4.0
    top: float = 0.05
    bottom: float = 0.75

    def __post_init__(self) -> None:
        check.positive(noise=self.noise, limit=self.limit)
        DualPrune(self.top, self.bottom)

    def init(self, params: Grads) -> State:
        return ErrorFeedback(DualPrune()).init(params)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        total = tree.add(tree.only("residual", state), grads)
        band, _ = DualPrune(self.top, self.bottom).apply(total, {}, step)
        sent = {name: self._cover(grads[name], b, step.rng).to(grads[name].dtype) for name, b in band.items()}
        return sent, tree.under("residual", tree.sub(total, sent))

    def _cover(self, g: Tensor, band: Tensor, rng: torch.Generator) -> Tensor:
        there = band != 0
        size = band.square().sum().div(there.sum().clamp_min(1)).sqrt()
        largest = self.limit * g.square().sum().div(max(g.numel(), 1)).sqrt()
        normal = torch.randn(g.shape, generator=rng, device=rng.device).to(band)
        return band + normal * there * torch.minimum(self.noise * size, largest)

    def residual(self, state: State) -> Grads | None:
        return tree.only("residual", state)

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        return tree.under("residual", tree.add(tree.only("residual", state), sent))


@dataclass(frozen=True)
class RandomProjection(Defense):
    """Mix `block` neighbouring entries by a random projection to a `keep` share of them, another one every round.

    The server must know the projection to use it, so it is public, and the attacker gets keep times n exact equations.
    On this wire the message is dense; a format of its own would send the coefficients only.
    """

    keep: float = 0.1
    block: int = 128

    def __post_init__(self) -> None:
        check.fraction(keep=self.keep)
        check.at_least(2, block=self.block)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        rank = max(1, round(self.keep * self.block))
        draw = torch.randn(self.block, rank, generator=derive_rng(0, "projection", step.round))
        basis = torch.linalg.qr(draw)[0]
        return tree.tmap(lambda g: self._project(g, basis.to(g)), grads), state

    def _project(self, g: Tensor, basis: Tensor) -> Tensor:
        n = g.numel()
        padded = torch.nn.functional.pad(g.reshape(-1), (0, -n % self.block)).view(-1, self.block)
        mixed: Tensor = padded @ basis @ basis.T
        return mixed.reshape(-1)[:n].view(g.shape)


@dataclass(frozen=True)
class LowRankMatrix(Defense):
    """Send each matrix as its best approximation of `rank` in a random sketch (as PowerSGD does); vectors whole."""

    rank: int = 2

    def __post_init__(self) -> None:
        check.at_least(1, rank=self.rank)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return tree.tmap(lambda g: self._approximate(g, step.rng), grads), state

    def _approximate(self, g: Tensor, rng: torch.Generator) -> Tensor:
        if g.dim() < 2 or not g.numel():
            return g.clone()
        matrix = g.flatten(1).float()
        size = matrix.abs().amax().clamp_min(1e-30)
        sketch = torch.randn(matrix.shape[1], self.rank, generator=rng, device=rng.device).to(matrix)
        left = torch.linalg.qr(matrix / size @ sketch)[0]
        near: Tensor = left @ (left.T @ matrix)
        return near.view(g.shape).to(g.dtype)


@dataclass(frozen=True)
class Decayed(Defense):
    """Multiply the residual of an error feedback by `share` after every round, so that nothing piles up for ever."""

    inner: ErrorFeedback
    share: float = 0.9

    def __post_init__(self) -> None:
        check.fraction(share=self.share)

    def init(self, params: Grads) -> State:
        return self.inner.init(params)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        sent, state = self.inner.apply(grads, state, step)
        kept = tree.tmap(lambda r: r * self.share, tree.only("residual", state))
        return sent, {**state, **tree.under("residual", kept)}

    def residual(self, state: State) -> Grads | None:
        return self.inner.residual(state)

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        return self.inner.take_back(sent, state, newest=newest)


def warmed_dgp(batches: int = 5) -> Defense:
    """Published DGP whose residual is warmed by `batches - 1` private batches before the first upload."""
    return Gathered(ErrorFeedback(DualPrune()), batches)


def accumulated_dgp(batches: int = 4) -> Defense:
    """Published DGP that uploads every `batches`-th round."""
    return Gathered(ErrorFeedback(DualPrune()), batches, always=True)


def rotating_dgp(every: int = 4) -> Defense:
    """Rotating release with feedback; the share of a turn is chosen so that a fifth of all entries leaves in a round.

    From `every` 5 on all of a turn but its top leaves.
    """
    return ErrorFeedback(Rotating(every, 0.05, max(0.95 - 0.2 * every, 0.0)))


def random_dgp(keep: float = 0.2) -> Defense:
    """Feedback round a random choice of entries, which says nothing about the data."""
    return ErrorFeedback(RandomK(keep))


def clipped_dgp() -> Defense:
    """Dual pruning whose top leaves clipped, so that the residual stays bounded; as many entries as published DGP."""
    return ErrorFeedback(DualPrune(0.05, 0.8, excess="clip"))


def decayed_dgp(share: float = 0.9) -> Defense:
    """Published DGP with a residual that fades."""
    return Decayed(ErrorFeedback(DualPrune()), share)


def coarse_dgp(bits: int = 2) -> Defense:
    """Published DGP with stochastic rounding of the band inside the feedback."""
    return ErrorFeedback(Chain(DualPrune(), Quantize(bits, "stochastic")))


def projected(keep: float = 0.1) -> Defense:
    """Feedback round a random projection."""
    return ErrorFeedback(RandomProjection(keep))


def low_rank(rank: int = 2) -> Defense:
    """Feedback round a low-rank approximation."""
    return ErrorFeedback(LowRankMatrix(rank))


def warmed_noisy_dgp(noise: float = 0.5, batches: int = 5) -> Defense:
    """Noise on the band and a residual warmed in private, together."""
    return Gathered(NoisyBand(noise), batches)


NAMED: dict[str, Callable[..., Defense]] = {
    f.__name__: f
    for f in (
        warmed_dgp,
        accumulated_dgp,
        rotating_dgp,
        random_dgp,
        clipped_dgp,
        decayed_dgp,
        coarse_dgp,
        projected,
        low_rank,
        warmed_noisy_dgp,
    )
}
CLASSES: tuple[type[Defense], ...] = (Gathered, Rotating, NoisyBand, RandomProjection, LowRankMatrix, Decayed)
VARIANTS: dict[str, Callable[..., Defense]] = {**{c.key(): c for c in CLASSES}, **NAMED}
