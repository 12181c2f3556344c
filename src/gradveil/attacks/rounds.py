"""Attackers with a memory: what several uploads of one client say together.

Error feedback delays information, it does not destroy it. An entry that is sent carries everything accumulated since
it was last sent, so the sum of uploads is the sum of gradients, entry by entry, up to the last time it was sent.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..capture import full_precision
from ..core import Attack, Defense, Knowledge, Observation, Reconstruction
from ..defenses import Chain
from ..errors import NeedError
from ..gradients import parameters
from .adaptive import Target
from .averaging import WARM_UP, combined, noise_left, noise_over
from .bypass import INNER, before_bottleneck
from .imitation import Behaviour, Understanding, flat, forgets, shaped, understand
from .matching import GradientMatching
from .simulate import simulator
from .space import alike


def history_of(seen: Observation) -> list[Observation]:
    """Return the client's uploads that follow each other without a gap up to this one, oldest first."""
    chain = [seen]
    for one in reversed(seen.earlier):
        if one.round != chain[0].round - 1:
            break
        chain.insert(0, one)
    if len(chain) == 1:
        raise NeedError("this attack needs the client's previous uploads: grant rounds and pass earlier=...")
    return chain


def feeds_back(defense: Defense | None, seen: Observation) -> bool:
    """Say whether the client keeps what it did not send and adds it next time."""
    return defense is not None and defense.residual(defense.init(parameters(seen.model))) is not None


@dataclass(frozen=True)
class OverRounds(Attack):
    """Shared by the attacks that run `inner` on what they make of a client's uploads."""

    inner: GradientMatching = field(default_factory=GradientMatching)

    @property
    def adaptive(self) -> bool:
        return True

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        return self.run_many([seen], [rng])[0]


@dataclass(frozen=True)
class RepeatedRounds(OverRounds):
    """A server that sends the same weights again and again and adds up what a client with the same batch returns.

    With error feedback, dividing the sum of an entry's uploads by the rounds it stands for gives its gradient exactly,
    whenever it was sent: after enough rounds only the entries that never leave stay hidden. Without feedback, uploads
    are averaged, which takes noise away; noise on every entry is averaged as its way through the rounds asks for (see
    `averaging`). Assumes that the client's batch does not change.
    """

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"rounds", "active"}

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        # Labels are read off the sum as well, not off the last upload.
        summed, targets = zip(*(self.sum(one) for one in seen), strict=True)
        return self.inner.run_at(summed, targets, rngs)

    def target(self, seen: Observation) -> Target:
        """Return the gradient that the rounds with these weights add up to, and where it is known."""
        return self.sum(seen)[1]

    def sum(self, seen: Observation) -> tuple[Observation, Target]:
        """Return one upload that stands for all rounds with these weights, and what of it to compare."""
        feedback = feeds_back(seen.defense, seen)
        rounds = repetitions(seen, gapless=feedback)
        known = understand(seen)
        uploads = torch.stack([known.received(one.grads) for one in rounds])
        values, ever, does = put_together(seen, known, uploads, [one.round for one in rounds])
        view = replace(seen, grads=shaped(values, seen.grads), earlier=())
        there = shaped(ever.to(values.dtype), seen.grads)
        if self.inner.adaptive:
            view = before_bottleneck(view)
        target = self.inner.aim(view, Understanding(None, does or None))
        weight = torch.cat([there[name.removeprefix(INNER)].flatten() for name in view.grads])
        weight = weight if target.weight is None else weight * target.weight
        return view, replace(target, sent=flat(view.grads) * weight, weight=weight)


def put_together(
    seen: Observation, known: Understanding, uploads: Tensor, rounds: list[int]
) -> tuple[Tensor, Tensor, dict[str, Behaviour]]:
    """Return the gradient behind uploads `[T, P]`, which entries of it are known, and what is left of the defense."""
    does, feedback, whole = known.behaviour or {}, feeds_back(seen.defense, seen), rounds[0] == 0
    sending = uploads.any(1)
    prunes, noisy = any(done.prunes for done in does.values()), any(done.noise for done in does.values())
    if known.imitation and noisy and not prunes and bool(sending.sum() > 1) and (whole or bool(sending.all())):
        uploads, at = uploads[sending], torch.tensor(rounds, device=uploads.device)[sending]
        begin = 0 if whole else max(rounds[0] - WARM_UP, 0)
        # With feedback an upload holds the gradients since the one before.
        since = torch.diff(at, prepend=at.new_tensor([rounds[0] - 1]))
        holds = (since if feedback else torch.ones_like(since)).double()
        noise = noise_over(known.imitation, known.imitation.typical(seen.loss_fn), at.tolist(), begin)
        values, variance = combined(uploads, noise, holds)
        parts = [shaped(one, seen.grads) for one in uploads]
        left = noise_left(parts, shaped(values, seen.grads), noise, holds, variance)
        return values, uploads.any(0), {name: replace(done, noise=left[name]) for name, done in does.items()}
    values, ever = (accumulated if feedback else averaged)(uploads, whole)
    less = len(rounds) if takes_noise_back(seen.defense, seen) else len(rounds) ** 0.5
    return values, ever, {n: replace(done, noise=done.noise / less, floor=0.0) for n, done in does.items()}


def repetitions(seen: Observation, gapless: bool) -> list[Observation]:
    """Return the uploads made with these weights, this one last; `gapless` ends at the first that is missing.

    Across a gap nobody can say what a client with error feedback has kept.
    """
    same = set(next(group for group in alike([seen, *seen.earlier]) if 0 in group))
    chain = [seen]
    for i in range(len(seen.earlier), 0, -1):
        one = seen.earlier[i - 1]
        if i in same and (not gapless or one.round == chain[0].round - 1):
            chain.insert(0, one)
        elif gapless:
            break
    if len(chain) == 1:
        raise NeedError("no earlier upload was made with these weights: the server must repeat them")
    return chain


