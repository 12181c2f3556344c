"""The networks that only training needs: the encoder and the discriminator."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from .network import EMBEDDING, Generator


class Bounded(nn.Module):
    """Divides a weight by its spectral norm, estimated by one power iteration per use.

    As `torch.nn.utils.parametrizations.spectral_norm`, but in full precision inside autocast, where that one fails.
    """

    left: Tensor

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.register_buffer("left", F.normalize(torch.randn(rows), dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        """Return the weight with spectral norm about 1."""
        with torch.autocast(weight.device.type, enabled=False):
            matrix = weight.flatten(1)
            with torch.no_grad():
                right = F.normalize(matrix.T @ self.left, dim=0)
                left = F.normalize(matrix @ right, dim=0)
                if self.training:
                    self.left.copy_(left)
            return weight / (left @ (matrix @ right))


def bounded(module: nn.Module) -> nn.Module:
    """Return the module with its weight divided by its spectral norm."""
    register_parametrization(module, "weight", Bounded(len(cast(Tensor, module.weight))))
    return module


def tower(channels: int, width: int, normalised: bool) -> nn.Sequential:
    """Return convolutions that halve the side three times, from pictures to `4 * width` channels."""
    layers: list[nn.Module] = []
    wide_in = channels
    for wide in (width, 2 * width, 4 * width):
        for size, stride in ((3, 1), (4, 2)):
            conv = nn.Conv2d(wide_in, wide, size, stride, padding=1)
            layers += [bounded(conv) if normalised else conv, nn.LeakyReLU(0.2)]
            wide_in = wide
    return nn.Sequential(*layers)


def tower_width(like: Generator) -> int:
    """Return the width of a tower that has about as much to compute as the generator."""
    return 2 * like.width // 3


class Encoder(nn.Module):
    """Gives mean and log-variance of the latent of a picture."""

    def __init__(self, like: Generator) -> None:
        super().__init__()
        (channels, side, _), width = like.shape, tower_width(like)
        self.tower = tower(channels, width, normalised=False)
        self.embed = nn.Embedding(like.num_classes, EMBEDDING)
        self.head = nn.Linear(4 * width * (side // 8) ** 2 + EMBEDDING, 2 * like.latent)

    def forward(self, pictures: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        """Return two `[N, latent]`."""
        features = torch.cat([self.tower(2 * pictures - 1).flatten(1), self.embed(label)], 1)
        mean, log_var = self.head(features).float().chunk(2, 1)
        return mean, log_var.clamp(-8, 4)


class Discriminator(nn.Module):
    """Gives a score, high for pictures that look real for their class."""

    def __init__(self, like: Generator) -> None:
        super().__init__()
        width = tower_width(like)
        self.tower = tower(like.shape[0], width, normalised=True)
        self.embed = bounded(nn.Embedding(like.num_classes, 4 * width))
        self.head = bounded(nn.Linear(4 * width, 1))

    def forward(self, pictures: Tensor, label: Tensor) -> Tensor:
        """Return `[N]`."""
        features = self.tower(2 * pictures - 1).sum((2, 3))
        score: Tensor = (self.head(features)[:, 0] + (features * self.embed(label)).sum(1)).float()
        return score
