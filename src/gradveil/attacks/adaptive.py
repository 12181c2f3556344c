"""What an attacker who knows the defense makes of an upload: which numbers to compare, and how much each counts."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..core import Batch, Defense, Grads, LossFn, Observation, Step
from ..defenses import Chain, ErrorFeedback
from ..errors import GradveilError
from ..gradients import gradient, local_update
from .bypass import INNER
from .space import device_of

log = logging.getLogger(__name__)

LOOKS_PRUNED = 0.4  # share of exact zeros in the middle tensor from which an upload counts as pruned
BIG_ENOUGH = 20  # tensors below this say little about a share of zeros
STALE = 0.3  # weight of an entry that may hold older batches, beside one that cannot
PATIENCE = 64  # batches after which a defense that sends nothing is taken at its word
FLOOR = 4.0  # deviations of the noise beyond which an entry cannot be noise alone
STANDS_OUT = 0.01  # share of the entries that must, before others can be said to be missing
HIDDEN = 10.0  # deviations by which an entry would stand out had it been sent
RUNS = 4  # of a defense, to tell its noise from what it always does
BENT = 1e-2  # change of the values, relative to their size, that is worth imitating

Response = Callable[[Tensor], Tensor]  # an own gradient [P] -> what the client would have sent of it


@dataclass(frozen=True)
class Target:
    """What a candidate's gradient is compared with; all vectors flat over all tensors, in the order of the upload."""

    sent: Tensor  # [P], already multiplied by `weight`
    weight: Tensor | None = None  # [P], multiplies the candidate's gradient; None stands for ones
    low: Tensor | None = None  # [P], smallest and largest magnitude sent in the entry's tensor;
    high: Tensor | None = None  # 0 and 0 where the entry was sent, so that no size violates the band
    response: Response | None = None  # applied to the candidate's gradient before it is compared
    noise: float = 0.0  # share of the energy compared that is noise


@dataclass(frozen=True)
class Behaviour:
    """What a defense does to one tensor, found by trying it on a gradient of the attacker's own."""

    prunes: bool  # sends exact zeros
    noise: float  # standard deviation of what differs between two runs on the same gradient
    bends: bool  # changes values for good by more than a common factor: rounds or clips them
    floor: float = 0.0  # size up to which an entry may be a zero under noise: no larger one was left out
    keeps_top: bool = False  # sends the largest entry
    clean_columns: bool = False  # puts its noise on whole columns (along the first axis): one with a zero has none


def flat(grads: Grads) -> Tensor:
    """Return all tensors in one vector."""
    return torch.cat([g.flatten() for g in grads.values()])


def shaped(vector: Tensor, like: Grads) -> Grads:
    """Return the tensors that `flat` put into one vector."""
    parts = vector.split([g.numel() for g in like.values()])
    return {name: part.view(g.shape) for (name, g), part in zip(like.items(), parts, strict=True)}


class Imitation:
    """The attacker's copy of the client's defense, in its first round, run on gradients of the attacker's own."""

    def __init__(self, seen: Observation, defense: Defense) -> None:
        self.defense, self.like = defense, seen.grads
        self.model = copy.deepcopy(seen.model)
        self.examples = seen.num_examples
        device, rng = device_of(seen), torch.Generator().manual_seed(0)
        x = torch.randn(seen.num_examples, *seen.input_shape, generator=rng).to(device)
        y = torch.randint(seen.num_classes, (seen.num_examples,), generator=rng).to(device)
        self.steps, self.lr = seen.local_steps, seen.local_lr
        self.batch = Batch(x, y)  # stands in for the private one where the defense wants to look at it
        self.round = seen.round

    def __call__(self, own: Tensor, seed: int = 0) -> Tensor:
        """Return what the defense makes of one flat gradient; raises `GradveilError` where it needs the client."""
        for sent in islice(self.uploads(own, seed), PATIENCE):  # a client that mixes batches first sends nothing
            if bool(sent.any()):
                break
        return sent

    def uploads(self, own: Tensor, seed: int = 0) -> Iterator[Tensor]:
        """Give what a client sends round after round that has the same gradient every time."""
        grads = shaped(own, self.like)
        state = self.defense.init(grads)
        if "per_example" in self.defense.needs:
            grads = {name: g.expand(self.examples, *g.shape) for name, g in grads.items()}
        rng = torch.Generator(own.device).manual_seed(seed)
        step = Step(rng, self.round, self.model, self.batch, num_examples=self.examples)
        if "mask" in self.defense.needs:
            step = replace(step, mask=self.defense.propose(grads, state, step))
        while True:
            sent, state = self.defense.apply(grads, state, step)
            yield flat(sent)

    def typical(self, loss_fn: LossFn) -> Tensor:
        """Return what a client like this one would compute from the attacker's batch: a gradient, or an update."""
        model, rng = copy.deepcopy(self.model), torch.Generator().manual_seed(1)
        if self.lr is None:
            own = gradient(model, loss_fn, self.batch)
        else:
            own = local_update(model, loss_fn, [self.batch] * self.steps, self.lr)
        typical = []
        for g in own.values():
            # A little noise of the tensor's own size: dead units must not pass for pruned ones.
            jitter = torch.randn(g.shape, generator=rng).to(g) * (1e-3 * g.square().mean().sqrt() + 1e-12)
            typical.append((g + jitter).flatten())
        return torch.cat(typical)

    def behaviour(self, loss_fn: LossFn) -> dict[str, Behaviour]:
        """Return what the defense does to each tensor of a typical gradient.

        The attacker runs the client's own code, so it needs no list of defenses. What differs between runs is noise;
        what they change alike, beyond a factor, is rounding or clipping.
        """
        sizes = [g.numel() for g in self.like.values()]
        own = self.typical(loss_fn)
        runs = [self(own, seed).split(sizes) for seed in range(RUNS)]
        shapes = [g.shape for g in self.like.values()]
        found = [
            _compare(own, torch.stack(sent), n) for own, n, *sent in zip(own.split(sizes), shapes, *runs, strict=True)
        ]
        # A tensor that got no noise this time may get it next time, on columns where nothing is missing.
        loudest = max(one.noise for one in found)
        found = [replace(one, noise=one.noise or loudest) if one.clean_columns else one for one in found]
        return dict(zip(self.like, found, strict=True))


