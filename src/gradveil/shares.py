"""How much of a gradient single examples make up, found in the backward pass that computes it.

A layer's weight gradient is the sum, over examples and places, of the slope at its output times what came in. Keeping
both until the pass is over gives every example's share in the gradient that is sent, for little more than the gradient
itself; its length is found without building it where the layer has few places. Models with other layers are looked at
one example after the other.
"""

import copy
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from .core import Batch, Grads, LossFn, Tensors
from .errors import NeedError
from .gradients import gradient, parameters

CANCELS = 0.02  # of what random signs would leave of a sum: half precision stays below
TOLERANCE = 0.05  # of what random signs would leave: half precision stays below, another use of a weight does not


class Factors(NamedTuple):
    """Every example's share in a weight's gradient, as what it is the product of; summed over the third axis."""

    slopes: Tensor  # [examples, groups, places, outputs]
    inputs: Tensor  # [examples, groups, places, inputs]


Shares = Factors | Tensor  # a tensor holds the shares themselves, [examples, *shape]
Parts = dict[str, Shares | None]  # of a layer's parameters, by their own names; None where all shares cancel


@dataclass
class _Call:
    """What passed through a layer."""

    layer: nn.Module
    inputs: Tensor
    slopes: list[Tensor] = field(default_factory=list)  # at its output, once the backward pass has come by


def gradient_and_shares(model: nn.Module, loss_fn: LossFn, batch: Batch) -> tuple[Grads, Tensors]:
    """Return the gradient of the mean loss and, of each tensor, the RMS of the largest share one example has in it.

    Where BatchNorm mixes examples, an example's share is what passes through its own activations, less what BatchNorm
    makes cancel between examples whatever they are.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> batch = Batch(torch.tensor([[1.0, 1.0], [6.0, 8.0]]), torch.zeros(2))
    >>> gradient_and_shares(model, lambda out, _: out.mean(), batch)
    ({'weight': tensor([[3.5000, 4.5000]])}, {'weight': tensor(3.5355)})
    """
    calls: dict[nn.Module, list[_Call]] = {}
    with ExitStack() as hooks:
        for module in model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                hooks.enter_context(_watched(module, calls.setdefault(module, [])))
        grads = gradient(model, loss_fn, batch)
    with torch.autocast(batch.inputs.device.type, enabled=False):
        lengths = _lengths(model, calls, grads, len(batch.labels))
    if lengths is None:
        return grads, _one_by_one(model, loss_fn, batch)
    return grads, {name: lengths[name] / math.sqrt(max(g.numel(), 1)) for name, g in grads.items()}


def squares(shares: Shares) -> Tensor:
    """Return the squared length of each example's share.

    >>> slopes, inputs = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 6)
    >>> whole = torch.einsum("ngto,ngti->ngoi", slopes, inputs).square().sum((1, 2, 3))
    >>> torch.allclose(squares(Factors(slopes, inputs)), whole, rtol=1e-4)
    True
    """
    if isinstance(shares, Tensor):
        return shares.flatten(1).square().sum(1)
    slopes, inputs = shares
    if _few(slopes.shape[2], slopes.shape[3], inputs.shape[3]):
        # The length of a sum of products, by the angles between what they are made of.
        return ((slopes @ slopes.mT) * (inputs @ inputs.mT)).sum((1, 2, 3))
    return (slopes.mT @ inputs).square().sum((1, 2, 3))


def _few(places: int, outputs: int, inputs: int) -> bool:
    """Say whether a layer has so few places that products of places cost less than its weight."""
    return places * (outputs + inputs) <= outputs * inputs


def _watched(module: nn.Module, calls: list[_Call]) -> Any:
    """Keep what passes through a layer until the handle is left."""

    def keep(layer: nn.Module, args: Any, output: Any) -> None:
        call = _Call(layer, args[0].detach() if args and isinstance(args[0], Tensor) else torch.empty(0))
        calls.append(call)
        if isinstance(output, Tensor) and output.requires_grad:
            # On the tensor, not on what becomes of it: a ReLU may overwrite it in place.
            output.register_hook(lambda slope: call.slopes.append(slope.detach()))

    return module.register_forward_hook(keep)


