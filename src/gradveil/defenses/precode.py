"""PRECODE: a variational bottleneck in front of the classifier, so that gradients depend on noise."""

import copy
import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .. import check
from ..core import Defense, Grads, State, Step
from ..errors import NeedError
from ..models.inspect import last_linear

_SMALLEST_SPREAD = 1e-6  # softplus underflows, and the divergence takes its logarithm


@dataclass(frozen=True)
class PRECODE(Defense):
    """Put a stochastic bottleneck of `latent` dimensions before the last linear layer; send the gradient as it is.

    All parties build the model with `prepare_model`, whose new weights depend on `seed` alone. The loss gains `beta`
    times the bottleneck's divergence from N(0, I) in bits. With D features it adds `(3 D + 2) latent + D` parameters:
    769 D + 512 for 256, which is 37 times LeNet itself.

    Guarantees: every forward pass draws new noise, in evaluation too. Does not guarantee privacy: an attacker who
    ignores the tensors behind the bottleneck, or optimises the noise along with the picture, goes round it, and a
    layer planted in front of the network never meets it.

    Compose: anywhere, inside ErrorFeedback too: `prepare_model` acts on the model. A gradient of a model without the
    bottleneck is refused.

    Reference: Scheliga et al., "PRECODE - A Generic Model Extension to Prevent Deep Gradient Leakage".
    """

    latent: int = 256
    beta: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        check.at_least(1, latent=self.latent)
        check.non_negative(beta=self.beta)

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        if not any(name.endswith("bottleneck.encode.weight") for name in grads):
            raise NeedError("this gradient is of a model without a bottleneck: train precode.prepare_model(model)")
        return dict(grads), state

    def prepare_model(self, model: nn.Module) -> nn.Module:
        net = copy.deepcopy(model)
        name, classifier = last_linear(net)
        weight = classifier.get_parameter("weight")
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # torch.manual_seed would also seed the GPU's
            bottleneck = Bottleneck(weight.shape[1], self.latent).to(weight.device, weight.dtype)
        head = nn.Sequential(OrderedDict(bottleneck=bottleneck, linear=classifier))
        if name:
            parent, _, child = name.rpartition(".")
            setattr(net.get_submodule(parent), child, head)
        return Bottlenecked(net if name else head, self.beta).train(model.training)


class Bottleneck(nn.Module):
    """Encode to mean and spread, draw, decode. Remembers the divergence of the last forward pass.

    Noise comes from torch's default generator, from `generator` if one is set, or is `noise` itself if that is set
    (an attacker may optimise it). None of the three is copied or saved with the model, nor is the divergence.
    """

    def __init__(self, features: int, latent: int) -> None:
        super().__init__()
        self.encode = nn.Linear(features, 2 * latent)
        self.decode = nn.Linear(latent, features)
        self.generator: torch.Generator | None = None
        self.noise: Tensor | None = None
        self.divergence: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        """Return the features as the draw restores them."""
        mean, raw = self.encode(features).chunk(2, dim=-1)
        spread = softplus(raw).clamp_min(_SMALLEST_SPREAD)
        self.divergence = divergence(mean, spread)
        noise = self.noise
        if noise is None:
            noise = torch.randn(mean.shape, generator=self.generator, device=mean.device, dtype=mean.dtype)
        restored: Tensor = self.decode(mean + spread * noise)
        return restored

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model goes to the attacker: it must carry neither the client's draws nor a live graph.
        return {**self.__dict__, "generator": None, "noise": None, "divergence": None}


class Bottlenecked(nn.Module):
    """A classifier with a bottleneck, and the loss term that goes with it."""

    def __init__(self, net: nn.Module, beta: float) -> None:
        super().__init__()
        self.net = net
        self.beta = beta

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the classifier's outputs for a fresh draw."""
        outputs: Tensor = self.net(inputs)
        return outputs

    def auxiliary_loss(self) -> Tensor:
        """Return beta times the divergence of the last forward pass, in bits."""
        values = [m.divergence for m in self.modules() if isinstance(m, Bottleneck) and m.divergence is not None]
        if not values:
            raise NeedError("the auxiliary loss belongs to a forward pass: call the model first")
        return values[0] * (self.beta / math.log(2))


def divergence(mean: Tensor, spread: Tensor) -> Tensor:
    """Return KL(N(mean, spread^2) || N(0, I)), summed over dimensions, averaged over the batch.

    >>> float(divergence(torch.zeros(2, 4), torch.ones(2, 4)))
    0.0
    """
    return (0.5 * (mean.square() + spread.square() - 1) - spread.log()).sum(-1).mean()
