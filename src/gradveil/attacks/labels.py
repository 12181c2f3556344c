"""Reading the labels off the classifier's gradient, also where pruning has torn holes into it.

With one example, features f and probabilities p, row i of the classifier's gradient is `(p_i - [i is the label]) f` and
entry i of its bias gradient the factor in front. So the label's row has the one negative factor, and the largest one.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core import Observation
from ..errors import NeedError
from ..models.inspect import evaluating, last_linear
from .imitation import Understanding, shaped, understand
from .space import box, device_of, unit

HOLES = 0.4  # share of exact zeros from which a gradient counts as pruned
INTACT = 1e-2  # how closely the label's row of an untouched gradient balances the others
PROBES = 8  # random pictures that show which signs the features can have
SHRINKAGES = 200  # guesses at what clipping left of a gradient, from all of it to 1e-4
SCALES = 61  # guesses at the length of the features, from 1e-3 to 1e3


def infer_labels(seen: Observation, known: Understanding | None = None) -> Tensor:
    """Return `[num_examples]` labels, found by the best rule for what arrived.

    `known` is what was found out about the defense; without it the defense is tried out.

    Guarantees: exact for one example of an undefended model with a linear classifier, with or without bias, whatever
    the signs of its features. For batches, and under pruning or noise, it is a guess: the report scores it.
    """
    known = known or understand(seen)
    # What was left out must not count as sent because noise covers it; noise alone is better than nothing.
    sent = replace(seen, grads=shaped(known.received(seen.grads), seen.grads))
    weight, bias, layer = classifier_gradient(sent)
    if not bool(weight.any()):
        weight, bias, layer = classifier_gradient(seen)
    if weight.shape[0] == 1:
        raise NeedError("a single output has no class to infer: grant the labels")
    features = features_of_noise(seen, layer)
    if seen.num_examples > 1:
        # Where the largest entries are sent, what is missing is small. Elsewhere it is like the rest.
        does = (known.behaviour or {}).get(f"{last_linear(seen.model, seen.input_shape)[0]}.weight")
        small = does is not None and does.prunes and does.keeps_top
        return from_batch(weight, bias, layer, features, seen.num_examples, small)
    if bias is not None and bool((bias < 0).any()):
        return bias.argmin()[None]
    if float((weight == 0).float().mean()) < HOLES:
        return from_rows(weight, features.mean(0))[None]
    if bool((weight < 0).any()):
        # Features that cannot be negative make every negative entry a proof; otherwise typical features must judge.
        return ((weight < 0).sum(1) if bool(features.amin() >= 0) else -weight @ features.mean(0)).argmax()[None]
    return from_consistency(weight, layer)[None]


def classifier_gradient(seen: Observation) -> tuple[Tensor, Tensor | None, nn.Linear]:
    """Return the gradient `[C, D]` of the classifier's weight, that `[C]` of its bias if it has one, and the layer."""
    name, layer = last_linear(seen.model, seen.input_shape)
    prefix = f"{name}." if name else ""
    if f"{prefix}weight" not in seen.grads or not isinstance(layer, nn.Linear):
        raise NeedError(f"the gradient of the classifier {name!r} did not arrive: grant the labels")
    scale = 1 / unit(seen)
    weight, bias = seen.grads[f"{prefix}weight"], seen.grads.get(f"{prefix}bias")
    return weight * scale, None if bias is None else bias * scale, layer


def from_rows(weight: Tensor, features: Tensor) -> Tensor:
    """Return the row that points most against typical features, among the largest rows if the gradient is intact.

    In an intact gradient the label's row is as large as all others together. iDLG takes the smallest row sum instead,
    which fails where features are negative on average.
    """
    sizes = torch.linalg.vector_norm(weight, dim=1)
    intact = (2 * sizes.amax() - sizes.sum()).abs() <= INTACT * sizes.amax()
    against = weight @ features
    return torch.where(intact & (sizes < (1 - INTACT) * sizes.amax()), torch.inf, against).argmin()


