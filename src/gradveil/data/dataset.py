"""A labelled set of pictures in memory."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..core import Batch

Indices = Sequence[int] | Tensor


@dataclass(frozen=True, eq=False)
class Dataset:
    """Pictures as bytes, with labels and the public constants that turn pixels into model inputs.

    Guarantees: `images` is uint8 `[N, C, H, W]`, `labels` is int64 `[N]` within `range(num_classes)`, `mean` and `std`
    have one entry per channel, and every `std` is above zero.
    """

    name: str
    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or not self.images.numel():
            raise ValueError(
                f"images must be uint8 [N, C, H, W] with N above 0, got {self.images.dtype} {tuple(self.images.shape)}"
            )
        if self.labels.dtype != torch.int64 or self.labels.shape != self.images.shape[:1]:
            raise ValueError(f"labels must be int64 [{len(self)}], got {self.labels.dtype} {tuple(self.labels.shape)}")
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.num_classes:
            raise ValueError(f"labels must lie in 0..{self.num_classes - 1}, got {low}..{high}")
        channels = self.input_shape[0]
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0:
            raise ValueError(f"mean and std need {channels} entries, std above 0, got {self.mean} and {self.std}")

    def __len__(self) -> int:
        return self.images.shape[0]

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of one picture."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    @property
    def num_classes(self) -> int:
        """How many classes there are, also those without a picture here."""
        return len(self.classes)

    @cached_property
    def digest(self) -> str:
        """The first 16 hex digits of a SHA-256 over pictures and labels: equal if and only if the data are."""
        found = hashlib.sha256(f"{tuple(self.images.shape)}".encode())
        for part in (self.images, self.labels):
            found.update(part.cpu().numpy().tobytes())
        return found.hexdigest()[:16]

    def pixels(self, indices: Indices) -> Tensor:
        """Return pictures as float `[n, C, H, W]` in 0..1."""
        return self.images[self._index(indices)].float() / 255

    def batch(self, indices: Indices, device: torch.device | str | None = None) -> Batch:
        """Return pictures and labels as a model takes them, on `device` (default: where the pictures are)."""
        index = self._index(indices)
        images, labels = self.images[index].to(device), self.labels[index].to(device)
        return Batch(normalise(images.float() / 255, self.mean, self.std), labels)

    def subset(self, indices: Indices) -> "Dataset":
        """Return the chosen pictures as a dataset with the same classes and normalisation."""
        index = self._index(indices)
        return replace(self, images=self.images[index], labels=self.labels[index])

    def to(self, device: torch.device | str) -> "Dataset":
        """Return the dataset with its pictures on `device`."""
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))

    def _index(self, indices: Indices) -> Tensor:
        return torch.as_tensor(indices, dtype=torch.int64).to(self.images.device)


def normalise(pixels: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return model inputs for pixels in 0..1."""
    return (pixels - _per_channel(mean, pixels)) / _per_channel(std, pixels)


def to_pixels(inputs: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Return the pixels of model inputs, clamped to 0..1, as every metric expects them.

    >>> to_pixels(torch.tensor([[[[-9.0, 0.0, 9.0]]]]), (0.5,), (0.25,))
    tensor([[[[0.0000, 0.5000, 1.0000]]]])
    """
    return (inputs * _per_channel(std, inputs) + _per_channel(mean, inputs)).clamp(0, 1)


def channel_statistics(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation per channel of uint8 pictures, on the 0..1 scale.

    A channel that never changes gets deviation 1, so that normalising stays defined.
    """
    pixels = images.double() / 255
    std = pixels.std(dim=(0, 2, 3), correction=0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    return tuple(pixels.mean(dim=(0, 2, 3)).tolist()), tuple(std.tolist())


def _per_channel(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(tuple(values), dtype=like.dtype, device=like.device).view(-1, 1, 1)
