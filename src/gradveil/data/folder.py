"""Any folder of pictures."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ..errors import ConfigError
from .dataset import Dataset, channel_statistics

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm"})
TEST_EVERY = 5  # without train/ and test/ folders, each fifth picture of a class is a test picture


def load_folder(path: str | Path, split: str, size: int = 32) -> Dataset:
    """Return the pictures of a folder as RGB, cut to the centre square and scaled to `size`.

    Sub-folders are classes; a folder with pictures only is one class. Where `train/` and `test/` exist they are the
    splits; else each fifth picture of a class, in order of names, is a test picture. Normalisation constants come from
    the training pictures.
    """
    root = Path(path).expanduser()
    classes, train, test = _listing(root)
    chosen = {"train": train, "test": test, "all": train + test}[split]
    if not chosen:
        raise ConfigError(
            f"{root} gives no {split} picture: add at least {TEST_EVERY} pictures per class, or folders train and test"
        )
    images = _stack(chosen, size)
    mean, std = channel_statistics(images if split == "train" or not train else _stack(train, size))
    return Dataset(root.resolve().name, images, torch.tensor([label for _, label in chosen]), classes, mean, std)


Labelled = tuple[Path, int]


def _listing(root: Path) -> tuple[tuple[str, ...], list[Labelled], list[Labelled]]:
    if (root / "train").is_dir() and (root / "test").is_dir():
        found = {part: _by_class(root / part, root.resolve().name) for part in ("train", "test")}
        classes = sorted(found["train"].keys() | found["test"].keys())
        train, test = (
            [(file, classes.index(name)) for name, files in found[part].items() for file in files]
            for part in ("train", "test")
        )
        return tuple(classes), train, test
    by_class = _by_class(root, root.resolve().name)
    train, test = [], []
    for label, files in enumerate(by_class.values()):
        for i, file in enumerate(files):
            (test if i % TEST_EVERY == TEST_EVERY - 1 else train).append((file, label))
    return tuple(by_class), train, test


def _by_class(folder: Path, alone: str) -> dict[str, list[Path]]:
    """Return the pictures of each class; those of a folder without sub-folders are of the class `alone`."""
    groups = {child.name: _pictures(child) for child in sorted(folder.iterdir()) if child.is_dir()}
    groups = {name: files for name, files in groups.items() if files} or {alone: _pictures(folder)}
    if not any(groups.values()):
        raise ConfigError(f"{folder} holds no picture ({', '.join(sorted(SUFFIXES))})")
    return groups


def _pictures(folder: Path) -> list[Path]:
    return sorted(f for f in folder.iterdir() if f.suffix.lower() in SUFFIXES and f.is_file())


def _stack(files: list[Labelled], size: int) -> Tensor:
    return torch.stack([read_picture(file, size) for file, _ in files])


def read_picture(path: Path, size: int) -> Tensor:
    """Return one picture as uint8 `[3, size, size]`: turned upright, cut to the centre square, scaled."""
    try:
        with Image.open(path) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith("I"):  # 16 bits per pixel: keep the upper eight
                image = Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
            square = ImageOps.fit(image.convert("RGB"), (size, size), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ConfigError(f"cannot read the picture {path}: {error}") from error
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()
