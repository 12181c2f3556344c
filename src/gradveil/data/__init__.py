"""Datasets by name or path, and their partitions among users."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check
from ..errors import ConfigError
from .bundled import load_digits, load_photos
from .cifar import LAYOUTS, is_original, load_cifar
from .dataset import Dataset, channel_statistics, normalise, to_pixels
from .folder import load_folder
from .partition import partition_dirichlet, partition_iid

Split = Literal["train", "test", "all"]
NAMES = (*LAYOUTS, "digits", "photos")
LUMINANCE = (0.299, 0.587, 0.114)  # of red, green and blue


def load(
    name_or_path: str | Path,
    *,
    split: Split = "train",
    root: str | Path | None = None,
    size: int | None = None,
    grey: bool | None = None,
) -> Dataset:
    """Return a dataset: `cifar10`, `cifar100`, `digits`, `photos`, or any folder of pictures.

    Args:
        name_or_path: A known name, or a folder whose sub-folders are classes.
        split: Which part; `all` is both.
        root: Where CIFAR lies or is downloaded to; by default `$GRADVEIL_DATA`, `./local` and `~/.cache/gradveil`
            are searched.
        size: Side of the pictures in pixels (default: CIFAR 32, digits 8, photos and folders 32).
        grey: True for one channel, False for three; by default as the pictures are.

    >>> digits = load("digits", split="test", size=16)
    >>> digits.input_shape, digits.num_classes
    ((1, 16, 16), 10)
    """
    check.one_of(("train", "test", "all"), split=split)
    if size is not None:
        check.at_least(1, size=size)
    name = str(name_or_path)
    if name in LAYOUTS:
        found = load_cifar(name, split, root)
    elif name == "digits":
        found = load_digits(split)
    elif name == "photos":
        found = load_photos(split, size or 32)
    elif Path(name).expanduser().is_dir():
        found = load_folder(name, split, size or 32)
    else:
        raise ConfigError(f"{name} is neither a folder of pictures nor one of {', '.join(NAMES)}")
    return _reshape(found, size or found.input_shape[1], grey)


def _reshape(data: Dataset, size: int, grey: bool | None) -> Dataset:
    images, mean, std = data.images, data.mean, data.std
    if images.shape[-2:] != (size, size):
        images = _to_bytes(F.interpolate(images.float(), (size, size), mode="bilinear", antialias=True))
    if grey is True and images.shape[1] == 3:
        images = _to_bytes((images.float() * torch.tensor(LUMINANCE).view(1, 3, 1, 1)).sum(1, keepdim=True))
        # From the constants, not from these pictures: every split must have the same (exact if channels move together).
        mean, std = ((sum(w * v for w, v in zip(LUMINANCE, values, strict=True)),) for values in (mean, std))
    elif grey is False and images.shape[1] == 1:
        images, mean, std = images.expand(-1, 3, -1, -1).contiguous(), mean * 3, std * 3
    return replace(data, images=images, mean=mean, std=std)


def _to_bytes(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


__all__ = [
    "NAMES",
    "Dataset",
    "Split",
    "channel_statistics",
    "is_original",
    "load",
    "normalise",
    "partition_dirichlet",
    "partition_iid",
    "to_pixels",
]
