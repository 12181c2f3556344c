"""Trap weights: an active server changes no layer, only the values of the first one.

Every unit of the first fully connected layer gets random weights and a bias so low that few pictures excite it. A unit
excited by one picture of the batch alone shows it verbatim, and two such units agree with each other, which tells them
from units that show a mixture.

Reference: Boenisch et al., "When the Curious Abandon Honesty: Federated Learning Is Not Private".
"""

import copy
from dataclasses import dataclass

import torch
from torch import nn

from .. import check
from ..core import Attack, Knowledge, Observation, Reconstruction
from ..errors import NeedError
from ..models.inspect import first_layer
from .analytic import as_inputs, first_linear, separate_rows


@dataclass(frozen=True)
class TrapWeights(Attack):
    """Rewrite the first layer so that about a `share` of all pictures excites each unit, then read the rows.

    Needs a model whose first layer is `nn.Linear` with a bias. Best with a share of about one over the batch size.
    Knows no way round pruning; `LowRankCompletion` and `Imprint` do.
    """

    share: float = 0.05
    length: float = 1.0

    def __post_init__(self) -> None:
        check.fraction(share=self.share)
        check.positive(share=self.share, length=self.length)

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"active"})

    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        trapped = copy.deepcopy(model)
        _, layer = first_layer(trapped, input_shape)
        if not isinstance(layer, nn.Linear) or layer.bias is None:
            raise NeedError("trap weights need a model whose first layer is nn.Linear with a bias")
        weights = torch.randn(layer.weight.shape, generator=rng, device=rng.device)
        weights *= self.length / weights.norm(dim=1, keepdim=True)
        # Pictures as model inputs have a mean square of about 1, so a product with such a row is about N(0, length^2).
        threshold = self.length * float(torch.special.ndtri(torch.tensor(1 - self.share, dtype=torch.float64)))
        with torch.no_grad():
            layer.weight.copy_(weights)
            layer.bias.fill_(-threshold)
        return trapped

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        name, _ = first_linear(seen)
        weight, bias = seen.grads[f"{name}.weight"].double(), seen.grads[f"{name}.bias"].double()
        return as_inputs(separate_rows(weight, bias, seen), seen)
