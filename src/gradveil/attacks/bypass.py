"""Going round PRECODE's bottleneck: for one example its own gradient tells all that its noise was meant to hide."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..core import Observation
from ..defenses.precode import Bottleneck


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

    The encoder's bias gradient is the loss's slope at the encoder's output, noise and divergence included. A client
    whose loss is the product with that slope has the same gradients in every layer up to the encoder. The slope takes
    the place of the labels. Holds for one example whose bias gradient arrived whole.
    """
    found = [name for name, module in seen.model.named_modules() if isinstance(module, Bottleneck)]
    if len(found) != 1 or seen.num_examples != 1 or seen.local_steps != 1:
        return seen
    encoder = f"{found[0]}.encode"
    slope = seen.grads.get(f"{encoder}.bias")
    if slope is None or bool((slope == 0).any()):
        return seen
    head = found[0].rpartition(".")[0]  # bottleneck and classifier, side by side
    upstream = [name for name in seen.grads if name == f"{encoder}.weight" or not name.startswith(f"{head}.")]
    return replace(
        seen,
        model=UpToEncoder(seen.model, encoder),
        loss_fn=along,
        grads={f"inner.{name}": seen.grads[name] for name in upstream},
        labels=slope[None],
    )
