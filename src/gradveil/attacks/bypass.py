"""Going round PRECODE's bottleneck: the bottleneck's own gradient tells what its noise was meant to hide."""

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ..core import Observation
from ..defenses.precode import Bottleneck
from .completion import complete

INNER = "gradveil_inner."  # goes before the names of a model's parameters once it is cut off; no model has it itself
RESTARTS = 3  # of the completion, while it does not fit
COMPLETED = 1e-2  # relative misfit up to which what arrived counts as an outer product


class UpToEncoder(nn.Module):
    """A model cut off where its bottleneck begins: returns what the encoder gives out, before any noise."""

    def __init__(self, inner: nn.Module, encoder: str) -> None:
        super().__init__()
        self.gradveil_inner, self.encoder = inner, encoder

    def forward(self, x: Tensor) -> Tensor:
        """Return the encoder's output."""
        caught: list[Tensor] = []

        def keep(_module: nn.Module, _args: Any, out: Tensor) -> None:
            caught.append(out)

        hook = self.gradveil_inner.get_submodule(self.encoder).register_forward_hook(keep)
        try:
            self.gradveil_inner(x)
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
    them along with the pictures. Needs the bias gradient whole; of one example, pruning hides only the slopes of units
    of which nothing arrived, and they count as zero.
    """
    found = [name for name, module in seen.model.named_modules() if isinstance(module, Bottleneck)]
    slope = _slopes(seen, f"{found[0]}.encode") if len(found) == 1 and seen.local_steps == 1 else None
    if slope is None:
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
        local_lr=None,  # the slopes hold it already
    )


def _slopes(seen: Observation, encoder: str) -> Tensor | None:
    """Return the encoder's bias gradient, completed where entries are missing, or None where it cannot be."""
    weight, bias = seen.grads.get(f"{encoder}.weight"), seen.grads.get(f"{encoder}.bias")
    if bias is None or not bool((bias == 0).any()):
        return bias
    if weight is None or seen.num_examples > 1:
        return None
    joint = torch.cat([weight, bias[:, None]], 1).double()  # of one example: an outer product
    left, right, error = complete(joint, joint != 0, 1, torch.Generator().manual_seed(0), restarts=RESTARTS)
    slopes = (left @ right[-1]).to(bias)
    return slopes if error < COMPLETED and bool(slopes.any()) else None
