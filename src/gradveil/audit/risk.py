"""A score in seconds, before any slow attack: what a first-order attacker could read from what was sent.

Near the private picture the gradient is almost linear in it: g(x + d) = g(x) + J d. Take `d` in a space of smooth
directions U (a coarse picture), a prior on it from public pictures, and the upload as a noisy measurement of `J d`
where entries were sent. How much a linear estimator then learns about each direction is known in closed form. It needs
Jacobian-vector products only. The attacker it describes knows the mask; its noise is what the defense really changed.

The bound of Proposition 1 stands beside it. It speaks of an attacker who ends as far from the true gradient as the
upload is, which a mask-aware attacker does not: there the honest bound is 0.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.func import jvp, vmap

from .. import tree
from ..core import Grads
from ..data import Dataset
from ..theory import gradient_function, jacobian_spectral_norm, reconstruction_lower_bound
from ..veil import derive_rng
from .clients import Sent
from .plan import Subject
from .report import FastScore, Risk
from .verdict import BASELINE

SIDE = 4  # directions per channel: SIDE x SIDE cosines
SAMPLE = 200_000  # gradient entries looked at; more add nothing to a Gram matrix of 48 directions
RELATIVE_NOISE = 1e-3  # what an optimiser leaves unmatched, as a share of the size of the sent values
AT_ONCE = 8  # directions pushed through the model together
PATIENCE = 20.0  # seconds after which no further direction, and no further picture, is begun
SETTLED = 0.01  # relative change at which the spectral norm counts as found


def smooth_directions(shape: tuple[int, ...]) -> Tensor:
    """Return orthonormal low-frequency cosine pictures, `[k, C, H, W]`.

    >>> u = smooth_directions((1, 8, 8)).flatten(1)
    >>> torch.allclose(u @ u.T, torch.eye(len(u)), atol=1e-5)
    True
    """
    channels, height, width = shape
    rows, columns = _cosines(height), _cosines(width)
    plane = torch.einsum("ah,bw->abhw", rows, columns).flatten(0, 1)
    out = torch.zeros(channels, len(plane), channels, height, width)
    for channel in range(channels):
        out[channel, :, channel] = plane
    return out.flatten(0, 1)


def _cosines(length: int) -> Tensor:
    place = (torch.arange(length) + 0.5) / length
    waves = torch.stack([torch.cos(math.pi * k * place) for k in range(min(SIDE, length))])
    sizes: Tensor = waves.norm(dim=1, keepdim=True)
    return waves / sizes


def prior_variance(public: Dataset, directions: Tensor) -> Tensor:
    """Return the variance of each direction over public pictures, as the model sees them, `[k]`."""
    batch = public.batch(range(min(len(public), 512)))
    strength = batch.inputs.flatten(1).cpu() @ directions.flatten(1).T
    return strength.var(dim=0).clamp_min(1e-6)


class Jacobian:
    """The directions pushed through one model at one private batch; masks and noise come later and are cheap.

    After `patience` seconds no further directions are pushed: `columns` holds those that were.
    """

    def __init__(self, sent: Sent, directions: Tensor, seed: int, patience: float = math.inf) -> None:
        started = time.monotonic()
        self.names = list(sent.grads)
        rng = derive_rng(seed, "risk", 0)
        self.size = sum(g.numel() for g in sent.grads.values())
        device = sent.batch.inputs.device
        chosen = torch.randperm(self.size, generator=rng)[:SAMPLE] if self.size > SAMPLE else torch.arange(self.size)
        self.chosen = chosen.to(device)
        gradient_of = gradient_function(sent.seen.model, sent.seen.loss_fn, sent.trained_on.labels)
        inputs = self.inputs = sent.trained_on.inputs
        self.spectral_norm = jacobian_spectral_norm(
            sent.seen.model, sent.seen.loss_fn, sent.trained_on, rng=rng, tolerance=SETTLED
        )

        def push(direction: Tensor) -> Tensor:
            moved: Grads = jvp(gradient_of, (inputs,), (direction.expand_as(inputs),))[1]
            return self.flat(moved)

        # [k, entries]: the picture is the same in every example of the batch, so this is meant for batches of one
        columns = []
        for few in directions.to(inputs).split(AT_ONCE):
            columns.append(vmap(push, randomness="same")(few))
            if time.monotonic() - started > patience:
                break
        self.columns = torch.cat(columns)

    def flat(self, grads: Grads) -> Tensor:
        """Return the chosen entries of a gradient."""
        return torch.cat([grads[name].flatten() for name in self.names])[self.chosen]

    def readable(self, sent: Sent, variance: Tensor) -> float:
        """Return the mean share of each direction's prior variance that a linear estimator explains, 0 to 1."""
        true, got = self.flat(sent.grads).double(), self.flat(sent.seen.grads).double()
        left = got != 0
        if not bool(left.any()):
            return 0.0
        error = (got - true)[left]
        noise = float(error.square().mean()) + RELATIVE_NOISE**2 * float(got[left].square().mean())
        seen = self.columns[:, left].double()
        gram = (seen @ seen.T) * (self.size / len(self.chosen))
        scale = variance.to(gram).sqrt()
        information = gram * scale[:, None] * scale[None, :] / max(noise, 1e-300)
        eye = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        left_over = torch.linalg.inv(eye + information).diagonal()
        return float((1 - left_over).mean().clamp(0, 1))

    def bound(self, sent: Sent, data: Dataset) -> float:
        """Return Proposition 1 as a pixel RMS error, for an attacker that ends as far away as the upload is."""
        if self.spectral_norm <= 0:
            return math.nan
        distance = tree.global_norm(tree.sub(sent.seen.grads, sent.grads))
        pixel = sum(data.std) / len(data.std)
        scale = pixel / math.sqrt(sent.batch.inputs.numel())
        return reconstruction_lower_bound(distance, self.spectral_norm) * scale

    def fits(self, sent: Sent) -> bool:
        """Say whether this is also the Jacobian of another upload: same parameters, same pictures."""
        return self.names == list(sent.grads) and torch.equal(self.inputs, sent.trained_on.inputs)