def takes_noise_back(defense: Defense | None, seen: Observation) -> bool:
    """Say whether the noise of one round is corrected in the next, because it is added under the error feedback."""
    parts = defense.parts if isinstance(defense, Chain) else ()
    return feeds_back(defense, seen) and all(feeds_back(part, seen) for part in parts if part.noisy)


def averaged(uploads: Tensor, whole: bool = True) -> tuple[Tensor, Tensor]:
    """Return the mean of each entry over the uploads that hold it, and which entries any of them holds."""
    times = (uploads != 0).sum(0)
    return uploads.sum(0) / times.clamp_min(1), times > 0


def accumulated(uploads: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Return the gradient behind uploads `[T, P]` with error feedback, and which entries are known.

    `whole` says that the first upload is the client's first. If it is not, an entry's first upload only marks from
    where on it is counted.

    >>> accumulated(torch.tensor([[2.0, 0.0, 0.0], [2.0, 6.0, 0.0]]), whole=True)
    (tensor([2., 3., 0.]), tensor([ True,  True, False]))
    """
    total = torch.zeros_like(uploads[0])
    since = torch.zeros_like(total) if whole else torch.full_like(total, torch.nan)
    last = torch.full_like(total, torch.nan)
    for t, upload in enumerate(uploads, start=1):
        sent = upload != 0
        counted = sent & ~since.isnan()
        total = torch.where(counted, total + upload, total)
        last = torch.where(counted, float(t), last)
        since = torch.where(sent & since.isnan(), float(t), since)
    known = ~last.isnan()
    return torch.where(known, total / (last - since), 0.0), known


@dataclass(frozen=True)
class Chained(OverRounds):
    """Follow one client from its first round: reconstruct, compute its whole gradient, deduce what it kept, go on.

    Round t is compared with `sent - kept`, where kept is what the reconstructions so far imply. Entries sent in the
    round before kept nothing, whatever the reconstructions are worth; the others count the less, the worse the
    earlier rounds were matched. Needs the defense, all rounds from the first, and each round's weights.
    """

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"rounds", "defense"}

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        chains = [uncovered(history_of(one)) for one in seen]
        for rounds in chains:
            if rounds[0].round != 0:
                raise NeedError(f"the chain must begin in round 0, the first upload is of round {rounds[0].round}")
        kept = [torch.zeros_like(flat(one.grads)) for one in seen]
        doubt = [torch.zeros_like(k) for k in kept]
        found: dict[int, Reconstruction] = {}
        for t in range(max(map(len, chains))):
            going = [i for i, rounds in enumerate(chains) if len(rounds) > t]
            now = [chains[i][t] for i in going]
            targets = [self._target(one, kept[i], doubt[i]) for i, one in zip(going, now, strict=True)]
            cleaned = [_without(one, kept[i]) for i, one in zip(going, now, strict=True)]
            guesses = self.inner.run_at(cleaned, targets, [rngs[i] for i in going])
            for i, one, guess in zip(going, now, guesses, strict=True):
                losses = [*found[i].info["losses"], guess.loss] if i in found else [guess.loss]
                found[i] = guess._replace(info={**guess.info, "losses": losses})
                kept[i], doubt[i] = self._next(one, guess, kept[i], doubt[i])
        return [found[i] for i in range(len(seen))]

    def _target(self, seen: Observation, kept: Tensor, doubt: Tensor) -> Target:
        base = self.inner.aim(replace(seen, earlier=()))
        weight = torch.ones_like(kept) if base.weight is None else base.weight
        values = (flat(seen.grads) - kept) * weight
        size = values.square().sum().div(weight.count_nonzero().clamp_min(1)).sqrt().clamp_min(1e-30)
        trust = weight / (1 + (doubt / size).square()).sqrt()
        return replace(base, sent=(flat(seen.grads) - kept) * trust, weight=trust, response=None)

    def _next(self, seen: Observation, found: Reconstruction, kept: Tensor, doubt: Tensor) -> tuple[Tensor, Tensor]:
        labels = found.labels if seen.labels is None else seen.labels
        if labels is None:
            raise NeedError("the chain needs labels: grant them or let the inner attack infer them")
        sent = flat(seen.grads)
        simulate = simulator(seen, split=self.inner.split)
        with torch.no_grad(), full_precision():
            mine = simulate(found.inputs[None], labels.to(sent.device)[None])[0][0]
        total = mine + kept
        hit = sent != 0
        missed = (total - sent)[hit].square().sum().div(sent.square().sum().clamp_min(1e-30)).sqrt()
        doubt = doubt + missed * mine.abs()
        if forgets(seen.defense):
            return torch.where(hit, 0.0, total), torch.where(hit, 0.0, doubt)
        return total - sent, doubt


def uncovered(rounds: list[Observation]) -> list[Observation]:
    """Return the uploads with zeros for what was not sent, also where noise covers it."""
    known = understand(rounds[-1])
    return [replace(one, grads=shaped(known.received(one.grads), one.grads)) for one in rounds]


def _without(seen: Observation, kept: Tensor) -> Observation:
    """Return the upload less what it holds of older batches; labels are read off it."""
    sent = flat(seen.grads)
    return replace(seen, grads=shaped(torch.where(sent != 0, sent - kept, 0.0), seen.grads))
