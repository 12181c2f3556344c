"""The linear equations of one convolution, for R-GAP: what its input must be, given its output and its gradient."""

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_input


class Stage(NamedTuple):
    """One convolution of the chain, with the slope of the LeakyReLU behind it and the shape of its input."""

    name: str
    conv: nn.Conv2d
    slope: float
    takes: tuple[int, ...]


RIDGE = 1e-14  # of the diagonal: Cholesky must not fail for a rounding error
FAINT, TINY = 1e-6, 1e-30  # of the diagonal, and where it is zero: a slope that no equation holds stays as it is


def solve(
    stage: Stage, after: Tensor, known: Tensor, slopes: Tensor, pull: Tensor, gradient: Tensor, sent: Tensor
) -> tuple[Tensor, float]:
    """Return the input `[1, C, H, W]` that fits the layer's equations best, and their relative misfit.

    Weight equations count where the output `after` is `known`, gradient equations where the entry was `sent`. Each of
    these involves every position, so they are as good as the `slopes` of the LeakyReLU behind all outputs.
    """
    z = torch.where(after >= 0, after, after / stage.slope)
    kernel = gradient_kernel(stage, pull * slopes)  # [F * k * k, H * W], the same for every input channel
    rows = gradient.movedim(1, 0).flatten(1)  # [C, F * k * k]
    used = sent.movedim(1, 0).flatten(1).to(z.dtype)
    weight = known.to(z.dtype)
    normal = weight_normal(stage, weight)
    blocks = torch.einsum("rp,cr,rq->cpq", kernel, used, kernel)
    balance = normal.diagonal().mean() / blocks.diagonal(dim1=1, dim2=2).mean().clamp_min(1e-300)
    pixels = kernel.shape[1]
    for channel, block in enumerate(blocks):
        part = slice(channel * pixels, (channel + 1) * pixels)
        normal[part, part] += balance * block
    normal.diagonal().mul_(1 + RIDGE)
    factor, _ = torch.linalg.cholesky_ex(normal)

    def pulled(miss_z: Tensor, miss_g: Tensor) -> Tensor:
        return conv_transpose(stage, weight * miss_z).flatten() + balance * ((used * miss_g) @ kernel).flatten()

    x = z.new_zeros(1, *stage.takes)
    for _ in range(3):  # iterative refinement: the normal equations square the condition number
        miss_z, miss_g = z - apply(stage, x), rows - x.view(len(rows), -1) @ kernel.T
        x = x + torch.cholesky_solve(pulled(miss_z, miss_g)[:, None], factor).view_as(x)
    miss_z, miss_g = weight * (z - apply(stage, x)), used * (rows - x.view(len(rows), -1) @ kernel.T)
    total = (weight * z).square().sum() + balance * (used * rows).square().sum()
    return x, float((miss_z.square().sum() + balance * miss_g.square().sum()) / total.clamp_min(1e-300)) ** 0.5


def slopes_of(stage: Stage, outputs: Tensor) -> Tensor:
    """Return the slope of the LeakyReLU at each output."""
    return torch.where(outputs >= 0, 1.0, stage.slope).to(outputs.dtype)


def fitting_slopes(
    stage: Stage, x: Tensor, slopes: Tensor, known: Tensor, pull: Tensor, gradient: Tensor, sent: Tensor
) -> Tensor:
    """Return the slopes at outputs that are not `known` which fit the gradient equations best for the input `x`."""
    conv = stage.conv
    patches = F.unfold(x, conv.kernel_size, 1, cast(tuple[int, ...], conv.padding), conv.stride)[0]  # [C * k * k, P]
    rows, free = sent.flatten(1).to(x.dtype), (~known[0]).flatten(1).to(x.dtype)  # [F, C * k * k], [F, P]
    force, found = pull[0].flatten(1), slopes[0].flatten(1)
    # One small system for each filter: the equations of its own weights, the slopes of its own outputs.
    scaled = patches[None] * (force * free)[:, None, :]
    miss = rows * (gradient.flatten(1) - (force * found) @ patches.T)
    normal = torch.einsum("frp,fr,frq->fpq", scaled, rows, scaled)
    size = normal.diagonal(dim1=1, dim2=2).mean(1)
    fixed = torch.diag_embed(FAINT * size[:, None] + (1 - free) + TINY)  # a known slope stays
    change: Tensor = torch.linalg.solve(normal + fixed, torch.einsum("frp,fr->fp", scaled, miss))
    fitted: Tensor = (found + change * free).clamp(stage.slope, 1.0)
    return fitted.view_as(slopes)


def weight_normal(stage: Stage, weight: Tensor) -> Tensor:
    """Return the dense matrix of the weighted equations `W x = z` in normal form, `[n, n]` for n inputs.

    Built patch by patch: each output position adds one small block, the same for all where every weight is 1.
    """
    conv, count = stage.conv, math.prod(stage.takes)
    filters = conv.weight.detach().to(weight.dtype).flatten(1)
    numbered = torch.arange(1, count + 1, dtype=torch.float64, device=weight.device).view(1, *stage.takes)
    padding = cast(tuple[int, ...], conv.padding)  # `chain` refuses the named kinds
    patches = F.unfold(numbered, conv.kernel_size, 1, padding, conv.stride)[0].long() - 1  # [C * k * k, positions]
    out = weight.new_zeros(count, count)
    whole, uniform = filters.T @ filters, bool((weight == 1).all())
    for position, mask in zip(patches.T, weight[0].flatten(1).T, strict=True):
        block = whole if uniform else filters.T @ (mask[:, None] * filters)
        inside = position >= 0
        index = position[inside]
        out[index[:, None], index[None]] += block[inside][:, inside]
    return out


def gradient_kernel(stage: Stage, pull: Tensor) -> Tensor:
    """Return the matrix that maps one input channel to its weight gradients, `[F * k * k, H * W]`."""
    height, width = stage.takes[1:]
    unit = torch.eye(height * width, dtype=pull.dtype, device=pull.device).view(-1, 1, height, width)
    conv = stage.conv
    seen = F.conv2d(unit, pull[0][:, None], padding=conv.padding, dilation=conv.stride)
    rows, columns = conv.kernel_size[0], conv.kernel_size[1]
    return seen[:, :, :rows, :columns].flatten(1).T.contiguous()


def apply(stage: Stage, x: Tensor) -> Tensor:
    """Return the convolution of `x`, in its precision."""
    conv = stage.conv
    return F.conv2d(x, conv.weight.detach().to(x.dtype), None, conv.stride, conv.padding)


def conv_transpose(stage: Stage, y: Tensor) -> Tensor:
    """Return the transposed convolution: the gradient at the input for the gradient `y` at the output."""
    conv = stage.conv
    size = (len(y), *stage.takes)
    back: Tensor = conv2d_input(size, conv.weight.detach().to(y.dtype), y, conv.stride, conv.padding)
    return back


def features_of(stages: list[Stage], x: Tensor) -> Tensor:
    """Return what the classifier receives for the input `x`."""
    for stage in stages:
        x = F.leaky_relu(apply(stage, x), stage.slope)
    return x


def output_shape(stage: Stage) -> tuple[int, ...]:
    """Return the shape of one output of a stage, with a leading 1."""
    like = stage.conv.weight
    return tuple(apply(stage, torch.zeros(1, *stage.takes, dtype=like.dtype, device=like.device)).shape)
