"""R-GAP: solve for the picture layer by layer, from the classifier back to the input, by linear least squares.

Each convolution's input x obeys two sets of linear equations: the layer's output is known (`W x = z`), and so is its
weight gradient (`K x = g`, where K holds the gradient of the loss at the layer's output). A network of convolutions
and LeakyReLUs without biases is positively homogeneous, so everything is found up to one factor first; the classifier
then fixes the factor.

Pruning does not stop it: equations whose gradient entry did not arrive are left out, and a fifth of them is enough.

Reference: Zhu and Blaschko, "R-GAP: Recursive Gradient Attack on Privacy".
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain as chain_of
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import Attack, Observation, Reconstruction
from ..errors import NeedError
from .completion import complete
from .received import received
from .space import box, unit
from .stages import Stage, apply, conv_transpose, features_of, fitting_slopes, output_shape, slopes_of, solve

TURNS = 12  # in which the input and the slopes of missing outputs are solved for
SNAPS = 5  # rounds in which those slopes, each one of two now, must agree with the input
SETTLED = 1e-5  # relative misfit that only the right slopes have; gradients are exact to about 1e-7
MU_TOP = 1.2784645427610738  # where -mu / (1 + exp(mu)) is least


class Found(NamedTuple):
    """The input of a stage up to a factor, the loss's gradient there, and how badly the equations disagree."""

    inputs: Tensor
    pull: Tensor
    misfit: float


@dataclass(frozen=True)
class RGAP(Attack):
    """Recover one picture exactly from a chain of bias-free convolutions and LeakyReLUs, such as CNN6.

    The loss must be cross-entropy, or the logistic loss where the classifier has one output. `masked` leaves out the
    equations whose gradient entry did not arrive, also where noise covers the gaps and the defense is known. The
    published attack (`masked=False`) takes them for zeros, and any change of the gradient then grows from layer to
    layer until nothing is left of the picture.

    Guarantees: exact up to rounding for one example and gradients that are exact where sent, as long as each layer
    has more equations than inputs. Noise, several examples or an old residual break it.
    """

    masked: bool = True

    @property
    def adaptive(self) -> bool:
        return self.masked

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        if seen.num_examples != 1:
            raise NeedError(f"R-GAP recovers one example, this upload is of {seen.num_examples}")
        stages, head, head_name = chain(seen)
        seen = received(seen) if self.masked else seen
        weight = head.weight.detach().double()
        gradient, known = self._arrived(seen, head_name)
        if self.masked and len(gradient) > 1:
            gradient, known = fill_by_sum(gradient, known)
        left, right, _ = complete(gradient, known, 1, rng, restarts=5)
        shape = output_shape(stages[-1])

        def last(sign: float) -> tuple[Found, Tensor]:
            factor, features = sign * left[:, 0], sign * right[:, 0]
            pull = (factor @ weight).view(shape)
            return self._back(stages[-1], seen, features.view(shape), known.any(0).view(shape), pull), factor

        found, factor = min((last(sign) for sign in signs(left[:, 0])), key=lambda one: one[0].misfit)
        misfit = found.misfit
        for stage in reversed(stages[:-1]):
            found = self._back(stage, seen, found.inputs, torch.ones_like(found.inputs, dtype=torch.bool), found.pull)
        logits = F.linear(features_of(stages, found.inputs).flatten(), weight)
        low, high = box(seen)
        scaled = found.inputs * scale(factor, logits, found.inputs, float(torch.maximum(low.abs(), high.abs()).max()))
        inputs = torch.nan_to_num(scaled.to(low.dtype)).clamp(low, high)
        return Reconstruction(inputs, factor.argmin()[None] if len(factor) > 1 else None, misfit)

    def _arrived(self, seen: Observation, name: str) -> tuple[Tensor, Tensor]:
        """Return a layer's gradient and which of its entries count."""
        gradient = seen.grads[f"{name}.weight"].double() / unit(seen)
        return gradient, gradient != 0 if self.masked else torch.ones_like(gradient, dtype=torch.bool)

    def _back(self, stage: Stage, seen: Observation, after: Tensor, known: Tensor, pull: Tensor) -> Found:
        """Go back through one stage: from its output `after`, as far as `known`, and the loss's gradient there."""
        gradient, sent = self._arrived(seen, stage.name)
        slopes = slopes_of(stage, after)
        if not bool(known.all()):
            slopes = settled_slopes(stage, after, known, slopes, pull, gradient, sent)
        before, misfit = solve(stage, after, known, slopes, pull, gradient, sent)
        return Found(before, conv_transpose(stage, pull * slopes), misfit)