def from_batch(
    weight: Tensor, bias: Tensor | None, layer: nn.Linear, features: Tensor, count: int, small: bool = False
) -> Tensor:
    """Return `count` labels, repeated ones included, sorted; `small` says that entries not sent are near zero.

    The mean factor of class i is its mean probability minus its share of the batch. The factor is the bias gradient,
    or the weight gradient seen along typical features; the probability comes from the known weights and the features
    that the rows of absent classes show.
    """
    if bias is not None and float((bias == 0).float().mean()) < HOLES:
        factor = bias
        absent = factor > 0
        shown = weight[absent].sum(0) / factor[absent].sum().clamp_min(1e-30)
        p = torch.softmax(layer(shown), 0).detach() if bool(absent.any()) else torch.softmax(layer(features), 1).mean(0)
        factor = factor / shrinkage(p, factor, count)
    else:
        typical = features.mean(0)
        seen = torch.ones_like(weight) if small else (weight != 0).to(typical)
        factor = weight @ typical / (seen @ typical.square()).clamp_min(1e-30)
        factor = factor if bias is None else torch.where(bias != 0, bias, factor)
        p = torch.softmax(layer(features), 1).mean(0).detach()
    missing = count * (p - factor)
    found = []
    for _ in range(count):
        lowest = int(missing.argmax())
        found.append(lowest)
        missing[lowest] -= 1
    return torch.tensor(sorted(found), device=weight.device)


def shrinkage(p: Tensor, factor: Tensor, count: int) -> Tensor:
    """Return by what the factors were multiplied, as far as that can be told: clipping shrinks a gradient.

    The right multiple, and few others, makes the classes' numbers of examples whole, none negative, `count` in all.
    """
    scales = torch.logspace(0, -4, SHRINKAGES, device=factor.device)
    numbers = count * (p - factor / scales[:, None])
    whole = numbers.round().clamp_min(0)
    misfit = (numbers - whole).square().sum(1) + (whole.sum(1) - count).square()
    return scales[misfit.argmin()]


def features_of_noise(seen: Observation, layer: nn.Linear) -> Tensor:
    """Return what the classifier receives for random pictures: it shows which signs its features can have."""
    low, high = box(seen)
    rng = torch.Generator().manual_seed(0)
    x = low + torch.rand(PROBES, *seen.input_shape, generator=rng).to(device_of(seen)) * (high - low)
    received: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _module, args: received.append(args[0]))
    try:
        with evaluating(seen.model), torch.no_grad():
            seen.model(x)
    finally:
        hook.remove()
    return received[-1]


def from_consistency(weight: Tensor, layer: nn.Linear) -> Tensor:
    """Return the class whose row agrees best with having been pruned as the label's row.

    For when no entry of the label's row arrived. The rows that did arrive are `p_i f`: they give f up to its length,
    and the known weights turn f into p, which settles the length. A class is the likelier the less its row, had it
    been the label's, would have fallen into the sent band, compared with what it would have done otherwise.
    """
    sent = weight != 0
    if not bool(sent.any()):
        raise NeedError("nothing of the classifier's gradient arrived: grant the labels")
    low, high = weight.abs()[sent].amin(), weight.abs()[sent].amax()
    factor, features = _rank_one(weight, sent)
    known = sent.any(1)
    bias = 0.0 if layer.bias is None else layer.bias.detach()
    logits = layer.weight.detach() @ features
    scales = torch.logspace(-3, 3, SCALES, device=weight.device)
    p = torch.softmax(scales[:, None] * logits + bias, 1)
    best = ((p - factor / scales[:, None])[:, known]).square().sum(1).argmin()
    p, features = p[best], features * scales[best]

    def surprise(factors: Tensor) -> Tensor:
        size = factors.abs()[:, None] * features
        inside = (size >= low) & (size <= high)
        return (inside != sent)[:, features != 0].float().mean(1)

    return (surprise(1 - p) - surprise(p)).argmin()


def _rank_one(weight: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    """Return u [C] and v [D], of length 1, with u v^T close to `weight` where it was sent (least squares in turns)."""
    mask = sent.to(weight.dtype)
    v = weight.abs().sum(0) / mask.sum(0).clamp_min(1)
    for _ in range(20):
        u = (weight @ v) / (mask @ v.square()).clamp_min(1e-30)
        v = (u @ weight) / (u.square() @ mask).clamp_min(1e-30)
    length = torch.linalg.vector_norm(v).clamp_min(1e-30)
    return u * length, v / length
