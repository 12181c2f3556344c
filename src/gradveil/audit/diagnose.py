"""Why an attack recovers nothing from a bare gradient, in words a user can act on. A weak attack is not privacy.

Each check looks at one cause and returns a `Finding` or None. They run on undefended uploads only.
"""

import copy
import math
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import Tensor, nn

from .. import tree
from ..core import Batch, Grads
from ..data import Dataset, normalise, to_pixels
from ..gradients import gradient
from ..models import has_batchnorm
from .clients import Sent
from .report import Finding, Row

TINY_NORM = 1e-6  # a float32 gradient this small is mostly rounding
FADED = 1e-5  # first layer's gradient per entry against the last layer's
SURE = 0.999  # mean largest probability from which outputs count as saturated
INPUT_RANGE = (0.3, 3.0)  # standard deviation of sensibly normalised inputs
OFF_CENTRE = 1.0
BLACK = 2.5  # how far from 0 a black picture is
ENOUGH = 4  # pictures from which their mean and spread say something: one alone may be dark, or flat
OUTSIDE = 0.01  # share of pixels beyond black or white from which the constants cannot be right
APART = 0.9  # cosine below which two gradients are different problems
UNMATCHED = 0.05  # cosine loss from which an optimiser has not arrived
MATCHED = 0.01


def diagnose(sent: Sequence[Sent], rows: Sequence[Row], data: Dataset) -> list[Finding]:
    """Return every cause found in the undefended uploads of a column and in the attacks on them."""
    checks = [
        saturated(sent),
        vanishing(sent),
        wrong_normalisation(sent, data),
        train_mode_batchnorm(sent),
        labels_missed(rows),
        unconverged(rows),
        ambiguous(sent, rows),
    ]
    found = [finding for finding in checks if finding is not None]
    return found or [
        Finding(
            "unknown",
            "No known cause was found",
            "The gradient is healthy and the attack converged as far as could be checked.",
            "Try more steps, restarts or another attack before you believe that this model leaks nothing.",
        )
    ]


def vanishing(sent: Sequence[Sent]) -> Finding | None:
    """The gradient, or its part in the first layer, is too small to carry a picture."""
    norm = min(tree.global_norm(s.grads) for s in sent)
    ratios = [_first_over_last(s.grads) for s in sent]
    if norm >= TINY_NORM and min(ratios) >= FADED:
        return None
    where = f"the smallest gradient has norm {norm:.1e}" if norm < TINY_NORM else "it fades on the way to the input"
    return Finding(
        "vanishing_gradient",
        "The gradient vanishes",
        f"{where[0].upper()}{where[1:]}; per entry the first layer's is {min(ratios):.1e} of the last layer's.",
        "Check the loss scale and the initialisation; audit at an earlier round, where gradients are larger. "
        "Privacy that rests on a small gradient ends when somebody computes in double precision.",
    )


def _first_over_last(grads: Grads) -> float:
    big = [g for g in grads.values() if g.ndim > 1] or list(grads.values())
    first, last = (float(g.double().square().mean().sqrt()) for g in (big[0], big[-1]))
    return first / last if last else 0.0


def saturated(sent: Sequence[Sent]) -> Finding | None:
    """The model is so sure of these pictures that hardly any gradient is left."""
    sure = []
    for s in sent:
        out = _outputs(s)
        if out.ndim != 2:
            return None
        sure.append(float(out.softmax(1).max(1).values.mean()))
    if fmean(sure) < SURE:
        return None
    return Finding(
        "saturated_outputs",
        "The outputs are saturated",
        f"The mean largest probability is {fmean(sure):.5f}: the loss hardly depends on these pictures any more.",
        "Audit pictures the model has not learnt by heart, or a checkpoint from earlier in training.",
    )


