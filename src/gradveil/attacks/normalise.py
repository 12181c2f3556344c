"""Normalisation whose second derivative is right under vmap: torch's own is off by up to a percent (seen in 2.13)."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def in_plain_arithmetic(model: nn.Module) -> None:
    """Replace, in place, the layers that normalise by what they are given; hooks before them stay.

    Those are LayerNorm, and BatchNorm and InstanceNorm where they do not go by running statistics. Such statistics are
    left alone: nothing reads them, and vmap cannot write them.
    """
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # children that occur twice are replaced twice
            if isinstance(child, nn.LayerNorm):
                plain: Plain = OverLast(child, len(child.normalized_shape))
            elif isinstance(child, _NormBase) and (child.training or child.running_mean is None):
                plain = PerChannel(child, isinstance(child, _BatchNorm))
            else:
                continue
            plain._forward_pre_hooks = child._forward_pre_hooks
            setattr(parent, name, plain)


class Plain(nn.Module):
    """A normalisation written out; `weight` and `bias` keep their names."""

    eps: float

    def __init__(self, norm: nn.LayerNorm | _NormBase) -> None:
        super().__init__()
        self.eps = norm.eps
        self.weight: nn.Parameter | None = norm.weight
        self.bias: nn.Parameter | None = norm.bias

    def normalised(self, x: Tensor, axes: list[int], shape: tuple[int, ...]) -> Tensor:
        """Return the input normalised over some axes, scaled and shifted by what is broadcast as `shape`."""
        var, mean = torch.var_mean(x, axes, unbiased=False, keepdim=True)
        x = (x - mean) * torch.rsqrt(var + self.eps)
        x = x if self.weight is None else x * self.weight.view(shape)
        return x if self.bias is None else x + self.bias.view(shape)


class OverLast(Plain):
    """LayerNorm: over the last axes."""

    def __init__(self, norm: nn.LayerNorm, axes: int) -> None:
        super().__init__(norm)
        self.axes = axes

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        return self.normalised(x, list(range(-self.axes, 0)), tuple(x.shape[-self.axes :]))


class PerChannel(Plain):
    """BatchNorm over all examples and places of a channel, InstanceNorm over the places of one example."""

    def __init__(self, norm: _NormBase, over_examples: bool) -> None:
        super().__init__(norm)
        self.over_examples = over_examples

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalised input."""
        axes = [*([0] if self.over_examples else []), *range(2, x.dim())]
        return self.normalised(x, axes, (-1, *[1] * (x.dim() - 2)))
