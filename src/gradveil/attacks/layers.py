"""Gradients of many candidate batches at once, written out layer by layer.

All candidates share the weights, so one ordinary forward and one ordinary backward pass give every layer's input and
output gradient for all of them; the gradient of each candidate is then one batched matrix product per layer. That is
the same arithmetic as `torch.func.vmap` over `torch.func.grad`, without its grouped convolutions, and differentiable
again in plain autograd, which is what a gradient-matching attack needs. What no rule covers is left to vmap.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..core import LossFn
from ..gradients import auxiliary_loss
from .objectives import statistics_gap


class UnsupportedError(Exception):
    """The model holds something no rule covers; the caller takes the general way."""


class Affine(nn.Module):
    """BatchNorm with fixed statistics: a multiply and an add, whose second derivative costs nothing."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise UnsupportedError("BatchNorm without running statistics mixes the examples of a batch")
        self.mean, self.var = norm.running_mean.detach(), norm.running_var.detach()
        self.rstd = torch.rsqrt(self.var + norm.eps)
        self.scale = self.rstd if norm.weight is None else self.rstd * norm.weight.detach()
        self.shift = -self.mean * self.scale + (0.0 if norm.bias is None else norm.bias.detach())

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        shape = (1, -1, *[1] * (x.dim() - 2))
        return torch.addcmul(self.shift.view(shape), x, self.scale.view(shape))


Captured = list[tuple[str, nn.Module, Tensor, Tensor]]  # path, layer, input, output
Rule = Callable[[Any, Tensor, Tensor, int], dict[str, Tensor]]  # layer, input, output gradient, rows -> gradients


def conv2d(layer: nn.Conv2d, a: Tensor, d: Tensor, rows: int) -> dict[str, Tensor]:
    """Return `[rows, *shape]` gradients of a convolution."""
    if layer.groups != 1 or layer.padding_mode != "zeros" or isinstance(layer.padding, str):
        raise UnsupportedError("grouped convolutions and unusual padding have no rule")
    d = d.reshape(rows, -1, layer.out_channels, d[0, 0].numel())
    # All pictures as the channels of one: a single kernel on GPU, where unfold otherwise loops over the batch.
    as_one = a.reshape(1, -1, *a.shape[2:])
    columns = F.unfold(as_one, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    columns = columns.view(rows, d.shape[1], -1, d.shape[3])
    if d.shape[1] == 1:
        weight = torch.bmm(d[:, 0], columns[:, 0].transpose(1, 2))
    else:
        weight = torch.einsum("nbol,nbcl->noc", d, columns)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": d.sum((1, 3))}


def linear(layer: nn.Linear, a: Tensor, d: Tensor, rows: int) -> dict[str, Tensor]:
    """Return `[rows, *shape]` gradients of a fully connected layer."""
    a, d = a.reshape(rows, -1, layer.in_features), d.reshape(rows, -1, layer.out_features)
    weight = torch.bmm(d.transpose(1, 2), a)
    return {"weight": weight} if layer.bias is None else {"weight": weight, "bias": d.sum(1)}


def affine(layer: Affine, a: Tensor, d: Tensor, rows: int) -> dict[str, Tensor]:
    """Return `[rows, channels]` gradients of a BatchNorm layer in evaluation mode."""
    a, d = (t.reshape(rows, -1, t.shape[1], t[0, 0].numel()) for t in (a, d))
    shift = d.sum((1, 3))
    return {"weight": layer.rstd * ((d * a).sum((1, 3)) - layer.mean * shift), "bias": shift}


def group_norm(layer: nn.GroupNorm, a: Tensor, d: Tensor, rows: int) -> dict[str, Tensor]:
    """Return `[rows, channels]` gradients of a GroupNorm layer."""
    a = F.group_norm(a, layer.num_groups, eps=layer.eps)
    a, d = (t.reshape(rows, -1, t.shape[1], t[0, 0].numel()) for t in (a, d))
    return {"weight": (d * a).sum((1, 3)), "bias": d.sum((1, 3))}


def layer_norm(layer: nn.LayerNorm, a: Tensor, d: Tensor, rows: int) -> dict[str, Tensor]:
    """Return `[rows, *shape]` gradients of a LayerNorm layer."""
    a = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    shape = (rows, -1, *layer.normalized_shape)
    return {"weight": (d * a).reshape(shape).sum(1), "bias": d.reshape(shape).sum(1)}


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: conv2d,
    nn.Linear: linear,
    Affine: affine,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
}


