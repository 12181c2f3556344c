"""What an attacker finds out about a defense: it runs the client's own code on gradients of its own."""

import copy
import logging
from collections.abc import Iterator
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

PATIENCE = 64  # batches after which a defense that sends nothing is taken at its word
FLOOR = 4.0  # deviations of the noise beyond which an entry cannot be noise alone
STANDS_OUT = 0.01  # share of the entries that must, before others can be said to be missing
HIDDEN = 10.0  # deviations by which an entry would stand out had it been sent
RUNS = 4  # of a defense, to tell its noise from what it always does
BENT = 1e-2  # change of the values, relative to their size, that is worth imitating


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
        drawn = torch.randint(seen.num_classes, (seen.num_examples,), generator=rng)
        # How large a tensor's gradient is can hang on the label: of an edited classifier it does.
        y = (drawn if seen.labels is None else seen.labels.to(drawn)).to(device)
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
    variance, clean = sent.var(0), always & with_zeros(always.view(shape)).flatten()
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


def with_zeros(sent: Tensor) -> Tensor:
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

    @property
    def bends(self) -> bool:
        """Whether it changes values for good in any tensor."""
        return any(done.bends for done in (self.behaviour or {}).values())

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
    except torch.cuda.OutOfMemoryError:
        raise  # an attacker that knows less for want of memory would flatter the defense
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
    except (GradveilError, ValueError, RuntimeError):
        return False
    return bool(((sent == 0) | (sent == grads["probe"])).all())