def _lengths(model: nn.Module, calls: dict[nn.Module, list[_Call]], grads: Grads, count: int) -> Tensors | None:
    """Return the length of the largest of `count` shares in every tensor; None if a layer is not of a kind known here,
    or if shares do not add up to the gradient."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    mixed = any(_takes_statistics(m) for m in model.modules())
    found: Tensors = {}
    fits: list[Tensor] = []
    for module, made in calls.items():
        rule = next((rule for kind, rule in _RULES.items() if isinstance(module, kind)), None)
        if rule is None or len(made) != 1 or len(made[0].slopes) != 1:
            return None
        inputs, slopes = made[0].inputs.float(), made[0].slopes[0].float()
        parts = rule(module, inputs, slopes, mixed) if len(inputs) == len(slopes) == count else None
        for own, p in module.named_parameters(recurse=False):
            if p.requires_grad:
                name = names[id(p)]
                if parts is None or own not in parts or name in found:
                    return None
                part = parts[own]
                if part is None:
                    found[name] = torch.linalg.vector_norm(grads[name].float()) / count
                else:
                    found[name] = squares(part).amax().clamp_min(0).sqrt()
                    fits.append(_add_up(part, grads[name]))
    return found if found.keys() == grads.keys() and bool(torch.stack(fits).all()) else None


def _add_up(shares: Shares, grads: Tensor) -> Tensor:
    """Say whether the shares of all examples are the gradient: a weight may be used in a way no layer shows.

    Products are not built for this: both sides are seen along a random direction.
    """
    g = grads.float()
    rng = torch.Generator(g.device).manual_seed(0)
    if isinstance(shares, Factors):
        slopes, inputs = shares
        left, right = (torch.randn(t.shape[3], generator=rng, device=g.device) for t in (slopes, inputs))
        seen = (slopes @ left) * (inputs @ right)
        whole = (g.reshape(slopes.shape[1], len(left), len(right)) @ right @ left).sum()
    else:
        along = torch.randn(g.shape, generator=rng, device=g.device)
        seen, whole = shares * along, (g * along).sum()
    slack = TOLERANCE * (torch.linalg.vector_norm(seen) + whole.abs())
    fits: Tensor = (seen.sum() - whole).abs() <= slack
    return fits


def _one_by_one(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Tensors:
    """Return the largest shares of any model, with the statistics of the batch held fixed where BatchNorm takes them.

    Layers that draw at random draw anew for this.
    """
    model = _with_fixed_statistics(model, batch)
    found = {name: torch.zeros((), device=p.device) for name, p in parameters(model).items()}
    try:
        for x, y in zip(*batch, strict=True):
            for name, g in gradient(model, loss_fn, Batch(x[None], y[None])).items():
                found[name] = torch.maximum(found[name], torch.linalg.vector_norm(g.float()))
    except Exception as error:
        raise NeedError(
            f"the gradients of single examples cannot be computed ({error!r}): the model or its loss needs "
            "whole batches. hardened(balance=0) does without, and bounds what a batch gives away, not one example of it"
        ) from error
    entries = {name: max(p.numel(), 1) for name, p in parameters(model).items()}
    return {name: most / len(batch.labels) / math.sqrt(entries[name]) for name, most in found.items()}


def _with_fixed_statistics(model: nn.Module, batch: Batch) -> nn.Module:
    """Return the model, or a copy whose BatchNorm layers hold the statistics of this batch if they would take them."""
    if not any(_takes_statistics(m) for m in model.modules()):
        return model
    fixed = copy.deepcopy(model)
    with torch.no_grad():
        for module in fixed.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0  # what they remember is then the last batch
        fixed(batch.inputs)
    return fixed.eval()


# What a layer's parts of a gradient are made of, by its kind: of what came in and the slopes at its output.


def _linear(layer: nn.Linear, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    a, b = (t.reshape(len(t), 1, -1, t.shape[-1]) for t in (inputs, slopes))
    if mixed and _cancel(b, (0, 1, 2)):
        return {"weight": Factors(b, a - a.mean((0, 2), keepdim=True)), "bias": None}
    return {"weight": Factors(b, a), "bias": b.sum((1, 2))}


def _convolution(layer: nn.Conv2d, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts | None:
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return None
    shape, bias, places = layer.weight.shape, slopes.sum((2, 3)), slopes.shape[2:].numel()
    cancel = mixed and _cancel(slopes, (0, 2, 3))
    if _few(places, shape[0] // layer.groups, shape[1:].numel()):
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, b = (t.reshape(len(t), layer.groups, -1, places).mT for t in (patches, slopes))
        a = a - a.mean((0, 2), keepdim=True) if cancel else a
        return {"weight": Factors(b, a), "bias": None if cancel else bias}
    how = (layer.stride, layer.padding, layer.dilation, layer.groups)
    pairs = zip(inputs.split(1), slopes.split(1), strict=True)
    weight = torch.stack([conv2d_weight(a, shape, b, *how) for a, b in pairs])
    if cancel:
        typical = conv2d_weight(inputs, shape, torch.ones_like(slopes), *how) / (len(inputs) * places)
        weight -= bias[:, :, None, None, None] * typical
    return {"weight": weight, "bias": None if cancel else bias}


def _takes_statistics(layer: nn.Module) -> bool:
    """Say whether it is a BatchNorm that normalises by the batch at hand, and so mixes examples."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None)


def _cancel(slopes: Tensor, over: tuple[int, ...]) -> bool:
    """Say whether the slopes at each output sum to zero: where examples are mixed, BatchNorm comes next.

    It subtracts whatever is common to all inputs. So that part of them, and a bias, is in no gradient, only in shares
    that cancel, and counting it would have the noise follow nothing.
    """
    return bool((slopes.sum(over).abs() <= CANCELS * torch.linalg.vector_norm(slopes, dim=over)).all())


def _channels(normal: Tensor, slopes: Tensor) -> Parts:
    return {name: t.reshape(*t.shape[:2], -1).sum(2) for name, t in (("weight", slopes * normal), ("bias", slopes))}


def _batch_norm(layer: nn.modules.batchnorm._BatchNorm, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    taken = _takes_statistics(layer)
    mean, var = (None, None) if taken else (layer.running_mean, layer.running_var)
    return _channels(F.batch_norm(inputs, mean, var, training=taken, eps=layer.eps), slopes)


def _group_norm(layer: nn.GroupNorm, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    return _channels(F.group_norm(inputs, layer.num_groups, eps=layer.eps), slopes)


def _layer_norm(layer: nn.LayerNorm, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    shape = layer.normalized_shape
    return {n: t.reshape(len(t), -1, *shape).sum(1) for n, t in (("weight", slopes * normal), ("bias", slopes))}


_RULES: dict[type[nn.Module], Callable[..., Parts | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.modules.batchnorm._BatchNorm: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
