"""One class out of a large batch: the server edits one row of the classifier, and only that class answers.

A picture's gradient in the features is `sum_i (p_i - [i is its label]) w_i`. Where row c is long and its logit far
below all others, p_c is nothing: whoever is not of class c sends nothing along that row, and whoever is sends all of
it. So a batch of thirty-two leaves as the few pictures of one class, in every layer but the classifier; where classes
are many that is one picture. Averages over a batch do not hide it, and noise that follows the gradient shrinks along.

Reference: Wen et al., "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification", who edit
the classifier too; here one row is enough.
"""

import copy
import math
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import check
from ..core import Attack, Defense, Knowledge, Observation, Reconstruction
from ..errors import NeedError
from ..models.inspect import evaluating, last_linear
from .generative import GGL
from .imprint import PHOTO_MEAN
from .space import box
from .spotlight import COARSE, COLOUR

PIXEL_SPREAD = 0.25  # of the pixels of a natural photograph, in 0..1
SAMPLES = 256  # invented pictures that show where features lie
SLACK = 5.0  # spreads that a real picture's logit may lie above those of all invented ones


@dataclass(frozen=True)
class Fishing(Attack):
    """Let the pictures of class `label` alone answer, and run `inner` on what they send.

    Row `label` of the classifier becomes `boost` times as long as the others are, in a random direction in which
    natural pictures hardly agree, and its logit falls `margin` below. Structure and all other weights stay as they are.

    Guarantees: the share of other classes in the gradient of every layer before the classifier is of the order of
    their number over `boost` squared. Does not guarantee that the batch holds exactly one picture of the class; where
    labels are known, `inner` searches several together, and of none there is no guess.
    """

    inner: Attack = field(default_factory=lambda: GGL(steps=150, restarts=2, pool=32))
    label: int = 0
    boost: float = 300.0
    margin: float = 8.0
    center: float = 0.0
    spread: float = 1.0

    def __post_init__(self) -> None:
        check.at_least(0, label=self.label)
        check.positive(boost=self.boost, margin=self.margin, spread=self.spread)

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"active"}

    @property
    def adaptive(self) -> bool:
        return self.inner.adaptive

    def fitted(self, defense: Defense | None, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        center = 0.0 if any(mean) else PHOTO_MEAN / std[0]  # normalised pictures have mean 0 by design
        return replace(self, center=center, spread=PIXEL_SPREAD * sum(1 / s for s in std) / len(std))

    def blind(self) -> Attack | None:
        blind = self.inner.blind()
        return None if blind is None else replace(self, inner=blind)

    @torch.no_grad()
    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        changed = copy.deepcopy(model)
        _, head = _classifier(changed, input_shape)
        rows, bias, own = head.weight, head.bias, self.label
        if own >= len(rows):
            raise ValueError(f"label must be below the {len(rows)} classes of the model, got {own}")
        features = self._features(changed, head, input_shape, rng)
        typical = features.mean(0)
        others = torch.cat([rows[:own], rows[own + 1 :]])
        row = torch.randn(rows.shape[1], generator=rng, device=rng.device).to(rows)
        row -= (row @ typical) / typical.square().sum() * typical  # what all pictures share tells them not apart
        least_length = others.norm(dim=1).mean()
        if bias is None:
            # What pulls the logit down is then part of the row, and a gradient along it looks alike for all pictures.
            least_length = torch.maximum(least_length, self.margin / typical.norm())
        row *= self.boost * least_length / row.norm()
        least = (features @ others.T + (0 if bias is None else bias[torch.arange(len(rows)) != own])).amin(1)
        above = features @ row - least  # to be brought below -margin, with slack for real pictures
        if bias is not None:
            bias[own] = -(above.amax() + SLACK * above.std() + self.margin)
        else:
            pull = features @ typical
            if not bool((pull > 0).all()):
                raise NeedError("without a bias in its classifier this model gives no row a logit below all others")
            scaled = (above + self.margin) / pull
            row -= (scaled.amax() + scaled.std()) * typical
        rows[own] = row
        return changed

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        return self.run_many([seen], [rng])[0]

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        caught = [self._caught(one) for one in seen]
        some = [i for i, view in enumerate(caught) if view is not None]
        found = self.inner.run_many([v for v in caught if v is not None], [rngs[i] for i in some])
        results = dict(zip(some, found, strict=True))
        return [results[i] if i in results else _nothing(one) for i, one in enumerate(seen)]

    def _caught(self, seen: Observation) -> Observation | None:
        """Return what a client would have sent whose batch holds the pictures of the class alone."""
        if seen.local_steps > 1:
            raise NeedError("fishing needs a client that takes one step")
        # Who does not know the labels takes it that there is one: the server chose a class that is rare.
        count = 1 if seen.labels is None else int((seen.labels == self.label).sum())
        if not count:
            return None
        model = copy.deepcopy(seen.model)
        name, head = _classifier(model, seen.input_shape)
        outer, _, last = name.rpartition(".")
        setattr(model.get_submodule(outer), last, _Fixed(head))  # its gradient is of all pictures: not compared
        own = dict(model.named_parameters())
        share = seen.num_examples / count
        return replace(
            seen,
            model=model,
            grads={n: g * share for n, g in seen.grads.items() if n in own},
            num_examples=count,
            labels=torch.full((count,), self.label),
            earlier=(),
        )

    def _features(
        self, model: nn.Module, head: nn.Linear, input_shape: tuple[int, ...], rng: torch.Generator
    ) -> Tensor:
        """Return what the classifier is given for pictures with the spectrum of natural ones."""
        caught: list[Tensor] = []

        def keep(_module: nn.Module, args: Any) -> None:
            caught.append(args[0].flatten(1))

        pictures = self.center + self.spread * _invented(input_shape, rng)
        hook = head.register_forward_pre_hook(keep)
        try:
            with evaluating(model):
                model(pictures.to(head.weight))
        finally:
            hook.remove()
        return caught[0]


class _Fixed(nn.Module):
    """A linear layer whose weights are no parameters."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().clone())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer returns."""
        return F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]


def _classifier(model: nn.Module, input_shape: tuple[int, ...]) -> tuple[str, nn.Linear]:
    name, head = last_linear(model, input_shape)
    if not isinstance(head, nn.Linear) or len(head.weight) < 3:
        raise NeedError("fishing needs a linear classifier of at least three classes")
    return name, head


def _invented(input_shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Return pictures `[SAMPLES, C, H, W]` of mean 0 and spread 1, whose amplitudes fall as one over the frequency."""
    if len(input_shape) != 3:
        return torch.randn(SAMPLES, *input_shape, generator=rng, device=rng.device)
    channels, height, width = input_shape
    rows, columns = torch.fft.fftfreq(height, device=rng.device), torch.fft.fftfreq(width, device=rng.device)
    amplitude = (rows[:, None].square() + columns.square() + COARSE**2).rsqrt()
    shape = (SAMPLES, 1, height, width)
    white = torch.randn(SAMPLES, 1 + channels, *shape[2:], generator=rng, device=rng.device)
    waves = torch.fft.ifft2(torch.fft.fft2(white) * amplitude).real
    pictures = math.sqrt(1 - COLOUR) * waves[:, :1] + math.sqrt(COLOUR) * waves[:, 1:]
    invented: Tensor = pictures / pictures.std()
    return invented


def _nothing(seen: Observation) -> Reconstruction:
    low, _ = box(seen)
    return Reconstruction(low.expand(1, *seen.input_shape)[:0], labels=torch.zeros(0, dtype=torch.int64))
