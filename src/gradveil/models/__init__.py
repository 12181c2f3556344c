"""The paper's networks for any picture shape, and any other by its import path."""

import inspect as signatures
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .. import check, spec
from ..errors import ConfigError
from .deep import resnet18, vgg11
from .inspect import dry_run, evaluating, first_layer, has_batchnorm, last_linear, layers
from .small import cnn6, lenet, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "lenet": lenet,
    "cnn6": cnn6,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "mlp": mlp,
}


def build(name: str, *, num_classes: int, input_shape: tuple[int, ...], seed: int = 0) -> nn.Module:
    """Return a freshly initialised model, on the CPU.

    Args:
        name: A name in `MODELS`, with options if need be, such as `lenet(init="default")` or `mlp(hidden=64)`; or
            `package.module:factory`, called with `num_classes` and `input_shape` if it takes them.
        num_classes: Number of outputs.
        input_shape: Shape of one input, such as `(3, 32, 32)`.
        seed: Settles every initial weight. Guarantee: the global random state is neither used nor changed.

    >>> model = build("lenet", num_classes=10, input_shape=(3, 32, 32))
    >>> sum(p.numel() for p in model.parameters())
    15826
    """
    check.at_least(1, num_classes=num_classes)
    shape = tuple(input_shape)
    if not shape or min(shape) < 1:
        raise ConfigError(f"input_shape must hold sizes of 1 or more, got {shape}")
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed the GPU's
        if ":" in name:
            return _imported(name, num_classes, shape)
        table = {key: partial(make, num_classes, shape) for key, make in MODELS.items()}
        try:
            model = spec.build(table, name, "model")
        except RuntimeError as error:
            raise ConfigError(f"model {name} cannot take inputs of shape {shape}: {error}") from error
        return _fitting(model, name, num_classes, shape)


def _imported(path: str, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    factory = spec.import_object(path)
    if not callable(factory):
        raise ConfigError(f"model {path} is not callable: name a function or class that returns an nn.Module")
    known = {"num_classes": num_classes, "input_shape": input_shape}
    with spec.users_code(f"model {path}"):
        takes = signatures.signature(factory).parameters.values()
        rest = any(p.kind is p.VAR_KEYWORD for p in takes)
        model = factory(**{key: value for key, value in known.items() if rest or any(p.name == key for p in takes)})
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model {path} gave {type(model).__name__}, expected an nn.Module")
    return _fitting(model, path, num_classes, input_shape)


def _fitting(model: nn.Module, name: str, num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    try:
        with spec.users_code(f"running model {name}", RuntimeError, ValueError, TypeError):
            outputs: Any = dry_run(model, input_shape)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ConfigError(f"model {name} cannot take inputs of shape {input_shape}: {error}") from error
    if not isinstance(outputs, torch.Tensor):
        raise ConfigError(f"model {name} gives a {type(outputs).__name__}, expected a tensor with a score per class")
    found = tuple(outputs.shape)
    if found != (2, num_classes):
        raise ConfigError(f"model {name} gives outputs {found} for 2 inputs, expected (2, {num_classes})")
    return model


__all__ = [
    "MODELS",
    "build",
    "cnn6",
    "evaluating",
    "first_layer",
    "has_batchnorm",
    "last_linear",
    "layers",
    "lenet",
    "mlp",
    "resnet18",
    "vgg11",
]