def wrong_normalisation(sent: Sequence[Sent], data: Dataset) -> Finding | None:
    """The inputs do not look as if they had been normalised with the constants the attacker was told."""
    inputs = torch.cat([s.batch.inputs for s in sent]).double()
    spread, centre = float(inputs.std()), float(inputs.mean().abs())
    lost = (normalise(to_pixels(inputs, data.mean, data.std), data.mean, data.std) - inputs).abs() > 1e-3
    outside = float(lost.double().mean())
    low, middle = (INPUT_RANGE[0], OFF_CENTRE) if len(inputs) >= ENOUGH else (0.0, BLACK)
    if low <= spread <= INPUT_RANGE[1] and centre <= middle and outside < OUTSIDE:
        return None
    return Finding(
        "wrong_normalisation",
        "The normalisation looks wrong",
        f"Inputs have mean {float(inputs.mean()):.2f} and standard deviation {spread:.2f} (expected near 0 and 1); "
        f"{100 * outside:.0f} % of the pixels lie beyond black or white.",
        "Give the mean and std the model is trained with (--mean and --std, or in the Dataset): the attacker searches "
        "the box they define.",
    )


def train_mode_batchnorm(sent: Sequence[Sent]) -> Finding | None:
    """BatchNorm in training mode makes the gradient depend on the whole batch."""
    first = sent[0]
    if not (first.seen.model.training and has_batchnorm(first.seen.model)):
        return None
    calm = gradient(copy.deepcopy(first.seen.model).eval(), first.seen.loss_fn, first.trained_on)
    alike = tree.cosine(calm, first.grads)
    if alike >= APART:
        return None
    return Finding(
        "train_mode_batchnorm",
        "BatchNorm runs in training mode",
        f"The gradient with batch statistics has cosine {alike:.2f} with the one that running statistics give.",
        "Look at the diagnostic column, which uses evaluation mode. The statistics of a batch can be estimated or are "
        "sent along by many frameworks, so do not count on this.",
    )


def labels_missed(rows: Sequence[Row]) -> Finding | None:
    """The attacker searched for pictures of the wrong classes."""
    known = [row.labels_right for row in rows if row.labels_right is not None]
    if not known or max(known) > 0.99:
        return None
    return Finding(
        "labels_not_recovered",
        "The labels were not recovered",
        f"At best {100 * max(known):.0f} % of the labels were found from the classifier's gradient.",
        "Look at the diagnostic column, where labels are known, or use an attack that searches for labels as well.",
    )


def unconverged(rows: Sequence[Row]) -> Finding | None:
    """The optimiser stopped before its own objective was met."""
    losses = [row.loss for row in rows if row.loss is not None and math.isfinite(row.loss)]
    if not losses or min(losses) < UNMATCHED:
        return None
    return Finding(
        "not_converged",
        "The attack did not converge",
        f"The lowest matching loss is {min(losses):.3f}; the true picture has 0.",
        "Give it more steps or restarts, a smaller total-variation weight, or another optimiser.",
    )


def ambiguous(sent: Sequence[Sent], rows: Sequence[Row]) -> Finding | None:
    """The attack arrived, but another picture explains the gradient as well."""
    losses = [row.loss for row in rows if row.loss is not None and math.isfinite(row.loss)]
    if not losses or min(losses) >= MATCHED:
        return None
    equations = sum(int(torch.count_nonzero(g)) for g in sent[0].seen.grads.values())
    unknowns = sent[0].batch.inputs.numel()
    if equations > 4 * unknowns:
        return None
    return Finding(
        "ambiguous",
        "Another picture explains the gradient as well",
        f"The matching loss is {min(losses):.4f}, so the attack arrived, but {equations} numbers for {unknowns} "
        "unknown pixels leave room for other answers.",
        "A prior on pictures (total variation, a generator) or several rounds would close that gap: a stronger "
        "attacker may have them.",
    )


def _outputs(s: Sent) -> Tensor:
    model: nn.Module = copy.deepcopy(s.seen.model).eval()
    batch: Batch = s.batch
    with torch.no_grad():
        out: Tensor = model(batch.inputs)
    return out