def _compare(own: Tensor, sent: Tensor, shape: torch.Size) -> Behaviour:
    """Return what was done to one tensor, by what was sent of it in several runs `[RUNS, n]`."""
    always, top = (sent != 0).all(0), own.abs().argmax()
    if not bool(always.any()):
        return Behaviour(True, 0.0, False)
    variance, clean = sent.var(0), always & _with_zeros(always.view(shape)).flatten()
    clean_columns = bool(clean.any()) and not bool(variance[clean].any())
    noisy = variance[always & ~clean] if clean_columns else variance[always]
    noise = float(noisy.mean().sqrt()) if noisy.numel() else 0.0
    kept = always
    if covers := bool(always.all()) and _covers_zeros(own, sent.mean(0), noise / RUNS**0.5):
        kept = sent.mean(0).abs() > FLOOR * noise / RUNS**0.5
    keeps_top = bool(kept[top])
    own, mean = own[kept], sent[:, kept].mean(0)
    factor = (own * mean).sum() / own.square().sum().clamp_min(1e-30)
    bent = float((mean - factor * own).square().mean().sqrt())
    size = float(mean.square().mean().sqrt())
    bends = noise < BENT * size < bent
    return Behaviour(bool((~kept).any()), noise, bends, covers * FLOOR * noise, keeps_top, clean_columns)


def _with_zeros(sent: Tensor) -> Tensor:
    """Return the entries in whose column, along the first axis, anything was not sent."""
    return (~sent).any(0, keepdim=True).expand_as(sent) if sent.dim() else ~sent


def _covers_zeros(own: Tensor, mean: Tensor, noise: float) -> bool:
    """Say whether the noise (of the mean) hides that entries were left out, the attacker's own values being known."""
    sent = mean.abs() > FLOOR * noise
    if float(sent.float().mean()) < STANDS_OUT:
        return False  # noise drowns everything: a value that does not stand out was not left out
    factor = (own * mean)[sent].sum() / own[sent].square().sum().clamp_min(1e-30)
    return bool(noise > 0 and sent.any() and (~sent & (factor * own.abs() > HIDDEN * noise)).any())


class Understanding(NamedTuple):
    """What the attacker found out about a client's defense before it looked at any upload."""

    imitation: Imitation | None = None
    behaviour: dict[str, Behaviour] | None = None  # None: only what arrived is evidence

    def arrived(self, grads: Grads) -> Tensor:
        """Return which entries `[P]` were sent, as opposed to left out and perhaps covered with noise."""
        does = self.behaviour or {}
        floors = {name: does[plain].floor for name in grads if (plain := name.removeprefix(INNER)) in does}
        return torch.cat([(g.abs() > floors.get(name, 0.0)).flatten() for name, g in grads.items()])

    def received(self, grads: Grads) -> Tensor:
        """Return what was sent `[P]`, with zeros where nothing was."""
        return torch.where(self.arrived(grads), flat(grads), 0.0)


def understand(seen: Observation) -> Understanding:
    """Return what the defense does to gradients of clients like this one, if it is known and can be imitated."""
    if seen.defense is None:
        return Understanding()
    imitation = Imitation(seen, seen.defense)
    try:
        return Understanding(imitation, imitation.behaviour(seen.loss_fn))
    except (GradveilError, ValueError, RuntimeError) as reason:
        log.info("%s cannot be imitated (%s): going by what arrived", seen.defense.key(), reason)
        return Understanding()


