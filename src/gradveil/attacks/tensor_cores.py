"""Convolutions in float32 on tensor cores, which read eleven bits of a number: each number as the sum of two such.

`a b` is `high(a) high(b) + low(a) high(b) + high(a) low(b)`, laid out as one convolution with three times the channels.
What is left out, `low(a) low(b)`, is as small as float32's own rounding.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.backends import cudnn
from torch.nn.grad import conv2d_input

UNREAD = 13  # bits of a float32 that a tensor core does not read


class SplitConv2d(nn.Conv2d):
    """A convolution with frozen weights, differentiable in its input as often as asked."""

    def __init__(self, layer: nn.Conv2d) -> None:
        shape = (layer.kernel_size, layer.stride, layer.padding, layer.dilation)
        super().__init__(layer.in_channels, layer.out_channels, *shape, bias=False, device="meta")  # type: ignore[arg-type]
        self.weight, self.bias = layer.weight, layer.bias
        weight = layer.weight.detach()
        self.over_inputs, self.over_outputs = (_split(weight, along, of_weights=True) for along in (1, 0))

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output."""
        plan = _Plan(x.shape, self.over_inputs, self.over_outputs, self.stride, self.padding, self.dilation)
        out: Tensor = _There.apply(x, plan)  # type: ignore[no-untyped-call]
        return out if self.bias is None else out + self.bias.view(-1, 1, 1)


def splits(layer: nn.Conv2d) -> bool:
    """Say whether splitting makes this layer faster and is possible."""
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    weight = layer.weight
    fit = weight.is_cuda and weight.dtype == torch.float32 and torch.cuda.get_device_capability(weight.device) >= (8, 0)
    return plain and fit


class _Plan(NamedTuple):
    """What both directions of one convolution need."""

    shape: torch.Size  # of the input
    over_inputs: Tensor
    over_outputs: Tensor
    stride: Any
    padding: Any
    dilation: Any


class _There(torch.autograd.Function):
    """The convolution. It is linear, so the slope of each direction is the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        with _tensor_cores():
            return F.conv2d(_split(x, 1), plan.over_inputs, None, plan.stride, plan.padding, plan.dilation)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        return _Back.apply(given, ctx.plan), None  # type: ignore[no-untyped-call]


class _Back(torch.autograd.Function):
    """Its transpose."""

    @staticmethod
    def forward(ctx: Any, d: Tensor, plan: _Plan) -> Tensor:
        ctx.plan = plan
        how = plan.stride, plan.padding, plan.dilation
        with _tensor_cores():
            found: Tensor = conv2d_input(plan.shape, plan.over_outputs, _split(d, 1), *how)
        return found

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, None]:
        return _There.apply(given, ctx.plan), None  # type: ignore[no-untyped-call]


def _split(x: Tensor, along: int, of_weights: bool = False) -> Tensor:
    """Return the three factors of the products, one after the other along an axis."""
    read = high(x)
    rest = x - read
    return torch.cat([read, read, rest] if of_weights else [read, rest, read], along)


def high(x: Tensor) -> Tensor:
    """Return `x` rounded to the eleven bits that a tensor core reads.

    >>> float(high(torch.tensor(1 + 2**-10 + 2**-13))) == 1 + 2**-10
    True
    """
    bits = x.contiguous().view(torch.int32) + (1 << (UNREAD - 1))
    return bits.bitwise_and_(-1 << UNREAD).view(torch.float32)


def _tensor_cores() -> Any:
    return cudnn.flags(enabled=True, benchmark=True, allow_tf32=True)
