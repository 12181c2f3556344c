"""CIFAR-10 and CIFAR-100 in the official binary layout."""

import os
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .dataset import Dataset
from .download import cache_folder, download_folder

PIXELS = 3 * 32 * 32
SIZES = {"train": 50_000, "test": 10_000}  # pictures in the splits as published, of both sets


@dataclass(frozen=True)
class Layout:
    """Where a CIFAR set comes from and how its records are built: label bytes, then red, green and blue planes."""

    title: str
    folder: str
    url: str
    sha256: str
    train: tuple[str, ...]
    test: tuple[str, ...]
    label_names: str
    label_bytes: int  # the last one is the class
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    digests: Mapping[str, str] = field(default_factory=dict)  # of the original splits, where known


LAYOUTS = {
    "cifar10": Layout(
        title="CIFAR-10",
        folder="cifar-10-batches-bin",
        url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        train=tuple(f"data_batch_{i}.bin" for i in range(1, 6)),
        test=("test_batch.bin",),
        label_names="batches.meta.txt",
        label_bytes=1,
        num_classes=10,
        mean=(0.4914672374725342, 0.4822617471218109, 0.4467701315879822),
        std=(0.24703224003314972, 0.24348513782024384, 0.26158785820007324),
        digests={"train": "f3120a8fa253dbda", "test": "815bee49b92162b0"},
    ),
    "cifar100": Layout(
        title="CIFAR-100",
        folder="cifar-100-binary",
        url="https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        sha256="58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        train=("train.bin",),
        test=("test.bin",),
        label_names="fine_label_names.txt",
        label_bytes=2,
        num_classes=100,
        mean=(0.5071598291397095, 0.4866936206817627, 0.44120192527770996),
        std=(0.2673342823982239, 0.2564384639263153, 0.2761504650115967),
    ),
}


def load_cifar(name: str, split: str, root: str | Path | None = None) -> Dataset:
    """Return a split of `cifar10` or `cifar100`, downloaded first if it is nowhere to be found."""
    layout = LAYOUTS[name]
    folder = find_folder(layout, root) or _fetch(name, layout, root)
    files = {"train": layout.train, "test": layout.test, "all": layout.train + layout.test}[split]
    parts = [_read(folder / file, layout) for file in files]
    images, labels = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Dataset(name, images, labels, _class_names(folder / layout.label_names, layout), layout.mean, layout.std)


def is_original(name: str, digests: Mapping[str, str]) -> bool:
    """Say whether splits with these digests hold the pictures as published; True for sets whose digests are unknown.

    Copies that went through JPEG or came in another order are about: a figure on one is not a figure on the other.
    """
    layout = LAYOUTS.get(name)
    return layout is None or not layout.digests or (bool(digests) and digests.items() <= layout.digests.items())


def find_folder(layout: Layout, root: str | Path | None) -> Path | None:
    """Return the set's folder in `root`; without a root in `$GRADVEIL_DATA`, `./local` or `~/.cache/gradveil`."""
    for place in _places(root):
        for folder in (place / layout.folder, place):
            if (folder / layout.test[0]).is_file():
                return folder
    return None


def _places(root: str | Path | None) -> list[Path]:
    if root is not None:
        return [Path(root).expanduser()]
    chosen = os.environ.get("GRADVEIL_DATA")
    named = [Path(chosen).expanduser()] if chosen else []
    return [*named, Path("local"), Path.home() / ".cache" / "gradveil"]


def _fetch(name: str, layout: Layout, root: str | Path | None) -> Path:
    target = Path(root).expanduser() if root is not None else cache_folder()
    try:
        return download_folder(layout.url, target, layout.folder, layout.sha256)
    except (OSError, tarfile.TarError) as error:
        raise ConfigError(
            f"{name} was not found and {layout.url} could not be downloaded ({error}): "
            f"put the unpacked folder {layout.folder} into {target}"
        ) from error


def _read(path: Path, layout: Layout) -> tuple[Tensor, Tensor]:
    try:
        raw = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    size = layout.label_bytes + PIXELS
    if not raw.size or raw.size % size:
        raise ConfigError(f"{path} is damaged: {raw.size} bytes are not a whole number of {size}-byte records")
    records = torch.from_numpy(raw).view(-1, size)
    labels = records[:, layout.label_bytes - 1].long()
    if bool((wrong := labels >= layout.num_classes).any()):
        first = int(wrong.nonzero()[0])
        raise ConfigError(
            f"{path} is damaged: record {first} has label {int(labels[first])}, expected 0..{layout.num_classes - 1}"
        )
    return records[:, layout.label_bytes :].reshape(-1, 3, 32, 32), labels


def _class_names(path: Path, layout: Layout) -> tuple[str, ...]:
    try:
        names = tuple(path.read_text(encoding="utf-8").split())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the class names in {path}: {error}") from error
    if len(names) != layout.num_classes:
        raise ConfigError(f"{path} lists {len(names)} class names, expected {layout.num_classes}")
    return names
