"""The search for ATS policies: score random triples of transformations without mounting an attack.

Two scores, as published. Privacy: walk from noise to the transformed picture and watch how soon the gradients agree;
a late, flat curve means little to follow for an attacker. Accuracy: how different the untrained network finds the
transformed pictures. Both are heuristics; only an audit says what a policy is worth.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import check
from ..core import Batch, LossFn, Step
from ..data import normalise
from ..gradients import gradient
from .ats import ATS, TRANSFORMATIONS

POINTS = 21  # on the line from noise to the picture
_SMALL = 1e-5  # keeps the logarithm of an eigenvalue finite


class Scored(NamedTuple):
    """A policy and its two scores."""

    policy: str
    privacy: float  # mean similarity of gradients along the line, in [-1, 1]; lower is better
    accuracy: float  # of the Jacobians, per picture, at most -1; higher is better


def draw_policies(count: int, rng: torch.Generator, length: int = 3) -> list[str]:
    """Return `count` different policies of up to `length` transformations each.

    Every place is drawn from the list or left out with equal chance, as published (whose draw also reached one past
    the end of the list); the policy that leaves out all is not drawn.
    """
    check.at_least(1, count=count, length=length)
    found: dict[str, None] = {}
    while len(found) < count:
        drawn = torch.randint(-1, len(TRANSFORMATIONS), (length,), generator=rng, device=rng.device).tolist()
        policy = "-".join(str(index) for index in drawn if index >= 0)
        if policy:
            found[policy] = None
    return list(found)


@dataclass(frozen=True)
class Judge:
    """What policies are judged on; `score` depends on the policy and on nothing that changes.

    Attributes:
        trained: a network trained a little, for privacy.
        fresh: the same network untrained, for accuracy.
        loss_fn: the training loss.
        victims: pictures whose gradients are followed.
        others: pictures whose Jacobians are compared; the more there are, the lower the scores.
        mean: of the public normalisation.
        std: of the public normalisation.
        seed: of noise and signs, the same for every policy, so that policies differ by themselves alone.
    """

    trained: nn.Module
    fresh: nn.Module
    loss_fn: LossFn
    victims: Batch
    others: Batch
    mean: tuple[float, ...]
    std: tuple[float, ...]
    seed: int = 0

    def score(self, policy: str) -> Scored:
        """Return both scores of a policy."""
        rng = torch.Generator().manual_seed(self.seed)
        defense = ATS(policy, self.mean, self.std)
        raw = self.victims.inputs
        noise = normalise(torch.rand(raw.shape, generator=rng).to(raw), self.mean, self.std)
        inputs, labels = defense.prepare_batch(self.victims, Step(rng))
        similar = [
            gradient_similarity(self.trained, self.loss_fn, Batch(inputs[i : i + 1], labels[i : i + 1]), noise[i])
            for i in range(len(labels))
        ]
        useful = jacobian_score(self.fresh, defense.prepare_batch(self.others, Step(rng)).inputs)
        return Scored(policy, sum(similar) / len(similar), useful)


def gradient_similarity(model: nn.Module, loss_fn: LossFn, one: Batch, noise: Tensor) -> float:
    """Return the area under the similarity of gradients on the way from `noise` to the picture, by the trapezoid rule.

    Similarity is the cosine, averaged over tensors; a tensor without gradient on either side counts 0.
    """
    target = gradient(model, loss_fn, one)
    curve = []
    for share in torch.linspace(0, 1, POINTS):
        near = gradient(model, loss_fn, Batch(torch.lerp(noise[None], one.inputs, float(share)), one.labels))
        cosines = [torch.cosine_similarity(near[name].flatten(), g.flatten(), dim=0) for name, g in target.items()]
        curve.append(torch.stack(cosines).mean())
    return float(torch.trapezoid(torch.stack(curve), dx=1 / (POINTS - 1)))


def jacobian_score(model: nn.Module, inputs: Tensor) -> float:
    """Return -mean(log v + 1/v) over the eigenvalues v of the correlations between the pictures' input Jacobians.

    It is at most -1, reached when no two Jacobians correlate. The published score is the sum, which cannot exceed
    minus the number of pictures: its limit of -85 was met only because repeated labels were left out, so that about
    63 of 100 pictures were counted.
    """
    inputs = inputs.detach().requires_grad_()
    (jacobian,) = torch.autograd.grad(model(inputs).sum(), inputs)
    correlation = torch.corrcoef(jacobian.flatten(1).double())
    values = torch.linalg.eigvalsh(torch.nan_to_num(correlation)).clamp_min(0) + _SMALL
    return float(-(values.log() + 1 / values).mean())


def rank(scored: Sequence[Scored], floor: float | None = None) -> list[Scored]:
    """Return the policies whose accuracy score reaches `floor` (default: the median), most private first.

    A fixed floor means something only for one network and one number of pictures; the median always does.
    """
    limit = statistics.median(one.accuracy for one in scored) if floor is None else floor
    return sorted((one for one in scored if one.accuracy >= limit), key=lambda one: one.privacy)
