"""Differential privacy: bounded influence, noise to match, and an accountant that says what it is worth."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check
from ..core import Defense, Grads, Need, State, Step
from ..errors import NeedError
from .noise import normal_like


def clipped_sum(grads: Grads, clip: float) -> Grads:
    """Return the sum of per-example gradients `[N, ...]`, each scaled down to norm `clip` over all tensors.

    In float32 or wider: half precision would round some up beyond the clip, and the noise is measured by it.
    """
    wide = {name: _wide(g) for name, g in grads.items()}
    rows = [g.reshape(len(g), math.prod(g.shape[1:])) for g in wide.values()]
    norms = torch.stack([row.square().sum(1) for row in rows]).sum(0).sqrt()
    scale = clip / norms.clamp_min(clip)
    return {name: torch.tensordot(scale.to(g.dtype), g, dims=1) for name, g in wide.items()}


def _wide(g: Tensor) -> Tensor:
    return g.to(torch.promote_types(g.dtype, torch.float32))


@dataclass(frozen=True)
class _Clipped(Defense):
    """Shared by the defenses that clip and add noise measured by the clip."""

    clip: float = 1.0
    noise_multiplier: float = 1.0

    def __post_init__(self) -> None:
        check.positive(clip=self.clip)
        check.non_negative(noise_multiplier=self.noise_multiplier)

    @property
    def noisy(self) -> bool:
        return True


@dataclass(frozen=True)
class DPNoise(_Clipped):
    """DP-SGD: clip every example's gradient to norm `clip`, add noise to their sum, divide by their number.

    Guarantees: the noise on the sum has standard deviation `noise_multiplier * clip`, so with every batch drawn by
    Poisson sampling one upload is the sampled Gaussian mechanism and `epsilon` gives its cost. Example-level: it
    hides whether one example took part. The number of examples travels in the clear and is not protected, BatchNorm
    statistics are not protected, and a fixed seed lets whoever knows it subtract the noise.

    Compose: first in a Chain (it takes per-example gradients), never inside ErrorFeedback, which would return the
    noise. What follows is post-processing and costs no privacy: `Chain(DPNoise(), ErrorFeedback(TopK()))`.

    Reference: Abadi et al., "Deep Learning with Differential Privacy".
    """

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"per_example"})

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        std = self.noise_multiplier * self.clip
        sent = {}
        for name, total in clipped_sum(grads, self.clip).items():
            noisy = (total + std * normal_like(total, step.rng)) / max(len(grads[name]), 1)
            sent[name] = noisy.to(grads[name].dtype)
        return sent, state


@dataclass(frozen=True)
class ClipNoise(_Clipped):
    """Clip the client's whole gradient to norm `clip` and add noise of standard deviation `noise_multiplier * clip`.

    Guarantees: each upload hides whether this client's data took part in it, without trusting the server; `epsilon`
    with a sample rate of 1 gives the cost. It needs no per-example gradients, and costs far more accuracy than
    `DPNoise` at the same epsilon, because one client's noise is not hidden among the others'.

    Compose: anywhere after the last operator that looks at the gradient, never inside ErrorFeedback. A residual in
    front, `Chain(ErrorFeedback(TopK()), ClipNoise())`, is covered too, since the clip bounds what leaves; the noise
    then lands on every entry and the message is dense.
    """

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        wide = {name: _wide(g) for name, g in grads.items()}
        norm = torch.stack([g.square().sum() for g in wide.values()]).sum().sqrt()
        scale = self.clip / norm.clamp_min(self.clip)
        std = self.noise_multiplier * self.clip
        noisy = {name: g * scale.to(g.dtype) + std * normal_like(g, step.rng) for name, g in wide.items()}
        return {name: g.to(grads[name].dtype) for name, g in noisy.items()}, state


def epsilon(
    noise_multiplier: float, *, steps: int, delta: float, sample_rate: float = 1.0, accountant: str = "rdp"
) -> float:
    """Return the epsilon spent after `steps` uploads, from Opacus' accountants ("rdp" or the tighter "prv").

    Args:
        noise_multiplier: noise on the clipped sum over the clip norm.
        steps: uploads that drew on the same data.
        delta: the probability left out; well below one over the number of examples.
        sample_rate: chance that one example enters one batch (Poisson sampling); 1 for client-level accounting.
        accountant: "rdp" (fast, a little loose) or "prv" (numerical, tighter).
    """
    check.positive(noise_multiplier=noise_multiplier)
    check.at_least(1, steps=steps)
    check.fraction(delta=delta, sample_rate=sample_rate)
    check.positive(delta=delta, sample_rate=sample_rate)
    check.one_of(("rdp", "prv"), accountant=accountant)
    try:
        from opacus import accountants
    except ImportError as error:
        raise NeedError("the privacy accountants need Opacus: pip install 'gradveil[dp]'") from error
    books = accountants.RDPAccountant() if accountant == "rdp" else accountants.PRVAccountant()
    books.history = [(noise_multiplier, sample_rate, steps)]
    return float(books.get_epsilon(delta=delta))
