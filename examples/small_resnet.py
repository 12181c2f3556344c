"""A residual network with BatchNorm that a CPU trains in minutes.

PYTHONPATH=examples gradveil train --model small_resnet:build --data cifar10 ...
"""

from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.body(x)
        return out.relu()


def _down(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


def build(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a network of six convolutions at 16x16 and 8x8 places: 28,698 parameters with ten classes."""
    body = [_down(input_shape[0], 16), Block(16), _down(16, 32), Block(32), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(32, num_classes))
