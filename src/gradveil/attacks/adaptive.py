"""What an attacker who knows the defense makes of an upload: which numbers to compare, and how much each counts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core import Grads, Observation
from .bypass import INNER
from .imitation import Behaviour, Understanding, flat, forgets, understand, with_zeros

LOOKS_PRUNED = 0.4  # share of exact zeros in the middle tensor from which an upload counts as pruned
BIG_ENOUGH = 20  # tensors below this say little about a share of zeros
STALE = 0.1  # weight of an entry that may hold older batches, beside one that cannot

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


def freshness(seen: Observation, known: Understanding) -> Tensor | float:
    """Return how far each entry is from being mixed with older batches, by the client's previous upload.

    Under error feedback an entry sent last round starts from zero, so what is sent of it now is this batch alone.
    """
    before = [one for one in seen.earlier if one.round == seen.round - 1]
    if not before or not forgets(seen.defense):
        return 1.0
    # Earlier uploads are whole, also where the model of this one was cut off.
    last = {name: before[0].grads[name.removeprefix(INNER)] for name in seen.grads}
    return torch.where(known.arrived(last), 1.0, STALE)


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
        trust = _trust(sent, weight, noise)
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


def _trust(sent: Tensor, weight: Tensor, noise: Tensor) -> Tensor:
    """Return how much each entry counts for its noise: one over the deviation, as in a likelihood."""
    # What is known exactly, if anything is, tells the typical size: the rest may be noise for the most part.
    sure = weight * (noise == 0)
    sure = sure if bool(sure.any()) else weight
    typical = (sent * sure).square().sum().div(sure.sum().clamp_min(1)).sqrt()
    return 1 / noise.clamp_min(0.1 * float(typical) + 1e-30)  # below a tenth of that size noise does not matter


def _noise_on(g: Tensor, done: Behaviour) -> Tensor:
    """Return the standard deviation of the noise on each entry of one tensor."""
    noise = torch.full_like(g, done.noise)
    return torch.where(with_zeros(g != 0), 0.0, noise) if done.clean_columns else noise


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