class Layered:
    """`self(x, y)` gives each row's gradient, flat, in the order of `names`; rows are batches of the same size.

    Holds its own copy of the model with frozen weights, so nothing outside changes. Raises `UnsupportedError` where a
    parameter belongs to a layer without a rule, or where BatchNorm mixes examples.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, names: list[str], statistics: bool) -> None:
        trainable = {name for name, p in model.named_parameters() if p.requires_grad}
        self.model = _frozen(model)
        self.loss_fn, self.names, self.statistics = loss_fn, names, statistics
        self.captured: Captured = []
        self.layers = {path: m for path, m in self.model.named_modules() if type(m) in RULES}
        covered = {f"{path}.{leaf}" if path else leaf for path in self.layers for leaf in ("weight", "bias")}
        odd = sorted(set(names) - covered) or sorted(set(names) - trainable)
        if odd:
            raise UnsupportedError(f"no rule covers {odd[0]}")
        for path, module in self.layers.items():
            module.register_forward_hook(self._capture(path))

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `[N, P]` gradients of candidates `x [N, B, ...]`, and `[N]` BatchNorm gaps if asked for."""
        rows, again = x.shape[0], torch.is_grad_enabled() and x.requires_grad
        self.captured = []
        with torch.enable_grad():
            if not again:
                x = x.detach().requires_grad_()
            loss = self.loss_fn(self.model(x.flatten(0, 1)), y.flatten(0, 1)) + auxiliary_loss(self.model)
            seen, self.captured = self.captured, []
            # The loss is a mean over all rows; times the number of rows it is the sum of their own means.
            outputs = [out for *_, out in seen]
            deltas = torch.autograd.grad(loss * rows, outputs, create_graph=again, materialize_grads=True)
        found: dict[str, Tensor] = {}
        for (path, module, a, _), d in zip(seen, deltas, strict=True):
            for leaf, g in RULES[type(module)](module, a, d, rows).items():
                name = f"{path}.{leaf}" if path else leaf
                found[name] = g if name not in found else found[name] + g
        gap = _gap(seen, rows) if self.statistics else None
        return torch.cat([found[name].flatten(1) for name in self.names], 1), gap

    def _capture(self, path: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.captured.append((path, module, args[0], out))

        return hook


def _gap(captured: Captured, rows: int) -> Tensor:
    gaps = [
        statistics_gap(a.reshape(rows, -1, *a.shape[1:]), m.mean, m.var)
        for _, m, a, _ in captured
        if isinstance(m, Affine)
    ]
    if not gaps:
        raise UnsupportedError("the model has no BatchNorm whose statistics could be matched")
    return torch.stack(gaps).sum(0)


def _frozen(model: nn.Module) -> nn.Module:
    """Return a copy whose weights take no gradient, whose BatchNorm is affine and which writes nothing in place."""
    model = copy.deepcopy(model).requires_grad_(False)
    for parent in list(model.modules()):
        if getattr(parent, "inplace", False):
            parent.inplace = False  # type: ignore[assignment]
        for name, child in list(parent.named_children()):
            if isinstance(child, _BatchNorm):
                if child.training:
                    raise UnsupportedError("BatchNorm in training mode mixes the examples of a batch")
                setattr(parent, name, Affine(child))
    return model
