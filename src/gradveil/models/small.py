"""The small networks of the attack literature: LeNet (Zhu), CNN6 (R-GAP) and a two-layer perceptron."""

import math
from collections import OrderedDict

import torch
from torch import nn

from .. import check
from .inspect import evaluating

Shape = tuple[int, ...]


def lenet(num_classes: int, input_shape: Shape, init: str = "zhu") -> nn.Module:
    """LeNet of "Deep Leakage from Gradients" (Zhu et al. 2019): sigmoids, so that it is twice differentiable.

    `init="zhu"` draws all weights and biases from U(-0.5, 0.5), which the attack is known for; `"default"` is
    PyTorch's, which trains better.
    """
    check.one_of(("zhu", "default"), init=init)
    strides = (2, 2, 1)
    layers: list[nn.Module] = []
    for i, stride in enumerate(strides):
        layers += [nn.Conv2d(12 if i else input_shape[0], 12, 5, stride, padding=2), nn.Sigmoid()]
    model = classify(nn.Sequential(*layers), num_classes, input_shape)
    if init == "zhu":
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    return model


def cnn6(num_classes: int, input_shape: Shape) -> nn.Module:
    """CNN6 of "R-GAP" (Zhu and Blaschko 2021): six convolutions with LeakyReLU(0.2), no bias anywhere."""
    widths = (input_shape[0], 12, 36, 36, 36, 64, 128)
    kernels = ((4, 2, 2), (3, 2, 1), (3, 1, 1), (3, 1, 1), (3, 2, 1), (3, 1, 1))
    layers: list[nn.Module] = []
    for wide_in, wide_out, (size, stride, pad) in zip(widths[:-1], widths[1:], kernels, strict=True):
        layers += [nn.Conv2d(wide_in, wide_out, size, stride, pad, bias=False), nn.LeakyReLU(0.2)]
    return classify(nn.Sequential(*layers), num_classes, input_shape, bias=False)


def mlp(num_classes: int, input_shape: Shape, hidden: int = 256) -> nn.Module:
    """Two fully connected layers with biases: what the analytic attacks read pictures from."""
    check.at_least(1, hidden=hidden)
    features = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), hidden), nn.ReLU())
    return classify(features, num_classes, input_shape)


def classify(features: nn.Module, num_classes: int, input_shape: Shape, bias: bool = True) -> nn.Module:
    """Put one linear layer behind `features`, as wide as the features of one `input_shape` picture."""
    with evaluating(features), torch.no_grad():
        wide = features(torch.zeros(1, *input_shape)).numel()
    classifier = nn.Linear(wide, num_classes, bias=bias)
    return nn.Sequential(OrderedDict(features=features, flatten=nn.Flatten(), classifier=classifier))