def forgets(defense: Defense | None) -> bool:
    """Say whether an entry that was sent leaves nothing behind: error feedback round an operator that only selects."""
    if isinstance(defense, Chain):
        return sum(forgets(part) for part in defense.parts) == 1
    if not isinstance(defense, ErrorFeedback):
        return False
    grads = {"probe": torch.randn(1000, generator=torch.Generator().manual_seed(0))}
    step, state = Step(torch.Generator().manual_seed(0)), defense.inner.init(grads)
    try:
        if "mask" in defense.needs:
            step = replace(step, mask=defense.inner.propose(grads, state, step))
        sent = defense.inner.apply(grads, state, step)[0]["probe"]
    except (GradveilError, ValueError):
        return False
    return bool(((sent == 0) | (sent == grads["probe"])).all())


def freshness(seen: Observation, known: Understanding) -> Tensor | float:
    """Return how far each entry is from being mixed with older batches, by the client's previous upload.

    Under error feedback an entry sent last round starts from zero, so what is sent of it now is this batch alone.
    """
    before = [one for one in seen.earlier if one.round == seen.round - 1]
    if not before or not forgets(seen.defense):
        return 1.0
    return torch.where(known.arrived(before[0].grads), 1.0, STALE)


def looks_pruned(grads: Grads) -> bool:
    """Say whether exact zeros are so common that they can only mean "not sent"."""
    shares = sorted(float((g == 0).float().mean()) for g in grads.values() if g.numel() >= BIG_ENOUGH)
    return bool(shares) and shares[len(shares) // 2] > LOOKS_PRUNED


def aim(
    seen: Observation,
    known: Understanding | None = None,
    *,
    masked: str = "auto",
    weighting: str = "auto",
    reapply: str = "auto",
    band: bool = False,
) -> Target:
    """Return what to compare candidates with; see `GradientMatching` for the arguments.

    `known` saves trying the defense out again for every upload of the same kind of client.
    """
    known = known or understand(seen)
    guess = Behaviour(looks_pruned(seen.grads), 0.0, False)
    does = known.behaviour or {}
    tensors = [(g, does.get(name.removeprefix(INNER), guess)) for name, g in seen.grads.items()]
    pruned = [masked == "always" or (masked == "auto" and done.prunes) for _, done in tensors]
    weight = torch.cat(
        [
            ((g.abs() > done.floor) if hidden else torch.ones_like(g)).to(g.dtype).flatten()
            for (g, done), hidden in zip(tensors, pruned, strict=True)
        ]
    )
    weight = weight * freshness(seen, known)
    noise = torch.cat([_noise_on(g, done).flatten() for g, done in tensors]) * weight
    sent = flat(seen.grads)
    if weighting == "auto" and bool(noise.any()):
        # As a likelihood would: by one over the deviation. Below a tenth of the typical size noise does not matter.
        # What is known exactly, if anything is, tells that size: the rest may be noise for the most part.
        sure = weight * (noise == 0)
        sure = sure if bool(sure.any()) else weight
        typical = (sent * sure).square().sum().div(sure.sum().clamp_min(1)).sqrt()
        trust = 1 / noise.clamp_min(0.1 * float(typical) + 1e-30)
        weight, noise = weight * trust / trust.amax(), noise * trust / trust.amax()
    noise_share = float(noise.square().sum() / (sent * weight).square().sum().clamp_min(1e-30))
    low, high = _bands(tensors, pruned) if band else (None, None)
    bends = reapply == "always" or (reapply == "auto" and any(done.bends for _, done in tensors))
    # The imitation wants whole gradients; of a model that was cut off there are none.
    bends = bends and known.imitation is not None and known.imitation.like.keys() == seen.grads.keys()
    return Target(
        sent * weight,
        None if bool((weight == 1).all()) else weight,
        low,
        high,
        known.imitation if bends else None,
        min(noise_share, 1.0),
    )


def _noise_on(g: Tensor, done: Behaviour) -> Tensor:
    """Return the standard deviation of the noise on each entry of one tensor."""
    noise = torch.full_like(g, done.noise)
    return torch.where(_with_zeros(g != 0), 0.0, noise) if done.clean_columns else noise


def _bands(tensors: Sequence[tuple[Tensor, Behaviour]], pruned: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """Return, for every entry that was not sent, the smallest and the largest magnitude sent in its tensor.

    The largest is infinite where nothing is removed at the top.
    """
    lows, highs = [], []
    for (g, done), hidden in zip(tensors, pruned, strict=True):
        size = g.abs()
        sent = size > done.floor
        if not hidden or not bool(sent.any()):
            sent = torch.ones_like(sent)  # nothing can be said about this tensor
        low = torch.where(sent & (size > 0), size, torch.inf).amin()
        high = torch.full_like(low, torch.inf) if done.keeps_top else size.amax()
        lows.append(torch.where(sent, 0.0, low).flatten())
        highs.append(torch.where(sent, 0.0, high).flatten())
    return torch.cat(lows), torch.cat(highs)
