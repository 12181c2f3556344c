"""Rob and R-GAP as their authors released them, as far as it changes a score; `reasons.py` compares them with ours."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from gradveil.attacks.rgap import chain, margins
from gradveil.attacks.space import box
from gradveil.attacks.stages import Stage, apply, conv_transpose, gradient_kernel, output_shape, weight_normal
from gradveil.core import Attack, Knowledge, Observation, Reconstruction


@dataclass(frozen=True)
class ReleasedRob(Attack):
    """The planted layer of the released attack: one measurement for all rows, the model sees only what they add up to.

    `mode` is the frequency of its cosine measurement (0: the mean), which is laid out for unit variance.
    """

    bins: int = 100
    mode: int = 0
    gain: float = 1e-3

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"active"})

    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        size = math.prod(input_shape)
        wave = torch.cos(math.pi / size * (torch.arange(size) + 0.5) * self.mode) * 4 * max(self.mode, 0.33) / size
        share = torch.arange(1, self.bins, dtype=torch.float64) / self.bins
        quantiles = torch.sign(share - 0.5) * -torch.log(1 - 2 * (share - 0.5).abs()) / math.sqrt(2)  # Laplace
        edges = torch.cat([torch.tensor([-10.0], dtype=torch.float64), quantiles]).float()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(rng.initial_seed() % 2**32)
            measure, mix = nn.Linear(size, self.bins), nn.Linear(self.bins, size)
        with torch.no_grad():
            measure.weight.copy_(self.gain * wave.expand(self.bins, -1))
            measure.bias.copy_(-self.gain * edges)
            mix.weight.fill_(1 / self.gain)
            mix.bias.sub_(edges.mean())
        block = nn.Sequential(nn.Flatten(), measure, nn.ReLU(), mix, nn.Unflatten(1, input_shape))
        return nn.Sequential(block, model).train(model.training)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        return released_readout(seen, "0.1")


def released_readout(
    seen: Observation, layer: str, shift: float = 0.0, *, largest: bool = True, black: bool = False
) -> Reconstruction:
    """Read each row minus the one before it: row 0 stays a mixture and what lies above the last edge is lost.

    Of more hits than examples those with the largest (one release) or smallest (another) mean gradient are kept; too
    few are filled up with the mean of the data, or with black.
    """
    weight, bias = seen.grads[f"{layer}.weight"].float(), seen.grads[f"{layer}.bias"].float()
    content = torch.cat([weight[:1], weight[1:] - weight[:-1]])
    factor = torch.cat([bias[:1], bias[1:] - bias[:-1]])
    hit = factor != 0
    low, high = box(seen)
    found = (content[hit] / factor[hit, None] - shift).reshape(-1, *seen.input_shape).clamp(low, high)
    if len(found) > seen.num_examples:
        strength = content[hit].mean(1).abs()
        found = found[torch.topk(strength, seen.num_examples, largest=largest).indices]
    filling = low if black else torch.zeros_like(low)
    missing = filling.expand(seen.num_examples - len(found), *seen.input_shape)
    return Reconstruction(torch.cat([found, missing]))


@dataclass(frozen=True)
class ReleasedRGAP(Attack):
    """R-GAP as released, for one logit and a known label opposite to the prediction.

    Gradient and weight rows are not weighed against each other, and what passes between layers is float32. The released
    call converts its float32 rows and solves in float64; `solver` float32 is the guess that was tested. Returns raw
    values: the release shows them clamped, and rescaled from the smallest to the largest.
    """

    solver: Literal["float64", "float32"] = "float64"
    weighed: bool = False

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        stages, head, name = chain(seen)
        if seen.labels is None:
            raise ValueError("R-GAP as released is told the label")
        weight, gradient = head.weight.detach(), seen.grads[f"{name}.weight"]
        margin = margins(float((gradient * weight).sum()))[0]
        factor = -float(2 * seen.labels[0] - 1) / (1 + math.exp(margin))
        after = (gradient / factor).view(output_shape(stages[-1]))
        pull = (factor * weight).view_as(after)
        for stage in reversed(stages):
            slopes = torch.where(after >= 0, 1.0, stage.slope)
            after = self._back(stage, after / slopes, pull * slopes, seen.grads[f"{stage.name}.weight"])
            pull = conv_transpose(stage, pull * slopes)
        return Reconstruction(after)

    def _back(self, stage: Stage, z: Tensor, pull: Tensor, gradient: Tensor) -> Tensor:
        """Return the input that fits both sets of rows best, rounded to float32."""
        kind = getattr(torch, self.solver)
        kernel, z, rows = gradient_kernel(stage, pull).to(kind), z.to(kind), gradient.movedim(1, 0).flatten(1).to(kind)
        normal, block = weight_normal(stage, torch.ones_like(z)), kernel.T @ kernel
        share = float(normal.diagonal().mean() / block.diagonal().mean()) if self.weighed else 1.0
        for channel in range(len(rows)):
            part = slice(channel * len(block), (channel + 1) * len(block))
            normal[part, part] += share * block
        factor, _ = torch.linalg.cholesky_ex(normal)
        x = z.new_zeros(1, *stage.takes)
        for _ in range(3 if kind == torch.float64 else 1):
            missed = rows - x.view(len(rows), -1) @ kernel.T
            pulled = conv_transpose(stage, z - apply(stage, x)).flatten() + share * (missed @ kernel).flatten()
            x = x + torch.cholesky_solve(pulled[:, None], factor).view_as(x)
        return x.float()
