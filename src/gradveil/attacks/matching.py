"""Gradient matching: search for pictures whose gradient looks like the one that was sent."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .. import check
from ..core import Attack, Knowledge, Observation, Reconstruction
from ..models.inspect import has_batchnorm
from .adaptive import Target, aim
from .bypass import UpToEncoder, before_bottleneck
from .imitation import Understanding, understand
from .label_search import first_labels, found_labels
from .matching_cost import Labels, MatchingCost, Terms
from .memory import CPU_BYTES, candidates_within, in_halves
from .optimise import Cost, Descent, minimise
from .simulate import simulator
from .space import alike, box, device_of, enlarge, start, trained_statistics, unit

NOISY = 1.5  # total variation per share of noise, where there are as many equations as pixels; found by experiment


@dataclass(frozen=True)
class GradientMatching(Attack):
    """Descend from noise until a candidate's gradient matches what arrived; many uploads and restarts at once.

    Where the observation carries the defense, the attack adapts to it (see `gradveil.attacks.adaptive`): it compares
    only what was sent, trusts each tensor by its noise, and goes round a stochastic bottleneck. `masked="never"` with
    `weighting="none"` is the attacker most papers measure, who does not.

    Guarantees: the same generator gives the same result on the same CPU; neither the observation nor its model is
    changed; among restarts the one with the lowest own loss is returned, and the last iterate of it.

    Args:
        objective: "cosine" or "l2".
        normalise: Divide the squared distance by the squared length of what was sent (l2 only).
        optimizer: "adam", or "lbfgs" without line search, which gives up on a row that diverges.
        signed: Feed only the sign of the slope to Adam.
        lr: Learning rate.
        steps: Number of steps at most.
        decay: "step" (a tenth after 3/8, 5/8, 7/8 of the steps), "cosine" with a short warm-up, or "none".
        tv: Weight of the total variation; None takes 1e-4 for models with BatchNorm and 1e-2 for others.
        tv_first: How many times that is the weight at the first step, from where it falls to `tv` by the last.
        tv_share: Weigh it by what the start costs as well: gradients that hardly depend on the picture need little.
        restarts: Candidates per upload, attacked together; with "lbfgs" one after the other until one is solved.
        box: Keep pixels within 0..1.
        init: "normal" in model-input space, or "uniform" in pixel space.
        labels: "infer" them from the classifier unless granted; "joint" optimises them even so.
        masked: Compare only what was sent: "auto" where the defense prunes, "always", or "never".
        weighting: "auto" trusts tensors by the noise the defense adds to them, and smooths the more, the more noise
            there is; "none".
        reapply: Put the candidate's gradient through the defense as well: "auto" where that rounds or clips, "always",
            or "never".
        band: Weight of the penalty on unsent entries that lie inside the sent band.
        bn: Weight of the BatchNorm statistics; left out where they are still those of an untrained model.
        l2: Weight of the mean squared input.
        group: Weight that draws the restarts of one upload together.
        langevin: Noise per step, in learning rates.
        stop: Matching loss at which an upload counts as solved; 0 never stops early.
        coarse: Search pictures of this side only, enlarged; 0 searches every pixel. What noise leaves of a picture
            first is its coarse form, and fewer unknowns fit less of the noise.
        split: Whether a client of several local steps used its examples in turn instead of all in every step.
        chunk: Candidates attacked together at most; None fits them to the memory.
    """

    objective: str = "cosine"
    normalise: bool = True
    optimizer: str = "adam"
    signed: bool = True
    lr: float = 0.1
    steps: int = 2500
    decay: str = "step"
    tv: float | None = None
    tv_first: float = 1.0
    tv_share: bool = False
    restarts: int = 1
    box: bool = True
    init: str = "normal"
    labels: str = "infer"
    masked: str = "auto"
    weighting: str = "auto"
    reapply: str = "auto"
    band: float = 0.0
    bn: float = 0.0
    l2: float = 0.0
    group: float = 0.0
    langevin: float = 0.0
    stop: float = 0.0
    coarse: int = 0
    split: bool = False
    chunk: int | None = None

    def __post_init__(self) -> None:
        check.one_of(("cosine", "l2"), objective=self.objective)
        check.one_of(("adam", "lbfgs"), optimizer=self.optimizer)
        check.one_of(("step", "cosine", "none"), decay=self.decay)
        check.one_of(("normal", "uniform"), init=self.init)
        check.one_of(("infer", "joint"), labels=self.labels)
        check.one_of(("auto", "always", "never"), masked=self.masked, reapply=self.reapply)
        check.one_of(("auto", "none"), weighting=self.weighting)
        check.positive(lr=self.lr, tv_first=self.tv_first)
        check.at_least(1, steps=self.steps, restarts=self.restarts, chunk=1 if self.chunk is None else self.chunk)
        check.non_negative(tv=self.tv or 0.0, band=self.band, bn=self.bn, l2=self.l2, group=self.group)
        check.non_negative(langevin=self.langevin, stop=self.stop)
        check.at_least(0, coarse=self.coarse)

    @property
    def adaptive(self) -> bool:
        return self.masked != "never" or self.weighting != "none" or self.reapply == "always"

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"statistics"}) if self.bn else frozenset()

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        return self.run_many([seen], [rng])[0]

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        return self.run_at(seen, [None] * len(seen), rngs)

    def run_at(
        self, seen: Sequence[Observation], targets: Sequence[Target | None], rngs: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Attack several uploads, each compared with its target if one is given instead of with what it shows itself.

        Uploads of equal clients (same weights, shapes and batch size) are attacked together, whatever their defense.
        """
        if self.optimizer == "lbfgs" and self.restarts > 1:
            return self._in_turns(seen, targets, rngs)
        seeds = [int(torch.randint(2**62, (), generator=rng, device=rng.device)) for rng in rngs]
        clients = [_Client(one, target, seed, one) for one, target, seed in zip(seen, targets, seeds, strict=True)]
        if self.adaptive:
            clients = [c if c.target else c._replace(view=before_bottleneck(c.seen)) for c in clients]
            clients = _understood(clients)
        found: dict[int, Reconstruction] = {}
        for group in self._groups(clients):
            size = max(self._candidates(seen[group[0]]) // self.restarts, 1)
            for i in range(0, len(group), size):
                part = group[i : i + size]
                found |= dict(zip(part, in_halves(self._together, [clients[j] for j in part]), strict=True))
        return [found[i] for i in range(len(seen))]

    def _in_turns(
        self, seen: Sequence[Observation], targets: Sequence[Target | None], rngs: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        """Begin again with what is not solved: a descent that may diverge is cheaper repeated than doubled."""
        once = replace(self, restarts=1)
        best: dict[int, Reconstruction] = {}
        open_ = list(range(len(seen)))
        for _ in range(self.restarts):
            found = once.run_at([seen[i] for i in open_], [targets[i] for i in open_], [rngs[i] for i in open_])
            for i, guess in zip(open_, found, strict=True):
                best[i] = min(best.get(i, guess), guess, key=lambda g: g.loss)
            open_ = [i for i in open_ if best[i].loss >= self.stop]
            if not open_:
                break
        return [best[i] for i in range(len(seen))]

    def aim(self, seen: Observation, known: Understanding | None = None) -> Target:
        """Return what candidates for this upload are compared with; `known` saves trying the defense out again."""
        reapply = self.reapply if self.adaptive else "never"
        how = {"masked": self.masked, "weighting": self.weighting, "reapply": reapply}
        return aim(seen, known, band=self.band > 0, **how)

    def cost(self, seen: Observation, targets: Sequence[Target], labels: Labels) -> MatchingCost:
        """Return the cost of candidates for uploads of clients like `seen`."""
        terms = self.terms(seen)
        simulate = simulator(seen, statistics=terms.bn > 0, split=self.split)
        return MatchingCost(simulate, targets, [self.smoothing(seen, t) for t in targets], labels, terms)

    def descent(self) -> Descent:
        """Return how to go down."""
        return Descent(
            self.optimizer, self.lr, self.steps, self.signed, self.decay, self.langevin, self.stop, self.restarts
        )

    def terms(self, seen: Observation) -> Terms:
        """Return the weights of the cost for a client like `seen`."""
        bn = self.bn if self.bn and trained_statistics(seen.model) else 0.0
        weights = (self.band, bn, self.l2, self.group)
        return Terms(self.objective, self.normalise, *weights, self.restarts, unit(seen), self.tv_first)

    def smoothing(self, seen: Observation, target: Target) -> float:
        """Return the weight of the total variation for this upload."""
        base = (1e-4 if has_batchnorm(seen.model) else 1e-2) if self.tv is None else self.tv
        if self.weighting == "none" or self.coarse:  # few unknowns are a prior of their own
            return base
        # The more noise there is in each equation, and the fewer equations for a pixel, the more the prior must say.
        compared = target.sent.numel() if target.weight is None else int(target.weight.count_nonzero())
        unknown = seen.num_examples * math.prod(seen.input_shape)
        return base + NOISY * target.noise * unknown / max(compared, 1)

    def _candidates(self, seen: Observation) -> int:
        if self.chunk is not None:
            return self.chunk
        if device_of(seen).type == "cuda":
            return 2**30  # all of them: what does not fit is halved
        return candidates_within(CPU_BYTES, seen)

    def _together(self, clients: Sequence["_Client"]) -> list[Reconstruction]:
        each, views = self.restarts, [c.view for c in clients]
        first = views[0]
        # Where a way round a bottleneck was found, slopes stand in the labels' place and there are none to search.
        joint = self.labels == "joint" and not isinstance(first.model, UpToEncoder)
        known = [c.known for c in clients]
        aims = [c.target or self.aim(c.view, c.known) for c in clients]
        rngs = [torch.Generator().manual_seed(c.seed + i) for c in clients for i in range(each)]
        begin = [torch.stack([start(first, self.init, rng) for rng in rngs])]
        labels, searched = first_labels(joint, views, known, rngs)
        begin += searched
        matching = self.cost(first, [a for a in aims for _ in range(each)], labels)
        if self.tv_share:
            matching.smooth_by_start(begin)
        cost: Cost = matching
        if self.coarse:
            begin[0] = begin[0][..., : self.coarse, : self.coarse].contiguous()
            cost = enlarged(cost, first.input_shape)
        how = replace(self.descent(), record=not any(a.response for a in aims))
        found, losses, done = minimise(cost, begin, how, rngs, box(first) if self.box else None)
        if self.coarse:
            found[0] = enlarge(found[0], first.input_shape)
        best = losses.view(-1, each).argmin(1) + torch.arange(len(clients), device=losses.device) * each
        return [
            Reconstruction(
                found[0][i], found_labels(joint, c.seen, c.known, found, labels, i), float(losses[i]), {"steps": done}
            )
            for c, i in zip(clients, best.tolist(), strict=True)
        ]

    def _groups(self, clients: Sequence["_Client"]) -> Iterator[list[int]]:
        """Yield which clients are attacked together: a large batch fills a GPU better than many small ones.

        Rounding is imitated upload by upload, outside a graph, which must not hold up the others.
        """
        for group in alike([c.view for c in clients], any_defense=True):
            slow = {i for i in group if clients[i].known.bends or self.reapply == "always"}
            yield from (part for part in ([i for i in group if i not in slow], sorted(slow)) if part)


def enlarged(cost: Cost, shape: tuple[int, ...]) -> Cost:
    """Return the cost of small pictures: that of the same pictures enlarged."""
    return lambda variables, progress: cost([enlarge(variables[0], shape), *variables[1:]], progress)


class _Client(NamedTuple):
    """One upload under attack."""

    seen: Observation
    target: Target | None
    seed: int
    view: Observation  # what is attacked in its place, if there is a way round the defense
    known: Understanding = Understanding()


def _understood(clients: Sequence[_Client]) -> list[_Client]:
    """Return the clients with what is known of their defense, which is tried out once for each round.

    Nothing where a target is given: it stands for what is left of an upload once the defense is understood.
    """
    found = list(clients)
    for group in alike([c.view for c in clients]):
        rounds: dict[int, Understanding] = {}
        for i in group:
            seen = clients[i].seen
            if clients[i].target is None and seen.round not in rounds:
                rounds[seen.round] = understand(seen)
            found[i] = clients[i] if clients[i].target else clients[i]._replace(known=rounds[seen.round])
    return found
