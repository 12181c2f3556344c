"""VGG11 and ResNet18 as used on CIFAR: 3x3 first convolution, no early pooling, one linear head."""

from collections import OrderedDict

from torch import Tensor, nn

from .. import check
from .small import Shape, classify

POOL = 0
VGG11 = (64, POOL, 128, POOL, 256, 256, POOL, 512, 512, POOL, 512, 512, POOL)


def vgg11(num_classes: int, input_shape: Shape) -> nn.Module:
    """VGG11 with BatchNorm and convolution biases; a pool that would leave less than one pixel is left out."""
    channels, height, width = input_shape
    layers: list[nn.Module] = []
    for wide in VGG11:
        if wide != POOL:
            layers += [nn.Conv2d(channels, wide, 3, padding=1), nn.BatchNorm2d(wide), nn.ReLU()]
            channels = wide
        elif min(height, width) >= 2:
            layers.append(nn.MaxPool2d(2))
            height, width = height // 2, width // 2
    return classify(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1)), num_classes, input_shape)


def resnet18(num_classes: int, input_shape: Shape, init: str = "default") -> nn.Module:
    """ResNet18 with a global average before the head.

    `init` is "default" (torch's own) or "kaiming" (normal, fan-out: larger). It matters to attackers: with the smaller
    weights of the default a fresh network in evaluation mode is close to linear, and far easier to invert.
    """
    check.one_of(("default", "kaiming"), init=init)
    channels = input_shape[0]
    stem = nn.Sequential(nn.Conv2d(channels, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
    stages: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)
    wide_in = 64
    for i, (wide, stride) in enumerate(((64, 1), (128, 2), (256, 2), (512, 2)), start=1):
        stages[f"stage{i}"] = nn.Sequential(ResidualBlock(wide_in, wide, stride), ResidualBlock(wide, wide, 1))
        wide_in = wide
    stages["pool"] = nn.AdaptiveAvgPool2d(1)
    features = nn.Sequential(stages)
    for module in features.modules():
        if isinstance(module, nn.Conv2d) and init == "kaiming":
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return classify(features, num_classes, input_shape)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut; the shortcut is a 1x1 convolution where the shape changes."""

    def __init__(self, wide_in: int, wide_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(wide_in, wide_out, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(wide_out)
        self.conv2 = nn.Conv2d(wide_out, wide_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(wide_out)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or wide_in != wide_out:
            conv = nn.Conv2d(wide_in, wide_out, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(wide_out))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        out = self.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        summed: Tensor = self.relu(out + self.shortcut(x))
        return summed
