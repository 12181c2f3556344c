"""What an attack must find in a model it did not build: its first layer, its classifier, its BatchNorm."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import NeedError

Layer = tuple[str, nn.Module]


def layers(model: nn.Module, input_shape: tuple[int, ...] | None = None) -> list[Layer]:
    """Return the modules that own parameters, by name: in the order a forward pass uses them if `input_shape` is given.

    Without it the order is that of registration, which says nothing about a model whose `__init__` shuffles.
    Guarantees: parameters, buffers, training flags and the random state are left as they were.
    """
    owners = [(name, m) for name, m in model.named_modules() if next(m.parameters(recurse=False), None) is not None]
    if input_shape is None:
        return owners
    used: list[Layer] = []
    hooks = [
        module.register_forward_pre_hook(lambda _m, _x, layer=(name, module): used.append(layer))
        for name, module in owners
    ]
    try:
        dry_run(model, input_shape)
    finally:
        for hook in hooks:
            hook.remove()
    return list(dict.fromkeys(used))


def first_layer(model: nn.Module, input_shape: tuple[int, ...] | None = None) -> Layer:
    """Return name and module of the first layer with parameters; see `layers` for what `input_shape` adds.

    >>> first_layer(nn.Sequential(nn.Flatten(), nn.Linear(4, 2)))
    ('1', Linear(in_features=4, out_features=2, bias=True))
    """
    found = layers(model, input_shape)
    if not found:
        raise NeedError("the model has no layer with parameters")
    return found[0]


def last_linear(model: nn.Module, input_shape: tuple[int, ...] | None = None) -> Layer:
    """Return name and module of the classifier: the last linear layer; see `layers` for what `input_shape` adds."""
    found = [layer for layer in layers(model, input_shape) if isinstance(layer[1], nn.Linear)]
    if not found:
        raise NeedError("the model has no nn.Linear to be its classifier")
    return found[-1]


def has_batchnorm(model: nn.Module) -> bool:
    """Say whether the model has BatchNorm layers (whose statistics mix the pictures of a batch in training mode)."""
    return any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def dry_run(model: nn.Module, input_shape: tuple[int, ...]) -> Tensor:
    """Run the model on two black pictures and leave no trace."""
    first = next(model.parameters(), torch.zeros(0))
    zeros = torch.zeros(2, *input_shape, dtype=first.dtype, device=first.device)
    cuda = [first.device] if first.device.type == "cuda" else []
    with evaluating(model), torch.no_grad(), torch.random.fork_rng(devices=cuda):
        out: Tensor = model(zeros)
        return out


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode; afterwards every module has the mode it had, also where they differed."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
