"""GGL: search the latent space of a picture generator for the picture whose gradient was sent.

The generator is trained on public pictures, so whatever comes out looks real, whether or not it is the client's: judge
this attack by how much nearer it comes than a random sample of the same class.

Reference: Li et al., "Auditing Privacy Defenses in Federated Learning via Generative Gradient Leakage".
"""

import contextlib
import contextvars
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import check
from ..core import Attack, Knowledge, Observation, Reconstruction
from ..errors import NeedError
from . import progress
from .adaptive import Target, aim
from .bypass import before_bottleneck
from .cma import minimise_blindly
from .imitation import understand
from .labels import infer_labels
from .matching_cost import MatchingCost, Terms
from .memory import CPU_BYTES, candidates_within
from .optimise import Descent, minimise
from .simulate import Simulator, simulator
from .space import alike, device_of


@dataclass(frozen=True)
class GGL(Attack):
    """Match gradients over the latents of `seen.prior`, a module `(latent [N, Z], label [N]) -> pixels in 0..1`.

    The module says the length of its latents in its attribute `latent`; `gradveil.generator` has one. Like every
    matching attack it compares only what was sent where the defense prunes.

    Guarantees: the result is in the range of the generator, and among all latents tried the one with the lowest own
    cost. Does not guarantee that this range holds the client's picture.

    Args:
        search: "adam" follows the slope through the generator, "cma" needs none (and so works for any defense the
            attacker can imitate but not differentiate), "none" draws one picture of the right class and never looks at
            the gradient: the others are worth what they find beyond it.
        steps: Steps of Adam, or generations of CMA-ES.
        restarts: Latents that Adam follows together; the best of `pool` random ones.
        population: Latents per generation of CMA-ES.
        lr: Learning rate of Adam.
        plausible: Weight of the mean squared latent, which keeps the search where the generator was trained.
    """

    search: str = "adam"
    steps: int = 500
    restarts: int = 4
    pool: int = 64
    population: int = 32
    lr: float = 0.05
    plausible: float = 1e-3
    masked: str = "auto"

    def __post_init__(self) -> None:
        check.one_of(("adam", "cma", "none"), search=self.search)
        check.one_of(("auto", "always", "never"), masked=self.masked)
        check.at_least(1, steps=self.steps, restarts=self.restarts, pool=self.pool)
        check.at_least(4, population=self.population)
        check.positive(lr=self.lr)
        check.non_negative(plausible=self.plausible)

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"prior"})

    @property
    def adaptive(self) -> bool:
        return self.masked != "never"

    def blind(self) -> "GGL":
        return replace(self, search="none")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        return self.run_many([seen], [rng])[0]

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        if self.search == "none":
            return [_sample(one, rng) for one, rng in zip(seen, rngs, strict=True)]
        views = [before_bottleneck(one) for one in seen]
        found: dict[int, Reconstruction] = {}
        for group in _same_prior(seen, alike(views)):
            size = max(_rows_at_once(views[group[0]]) // self.restarts, 1)
            for i in range(0, len(group), size):
                part = group[i : i + size]
                searches = [self._begin(seen[j], views[j]) for j in part]
                found |= dict(zip(part, self._search(searches, [rngs[j] for j in part]), strict=True))
        return [found[i] for i in range(len(seen))]

    def _begin(self, seen: Observation, view: Observation) -> "_Latents":
        known = understand(seen)  # not of the view: the defense runs on whole gradients
        classes = infer_labels(seen, known) if seen.labels is None else seen.labels.to(device_of(seen))
        labels = classes if view.labels is None else view.labels.to(classes.device)
        target = aim(view, known, masked=self.masked)
        return _Latents(view, _generator(seen), classes[None], labels[None], [target], self.plausible)

    def _search(self, searches: "Sequence[_Latents]", rngs: Sequence[torch.Generator]) -> list[Reconstruction]:
        pools = [self._draw(latents, rng) for latents, rng in zip(searches, rngs, strict=True)]
        if self.search == "adam":
            found = self._downhill(searches, pools)
        else:
            starts = zip(searches, pools, rngs, strict=True)
            found = [self._blindly(latents, pool[0], rng) for latents, pool, rng in starts]
        results = []
        for latents, (best, match) in zip(searches, found, strict=True):
            with torch.no_grad():
                inputs = latents.inputs(best[None])[0]
            results.append(Reconstruction(inputs, latents.classes[0], match, {"latent": best.detach()}))
        return results

    def _draw(self, latents: "_Latents", rng: torch.Generator) -> Tensor:
        """Return the best `restarts` of a pool of random latents, the best one first."""
        shape = (self.pool, latents.seen.num_examples, latents.length)
        pool = torch.randn(shape, generator=rng, device=rng.device).to(device_of(latents.seen))
        return pool[latents.costs(pool).argsort()[: self.restarts]]

    def _downhill(self, searches: "Sequence[_Latents]", pools: Sequence[Tensor]) -> list[tuple[Tensor, float]]:
        """Follow the slopes of all uploads together."""
        latents, start = _together(searches), torch.cat(list(pools))
        how = Descent(lr=self.lr, steps=self.steps, signed=False, decay="cosine")
        with _showing_pictures(latents):
            (found,), matches, _ = minimise(latents.cost(len(start)), [start], how)
        each = len(start) // len(searches)
        best = [i * each + int(part.argmin()) for i, part in enumerate(matches.split(each))]
        return [(found[i], float(matches[i])) for i in best]

    def _blindly(self, latents: "_Latents", start: Tensor, rng: torch.Generator) -> tuple[Tensor, float]:
        done = 0

        def cost(points: Tensor) -> Tensor:
            nonlocal done
            done += 1
            tried = points.view(-1, *start.shape).to(start)
            costs = latents.costs(tried)
            if progress.due(done, self.steps):
                progress.tell(done, self.steps, costs, latents.inputs(tried))
            return costs

        best, _ = minimise_blindly(cost, start.flatten(), 0.5, self.population, self.steps, rng)
        chosen = best.view_as(start).to(start)
        return chosen, float(latents.costs(chosen[None], bare=True)[0])


def _sample(seen: Observation, rng: torch.Generator) -> Reconstruction:
    """Return random pictures of the right classes, which an attacker must infer unless they were granted."""
    prior, device = _generator(seen), device_of(seen)
    classes = infer_labels(seen, understand(seen)) if seen.labels is None else seen.labels.to(device)
    latents = torch.randn(seen.num_examples, cast(Any, prior).latent, generator=rng, device=rng.device).to(device)
    with torch.no_grad():
        return Reconstruction(_Normalised(seen, prior)(latents, classes), classes)


class _Normalised:
    """A generator whose pictures have the size and the normalisation of the model's inputs."""

    def __init__(self, seen: Observation, generator: nn.Module) -> None:
        self.generator, self.shape = generator, seen.input_shape
        self.mean, self.std = (
            torch.tensor(v, device=device_of(seen)).view(-1, *[1] * (len(self.shape) - 1))
            for v in (seen.mean, seen.std)
        )

    def __call__(self, latents: Tensor, classes: Tensor) -> Tensor:
        pixels: Tensor = self.generator(latents, classes)
        if tuple(pixels.shape[2:]) != self.shape[1:]:
            pixels = F.interpolate(pixels, self.shape[1:], mode="bilinear", antialias=True)
        return (pixels - self.mean) / self.std


class _Latents:
    """What latents cost: rows `[N, B, Z]` stand for N candidate batches, as many for each upload and in their order."""

    def __init__(
        self,
        seen: Observation,
        generator: nn.Module,
        classes: Tensor,
        labels: Tensor,
        targets: Sequence[Target],
        plausible: float,
    ) -> None:
        self.seen, self.generator, self.targets, self.plausible = seen, generator, targets, plausible
        self.paint = _Normalised(seen, generator)
        self.classes, self.labels = classes, labels  # of each upload: what the generator paints, what the loss takes
        self.length: int = cast(Any, generator).latent
        self.simulate: Simulator = simulator(seen)

    def inputs(self, latents: Tensor) -> Tensor:
        """Return the model inputs `[N, B, ...]` that latents stand for."""
        classes = self.classes.repeat_interleave(len(latents) // len(self.targets), 0)
        inputs = self.paint(latents.flatten(0, 1), classes.flatten())
        return inputs.view(*latents.shape[:2], *self.seen.input_shape)

    def cost(self, rows: int) -> "_Cost":
        """Return a cost function for this many rows, as `minimise` takes it."""
        each = rows // len(self.targets)
        labels, targets = self.labels.repeat_interleave(each, 0), [t for t in self.targets for _ in range(each)]
        return _Cost(self, MatchingCost(self.simulate, targets, [0.0] * rows, labels, Terms()))

    def costs(self, latents: Tensor, bare: bool = False) -> Tensor:
        """Return the cost of each row of one upload without slopes; `bare` leaves out the prior."""
        out = []
        with torch.no_grad():
            for part in latents.split(_rows_at_once(self.seen)):
                total, match = self.cost(len(part))([part], part.new_zeros(()))
                out.append(match if bare else total)
        return torch.cat(out)


class _Cost:
    """A matching cost seen through the generator."""

    def __init__(self, latents: _Latents, matching: MatchingCost) -> None:
        self.latents, self.matching = latents, matching

    def __call__(self, variables: Sequence[Tensor], share: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is minimised and the matching loss inside it, one value per row each."""
        total, match = self.matching([self.latents.inputs(variables[0])], share)
        return total + self.latents.plausible * variables[0].square().flatten(1).mean(1), match


def _together(searches: Sequence[_Latents]) -> _Latents:
    """Return the search for several uploads of equal clients at once."""
    first = searches[0]
    classes, labels = (torch.cat([getattr(one, name) for one in searches]) for name in ("classes", "labels"))
    targets = [target for one in searches for target in one.targets]
    return _Latents(first.seen, first.generator, classes, labels, targets, first.plausible)


def _same_prior(seen: Sequence[Observation], groups: list[list[int]]) -> list[list[int]]:
    """Return the groups parted by the generator that is searched."""
    parted: dict[tuple[int, int], list[int]] = {}
    for number, group in enumerate(groups):
        for i in group:
            parted.setdefault((number, id(seen[i].prior)), []).append(i)
    return list(parted.values())


def _rows_at_once(seen: Observation) -> int:
    """Return how many candidates fit into memory together."""
    device = device_of(seen)
    room = CPU_BYTES if device.type == "cpu" else torch.cuda.mem_get_info(device)[0] // 2
    return candidates_within(room, seen)


@contextlib.contextmanager
def _showing_pictures(latents: _Latents) -> Iterator[None]:
    """Let whoever watches see the pictures that the latents under way stand for."""
    if not progress.due(0, 1):
        yield
        return
    outside = contextvars.copy_context()

    def show(now: progress.Progress) -> None:
        if outside.run(progress.due, now.step, now.total):
            with torch.no_grad():
                pictures = latents.inputs(now.inputs)
            outside.run(progress.tell, now.step, now.total, now.losses, pictures)

    with progress.watch(show, every=10):
        yield


def _generator(seen: Observation) -> nn.Module:
    prior = seen.prior
    if not isinstance(prior, nn.Module) or not isinstance(getattr(prior, "latent", None), int):
        raise NeedError(
            "GGL needs a generator as prior, a module (latent, label) -> pixels with an attribute `latent`: "
            "`gradveil generator train` makes one of your own kind of pictures, and --generator names it"
        )
    known = getattr(prior, "num_classes", seen.num_classes)
    if known < seen.num_classes:
        raise NeedError(f"the generator knows {known} classes, the model {seen.num_classes}")
    return copy.deepcopy(prior).to(device_of(seen)).eval().requires_grad_(False)