def fast_score(uploads: Callable[[str], Sequence[Sent]], subject: Subject, seed: int) -> FastScore:
    """Return the risk of every picture under every defense; `uploads` gives a defense's diagnostic uploads."""
    started = time.monotonic()
    directions = smooth_directions(subject.victims.input_shape)
    variance = prior_variance(subject.public, directions)
    order = variance.argsort(descending=True)  # the coarsest first: a large model gets no further
    directions, variance = directions[order], variance[order]
    bare: list[Jacobian] = []
    for sent in uploads(BASELINE):
        if bare and time.monotonic() - started > PATIENCE:
            break  # a fast score that is not fast is no use: the rest go without
        bare.append(Jacobian(sent, directions, seed, math.inf if bare else PATIENCE))
        directions, variance = directions[: len(bare[0].columns)], variance[: len(bare[0].columns)]
    risks = []
    for name in subject.defenses:
        readable, bounds = [], []
        for shared, sent in zip(bare, uploads(name), strict=False):
            jacobian = shared if shared.fits(sent) else Jacobian(sent, directions, seed)
            readable.append(jacobian.readable(sent, variance))
            bounds.append(jacobian.bound(sent, subject.victims))
        risks.append(Risk(name, readable, bounds))
    return FastScore(time.monotonic() - started, len(directions), risks)


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation; None where a constant or fewer than four pairs leave it undefined."""
    from scipy.stats import spearmanr

    pairs = [(x, y) for x, y in pairs if math.isfinite(x) and math.isfinite(y)]
    if len(pairs) < 4 or len({x for x, _ in pairs}) < 2 or len({y for _, y in pairs}) < 2:
        return None
    return float(spearmanr(*zip(*pairs, strict=True)).statistic)
