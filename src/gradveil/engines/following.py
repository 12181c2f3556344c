"""Single examples in a client's own training loop, for an engine that sees only what came out of it.

    with following(model, optimizer):
        train(model, optimizer, batches)

Inside a Flower client that `VeilMod` protects, the noise of `hardened` then covers the largest example of the update,
as `Veil.protect` has it cover the largest of a gradient. Elsewhere it does nothing but look.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..core import Grads, Tensors
from ..errors import NeedError
from ..shares import Watch


@dataclass
class Account:
    """What single examples brought to an update, step by step."""

    steps: list[Tensors] = field(default_factory=list)  # of each tensor, the RMS of the largest share in this step
    examples: int = 0  # in all steps together

    def largest(self, update: Grads, examples: int) -> Tensors | None:
        """Return the RMS of the largest share that one of so many examples can have in each tensor of the update.

        Whoever goes through its examples in turn meets each in so many steps as there were passes, and in the worst
        case in those in which the largest share was largest. None if no step was followed.
        """
        if not self.steps:
            return None
        passes = math.ceil(self.examples / examples)
        found = {}
        for name, change in update.items():
            shares = [step[name] for step in self.steps if name in step]
            if not shares and bool(change.any()):
                raise NeedError(f"{name} changed in training, but is no parameter of the model that was followed")
            found[name] = torch.stack(shares).sort(descending=True).values[:passes].sum() if shares else torch.zeros(())
        return found


_account: ContextVar[Account | None] = ContextVar("gradveil_account", default=None)


@contextmanager
def accounting() -> Iterator[Account]:
    """Collect what training inside this context follows."""
    account = Account()
    token = _account.set(account)
    try:
        yield account
    finally:
        _account.reset(token)


@contextmanager
def following(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Follow the single examples of every step that `optimizer` takes on `model`.

    What is followed is the direct share: that an example also moves the weights on which later steps compute is left
    out.

    Raises:
        NeedError: the optimizer is not plain SGD, or single examples cannot be told: layers of unknown kinds, a weight
            used twice, gradients that were clipped or scaled.
    """
    if type(optimizer) is not torch.optim.SGD:
        raise NeedError(f"examples can be followed through torch.optim.SGD, not through {type(optimizer).__name__}")
    account = _account.get() or Account()
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    with Watch(model) as watch:

        def count(_: torch.optim.Optimizer, *args: Any) -> None:
            largest = watch.largest({name: p.grad for p, name in names.items() if p.grad is not None})
            if largest is None:
                raise NeedError(
                    "single examples cannot be followed through this model: it holds layers of unknown kinds or uses "
                    "a weight twice, or its loop clips or scales gradients"
                )
            rates = {names[p]: _rate(group) for group in optimizer.param_groups for p in group["params"] if p in names}
            account.steps.append({name: (rates.get(name, 0.0) * share).cpu() for name, share in largest.items()})
            account.examples += watch.examples

        hook = optimizer.register_step_pre_hook(count)
        try:
            yield
        finally:
            hook.remove()


def _rate(group: dict[str, Any]) -> float:
    """Return how far a gradient moves a weight in the end, with all the momentum it leaves."""
    return float(group["lr"]) / (1 - float(group["momentum"]))
