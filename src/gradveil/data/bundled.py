"""Real pictures that arrive with scikit-learn and scikit-image and need no download."""

from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import ConfigError
from .dataset import Dataset, channel_statistics

CELL_ROWS = 3  # a photo is cut into this many rows of square cells; a cell is wholly train or wholly test
PHOTOS = (
    "astronaut",
    "chelsea",
    "coffee",
    "rocket",
    "retina",
    "hubble_deep_field",
    "immunohistochemistry",
    "stereo_motorcycle",
    "china",
    "flower",
)
FLAT = 12.0  # of 255: crops that vary less are empty sky, which a blind guesser gets right
TEST_EVERY = 5  # digits: each fifth one is a test picture


def load_digits(split: str) -> Dataset:
    """Return scikit-learn's 1797 handwritten digits, 8x8, one channel; each fifth one is a test picture."""
    from sklearn.datasets import load_digits as bundled_digits

    found = bundled_digits()
    images = torch.from_numpy(np.round(found.images * (255 / 16)).astype(np.uint8))[:, None]
    labels = torch.from_numpy(found.target.astype(np.int64))
    test = torch.arange(len(labels)) % TEST_EVERY == TEST_EVERY - 1
    chosen = {"train": ~test, "test": test, "all": torch.ones_like(test)}[split]
    mean, std = channel_statistics(images[~test])
    return Dataset("digits", images[chosen], labels[chosen], tuple(str(i) for i in range(10)), mean, std)


def load_photos(split: str, size: int = 32) -> Dataset:
    """Return square crops of the photos bundled with scikit-image and scikit-learn; each photo is a class.

    A photo is cut into square cells, three rows of them; every third cell along the diagonals is kept for testing. Of
    each cell come the whole and nine half-size crops (left out where smaller than `size`), scaled to `size`; crops
    without contrast are dropped. Whole cells come first and photos take turns, so the first pictures are all of
    different classes.

    Guarantees: the same pictures in the same order on every call; train and test share no pixel.
    """
    photos = dict(_photos())
    if not photos:
        raise ConfigError("no bundled photo was found: reinstall scikit-image and scikit-learn")
    crops = {part: [list(_crops(photo, part, size)) for photo in photos.values()] for part in ("train", "test")}
    train, test = (_in_turns(crops[part]) for part in ("train", "test"))
    chosen = {"train": train, "test": test, "all": train + test}[split]
    mean, std = channel_statistics(_stack(train)[0])
    images, labels = _stack(chosen)
    return Dataset("photos", images, labels, tuple(photos), mean, std)


Labelled = tuple[int, np.ndarray[Any, Any]]


def _photos() -> Iterator[tuple[str, Image.Image]]:
    for name in PHOTOS:
        try:
            yield name, Image.fromarray(np.ascontiguousarray(_photo(name)[..., :3]))
        except (OSError, ModuleNotFoundError, AttributeError):
            continue  # this version of the library lacks that photo or keeps it on the network: the others do


def _photo(name: str) -> np.ndarray[Any, Any]:
    import skimage.data
    from sklearn.datasets import load_sample_image

    if name in ("china", "flower"):
        sample: np.ndarray[Any, Any] = load_sample_image(f"{name}.jpg")
        return sample
    found = getattr(skimage.data, name)()
    photo: np.ndarray[Any, Any] = found[0] if isinstance(found, tuple) else found  # of a stereo pair the left one
    return photo


def _crops(photo: Image.Image, part: str, size: int) -> Iterator[np.ndarray[Any, Any]]:
    side = min(photo.size) // CELL_ROWS
    cells = [
        (column * side, row * side)
        for row in range(photo.height // side)
        for column in range(photo.width // side)
        if ((row + column) % 3 == 1) == (part == "test")
    ]
    boxes = [(x, y, side) for x, y in cells]
    if side // 2 >= size:
        shifts = [i * (side // 4) for i in range(3)]
        boxes += [(x + right, y + down, side // 2) for x, y in cells for down in shifts for right in shifts]
    for left, top, edge in boxes:
        # Cut before scaling: the filter would otherwise read beyond the box, out of a cell of the other split.
        square = photo.crop((left, top, left + edge, top + edge))
        crop = np.asarray(square.resize((size, size), Image.Resampling.BILINEAR))
        if crop.std(axis=(0, 1)).max() >= FLAT:
            yield crop


def _in_turns(per_class: list[list[np.ndarray[Any, Any]]]) -> list[Labelled]:
    labelled = [[(label, crop) for crop in crops] for label, crops in enumerate(per_class)]
    return [item for item in chain.from_iterable(zip_longest(*labelled)) if item is not None]


def _stack(items: list[Labelled]) -> tuple[torch.Tensor, torch.Tensor]:
    labels, images = zip(*items, strict=True)
    return torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous(), torch.tensor(labels)