def settled_slopes(
    stage: Stage, after: Tensor, known: Tensor, slopes: Tensor, pull: Tensor, gradient: Tensor, sent: Tensor
) -> Tensor:
    """Return the slopes with those of the missing outputs found.

    Where enough outputs are known the input follows from them, and the other signs from the input. Otherwise the
    gradient equations, linear in the input and linear in the slopes, are solved for one and the other in turn. At
    the end each slope is one of two.
    """

    def equations(found: Tensor) -> tuple[Tensor, float]:
        return solve(stage, after, known, found, pull, gradient, sent)

    def in_turn(soft: Tensor) -> Iterator[Tensor]:
        for _ in range(TURNS):
            before, _ = equations(soft)
            soft = torch.where(known, slopes, fitting_slopes(stage, before, soft, known, pull, gradient, sent))
        # Where the equations hardly tell a slope the input does, and the other way round.
        yield from (slopes_of(stage, apply(stage, before)), slopes_of(stage, soft - middle))

    middle = (1 + stage.slope) / 2
    alone, _ = solve(stage, after, known, slopes, pull, gradient, torch.zeros_like(sent))
    first = torch.where(known, slopes, slopes_of(stage, apply(stage, alone)))
    starts = (torch.where(known, slopes, middle), first, torch.where(known, slopes, stage.slope))
    best, least = slopes, math.inf
    for hard in chain_of((first,), *map(in_turn, starts)):
        for _ in range(SNAPS):
            hard = torch.where(known, slopes, hard)
            before, misfit = equations(hard)
            if misfit < least:
                best, least = hard, misfit
            if least < SETTLED:
                return best
            hard = slopes_of(stage, apply(stage, before))
    return best


def fill_by_sum(gradient: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Fill columns of the classifier's gradient that lack one entry: each column adds up to zero, as the factors do."""
    lacking = (known.sum(0) == len(gradient) - 1)[None] & ~known
    filled = torch.where(lacking, -(gradient * known).sum(0, keepdim=True), gradient)
    return filled, known | lacking


def signs(factor: Tensor) -> tuple[float, ...]:
    """Return the signs the classifier's factor can have: softmax minus one-hot has one negative entry at most."""
    if len(factor) < 3:
        return (1.0, -1.0)
    return (1.0,) if int((factor < 0).sum()) <= int((factor > 0).sum()) else (-1.0,)


def scale(factor: Tensor, logits: Tensor, found: Tensor, brightest: float) -> float:
    """Return the alpha for which the input `alpha * found` gives the classifier's factor `factor / alpha`.

    Three classes and more: probabilities are known up to a factor but for the label's, so their logarithms are a
    straight line in the logits whose slope is alpha. Fewer: alpha follows from `mu / (1 + exp(mu))`, which has two
    solutions for an example that is classified well; the one that stays within the range of pixels is taken.
    """
    if len(factor) > 2:
        others = factor > 0
        u, v = logits[others] - logits[others].mean(), factor[others].log()
        return float((u * (v - v.mean())).sum() / u.square().sum().clamp_min(1e-300))
    # mu is the label's margin. Times its own derivative -1 / (1 + exp(mu)) it does not depend on alpha.
    product = float(factor[0] * (logits[0] if len(factor) == 1 else logits[0] - logits[1]))
    largest = float(found.abs().max())
    alphas = [float(factor[0].abs()) * (1 + math.exp(mu)) for mu in margins(product)]
    inside = [alpha for alpha in alphas if alpha * largest <= 1.5 * brightest]
    return max(inside) if inside else min(alphas)


def margins(product: float) -> list[float]:
    """Return every mu with `-mu / (1 + exp(mu)) = product`, by bisection; the nearest one where there is none.

    >>> [round(mu, 6) for mu in margins(-0.2)], [round(mu, 6) for mu in margins(1.0)]
    ([0.54488, 2.396139], [-1.278465])
    """

    def value(mu: float) -> float:
        return -mu * math.exp(-mu) / (1 + math.exp(-mu)) if mu > 0 else -mu / (1 + math.exp(mu))

    if product <= value(MU_TOP):
        return [MU_TOP]
    brackets = [(-abs(product) * 2 - 2, MU_TOP)] + ([(MU_TOP, 700.0)] if product < 0 else [])
    found = []
    for low, high in brackets:
        falling = value(low) > value(high)
        for _ in range(200):
            middle = (low + high) / 2
            if (value(middle) > product) == falling:
                low = middle
            else:
                high = middle
        found.append((low + high) / 2)
    return found


def chain(seen: Observation) -> tuple[list[Stage], nn.Linear, str]:
    """Return the convolutions in order, the classifier and its name; raise `NeedError` for any other network."""
    calls: list[tuple[str, nn.Module, Tensor]] = []
    leaves = [(name, m) for name, m in seen.model.named_modules() if not any(True for _ in m.children())]
    hooks = [
        m.register_forward_pre_hook(lambda m, args, name=name: calls.append((name, m, args[0]))) for name, m in leaves
    ]
    like = next(seen.model.parameters())
    try:
        with torch.no_grad():
            seen.model(torch.zeros(1, *seen.input_shape, dtype=like.dtype, device=like.device))
    finally:
        for hook in hooks:
            hook.remove()
    passive = (nn.Flatten, nn.Identity)
    parts = [call for call in calls if not isinstance(call[1], passive)]
    *body, (head_name, head, _) = parts
    stages = []
    for (name, conv, x), (_, leaky, _) in zip(body[::2], body[1::2], strict=False):
        if not (isinstance(conv, nn.Conv2d) and isinstance(leaky, nn.LeakyReLU)):
            break
        if conv.bias is not None or conv.groups > 1 or conv.dilation != (1, 1) or isinstance(conv.padding, str):
            break
        stages.append(Stage(name, conv, leaky.negative_slope, tuple(x.shape[1:])))
    if not isinstance(head, nn.Linear) or head.bias is not None or not stages or 2 * len(stages) != len(body):
        raise NeedError("R-GAP needs a chain of convolutions and LeakyReLUs and one linear layer, all without biases")
    return stages, head, head_name
