"""Going round PRECODE's bottleneck: the bottleneck's own gradient tells what its noise was meant to hide."""

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..core import Observation
from ..defenses.precode import Bottleneck

INNER = "inner."  # goes before the names of a model's parameters once it is cut off


class UpToEncoder(nn.Module):
    """A model cut off where its bottleneck begins: returns what the encoder gives out, before any noise."""

    def __init__(self, inner: nn.Module, encoder: str) -> None:
        super().__init__()
        self.inner, self.encoder = inner, encoder

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoder's output."""
        caught: list[Tensor] = []

        def keep(_module: nn.Module, _args: Any, out: Tensor) -> None:
            caught.append(out)

        hook = self.inner.get_submodule(self.encoder).register_forward_hook(keep)
        try:
            self.inner(x)
        finally:
            hook.remove()
        return caught[0]


def along(outputs: Tensor, directions: Tensor) -> Tensor:
    """Return the mean product of outputs and fixed directions: a loss whose slope in the outputs is `directions`."""
    return (outputs * directions).sum(1).mean()


def before_bottleneck(seen: Observation) -> Observation:
    """Return the observation of an equivalent client without noise, or `seen` where there is no bottleneck to cut.

    The encoder's bias gradient is the mean over the batch of the loss's slope at the encoder's output, noise and
    divergence included. A client whose loss is the product with these slopes has the same gradients in every layer up
    to the encoder. The slopes take the place of the labels: exact for one example; for more, a start for searching
    them along with the pictures. Needs the bias gradient whole.
    """
    found = [name for name, module in seen.model.named_modules() if isinstance(module, Bottleneck)]
    slope = seen.grads.get(f"{found[0]}.encode.bias") if len(found) == 1 else None
    if slope is None or seen.local_steps != 1 or bool((slope == 0).any()):
        return seen
    inner = copy.deepcopy(seen.model)
    for module in inner.modules():
        if hasattr(module, "auxiliary_loss"):
            module.auxiliary_loss = None  # type: ignore[assignment]  # the slopes hold the divergence already
    encoder, head = f"{found[0]}.encode", found[0].rpartition(".")[0]  # of bottleneck and classifier, side by side
    upstream = [name for name in seen.grads if name.startswith(f"{encoder}.") or not name.startswith(f"{head}.")]
    return replace(
        seen,
        model=UpToEncoder(inner, encoder),
        loss_fn=along,
        grads={f"{INNER}{name}": seen.grads[name] for name in upstream},
        labels=slope.expand(seen.num_examples, -1),
    )
