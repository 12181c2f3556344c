"""ATS: train on pictures transformed by a searched policy, so that what leaks is the transformed picture."""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from .. import check
from ..core import Batch, Defense, Grads, State, Step

# The published list, "operation level" with levels 0..9, five to a line; a policy names its entries by index.
_LISTED = """
    invert 7, contrast 6, rotate 2, translate_x 9, sharpness 1,
    sharpness 3, shear_y 2, translate_y 2, autocontrast 5, equalize 2,
    shear_y 5, posterize 5, color 3, brightness 5, sharpness 9,
    brightness 9, equalize 5, equalize 1, contrast 7, sharpness 5,
    color 5, translate_x 5, equalize 7, autocontrast 8, translate_y 3,
    sharpness 6, brightness 6, color 8, solarize 0, invert 0,
    equalize 0, autocontrast 0, equalize 8, equalize 4, color 5,
    equalize 5, autocontrast 4, solarize 4, brightness 3, color 0,
    solarize 1, autocontrast 0, translate_y 3, translate_y 3, autocontrast 1,
    solarize 1, equalize 5, invert 0, translate_y 3, autocontrast 1
"""
TRANSFORMATIONS = tuple((name, int(level)) for name, level in (entry.split() for entry in _LISTED.split(",")))
_ENHANCERS = {
    "color": ImageEnhance.Color,
    "contrast": ImageEnhance.Contrast,
    "sharpness": ImageEnhance.Sharpness,
    "brightness": ImageEnhance.Brightness,
}
_BATCHED = {"translate_x", "translate_y", "contrast"}  # `apply_to_batch` knows these
_GREY = {1: (1 << 16,), 3: (19595, 38470, 7471)}  # Pillow's weights of the channels in a grey picture, of 2^16
_SMALL = 64 * 64  # pixels of a picture; beyond, a CPU is faster with Pillow
_TOLERANCE = 0.01  # of the pixel range: rounding of the normalisation, far below a wrong mean or std


@dataclass(frozen=True)
class ATS(Defense):
    """Transform every picture before the forward pass; the gradient itself is sent as it is.

    `policy` lists transformations by index, applied in order: "3-1-7". Several policies joined by "+" are drawn from
    uniformly, picture by picture; the empty text changes nothing. Published: "3-1-7" and "43-18-18" (searched on a
    wide ResNet20, the default is both), "21-13-3" and "7-4-15" (searched on a ConvNet, used here for LeNet and CNN6).
    Pixels are 8 bits wide, so the public normalisation is needed: model input = (pixels - mean) / std.

    Does not guarantee that an attack gets worse: the transformed picture is recovered as well as any other. It
    guarantees only that the raw picture did not take part. Random crops and flips belong to training, not to this.

    Compose: anywhere; `prepare_batch` acts before the gradient exists, inside ErrorFeedback too.

    Reference: Gao et al., "Privacy-preserving Collaborative Learning with Automatic Transformation Search".
    """

    policy: str = "3-1-7+43-18-18"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        if len(self.mean) != len(self.std) or not self.mean:
            raise ValueError(f"mean and std must have one entry per channel, got {self.mean} and {self.std}")
        for value in self.std:
            check.positive(std=value)

    def fitted(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "ATS":
        return replace(self, mean=mean, std=std) if (self.mean, self.std) == ((0.0,), (1.0,)) else self

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return dict(grads), state

    def prepare_batch(self, batch: Batch, step: Step) -> Batch:
        policies = parse_policy(self.policy)
        if not policies or not batch.inputs.numel():
            return batch
        count, longest, device = len(batch.inputs), max(map(len, policies)), step.rng.device
        chosen = torch.randint(len(policies), (count,), generator=step.rng, device=device)
        signs = torch.randint(2, (count, longest), generator=step.rng, device=device)
        pixels = self._to_pixels(batch.inputs)
        levels = (pixels.clamp(0, 1) * 255).round().byte()
        known = all(TRANSFORMATIONS[index][0] in _BATCHED for policy in policies for index in policy)
        if known and (levels.device.type != "cpu" or levels[0, 0].numel() <= _SMALL):
            levels = apply_to_batch(levels, policies, (2 * chosen[:, None] + signs).to(levels.device))
        else:
            levels = _one_by_one(levels, [policies[which] for which in chosen.tolist()], (2 * signs - 1).tolist())
        inputs = self._to_inputs(levels, batch.inputs)
        self._require_range(pixels)  # last: the answer waits for the GPU, which has all its work by now
        return Batch(inputs, batch.labels)

    def _to_pixels(self, inputs: Tensor) -> Tensor:
        if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
            raise ValueError(f"ats needs pictures [N, 1 or 3, H, W], got inputs of shape {tuple(inputs.shape)}")
        return inputs.detach() * _per_channel(self.std, inputs) + _per_channel(self.mean, inputs)

    def _require_range(self, pixels: Tensor) -> None:
        low, high = pixels.aminmax()
        if not (low >= -_TOLERANCE) & (high <= 1 + _TOLERANCE):
            raise ValueError(
                f"with mean {self.mean} and std {self.std} the pixels lie in [{float(low):.2f}, {float(high):.2f}] "
                "instead of [0, 1]: give ats the normalisation your data uses"
            )

    def _to_inputs(self, levels: Tensor, like: Tensor) -> Tensor:
        # The layout of a decoded picture, whichever way the levels came: a network rounds differently with another.
        pixels = levels.to(like.device, like.dtype, memory_format=torch.channels_last) / 255
        return (pixels - _per_channel(self.mean, like)) / _per_channel(self.std, like)


def parse_policy(text: str) -> tuple[tuple[int, ...], ...]:
    """Return the policies of a text such as `3-1-7+43-18-18`.

    >>> parse_policy("3-1-7+43-18-18"), parse_policy("")
    (((3, 1, 7), (43, 18, 18)), ())
    """
    if not text:
        return ()
    try:
        policies = tuple(tuple(int(index) for index in part.split("-")) for part in text.split("+"))
    except ValueError as error:
        raise ValueError(f"policy must look like 3-1-7 or 3-1-7+43-18-18, got {text!r}") from error
    beyond = [index for policy in policies for index in policy if index >= len(TRANSFORMATIONS)]
    if beyond:
        raise ValueError(f"policy index must be below {len(TRANSFORMATIONS)}, got {beyond[0]} in {text!r}")
    return policies


def apply_policy(picture: Image.Image, policy: tuple[int, ...], signs: list[int]) -> Image.Image:
    """Apply the transformations with these indices in order; each sign is +1 or -1."""
    for index, sign in zip(policy, signs, strict=False):
        picture = _transform(picture, *TRANSFORMATIONS[index], sign)
    return picture


def apply_to_batch(levels: Tensor, policies: tuple[tuple[int, ...], ...], rows: Tensor) -> Tensor:
    """Do to 8-bit pictures `[N, C, H, W]` exactly what `apply_policy` does, without waiting for a GPU.

    `rows` `[N, longest policy]` holds 2 * policy, plus 1 where the sign is +1. Knows shifts and contrast only.
    """
    height, width = levels.shape[2:]
    for position, operation, table in _tables(policies, height, width, levels.device):
        row = rows[:, position]
        if operation == "contrast":
            weights = _constant(_GREY[levels.shape[1]], torch.int32, levels.device)
            grey = ((levels * weights).sum(1, dtype=torch.int32) + (1 << 15)) >> 16
            mean = (grey.sum((1, 2)) + height * width // 2) // (height * width)
            levels = table[row, mean].gather(1, levels.flatten(1).long()).view(levels.shape)
        else:
            source = table[row]
            along = 3 if operation == "translate_x" else 2
            levels = levels.gather(along, source.clamp(min=0).expand(levels.shape)) * (source >= 0)
    return levels


@lru_cache(maxsize=16)
def _tables(
    policies: tuple[tuple[int, ...], ...], height: int, width: int, device: torch.device
) -> list[tuple[int, str, Tensor]]:
    """Return the operations of each position; the table of one has a row for every policy and sign.

    Pillow fills the tables, so that its rounding is met on every machine. Policies that do something else at this
    position get level 0, which changes nothing.
    """
    found = []
    for position, indices in enumerate(zip_longest(*policies)):
        steps = [("", 0) if index is None else TRANSFORMATIONS[index] for index in indices]
        for operation in sorted({name for name, _ in steps if name}):
            levels = [level if name == operation else 0 for name, level in steps]
            rows = [_table(operation, level, sign, height, width) for level in levels for sign in (-1, 1)]
            found.append((position, operation, torch.from_numpy(np.stack(rows)).to(device)))
    return found


def _table(operation: str, level: int, sign: int, height: int, width: int) -> "np.ndarray[Any, Any]":
    """Return the new level by mean and old level, or where each row or column comes from, -1 for black."""
    if operation == "contrast":
        old = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
        return np.asarray(Image.blend(Image.fromarray(old.T.copy()), Image.fromarray(old), _factor(level, sign)))
    shape = (1, width) if operation == "translate_x" else (height, 1)
    line = Image.fromarray(np.arange(1, max(shape) + 1, dtype=np.int32).reshape(shape))
    return np.asarray(_transform(line, operation, level, sign), dtype=np.int64)[None] - 1


def _one_by_one(levels: Tensor, policies: list[tuple[int, ...]], signs: list[list[int]]) -> Tensor:
    arrays = levels.permute(0, 2, 3, 1).cpu().numpy()
    pictures = [Image.fromarray(array.squeeze(2) if array.shape[2] == 1 else array) for array in arrays]
    changed = [np.asarray(apply_policy(*each)) for each in zip(pictures, policies, signs, strict=True)]
    return torch.from_numpy(np.stack(changed).reshape(arrays.shape)).permute(0, 3, 1, 2)


def _transform(picture: Image.Image, operation: str, level: int, sign: int) -> Image.Image:
    share = level / 9
    black: int | tuple[int, ...] = (0, 0, 0) if picture.mode == "RGB" else 0
    match operation:
        case "shear_y":
            matrix = (1.0, 0.0, 0.0, sign * 0.3 * share, 1.0, 0.0)
            method, how = Image.Transform.AFFINE, Image.Resampling.BICUBIC
            return picture.transform(picture.size, method, matrix, how, fillcolor=black)
        case "translate_x" | "translate_y":
            along_x = operation == "translate_x"
            shift = sign * (150 / 331) * share * picture.size[0 if along_x else 1]
            matrix = (1.0, 0.0, shift if along_x else 0.0, 0.0, 1.0, 0.0 if along_x else shift)
            return picture.transform(picture.size, Image.Transform.AFFINE, matrix, fillcolor=black)
        case "rotate":
            return picture.rotate(30 * share, fillcolor=128 if picture.mode == "L" else (128, 128, 128))
        case "color" | "contrast" | "sharpness" | "brightness":
            return _ENHANCERS[operation](picture).enhance(_factor(level, sign))
        case "posterize":
            return ImageOps.posterize(picture, round(8 - 4 * share))
        case "solarize":
            return ImageOps.solarize(picture, math.ceil(256 - 256 * share))
        case "autocontrast":
            return ImageOps.autocontrast(picture)
        case "equalize":
            return ImageOps.equalize(picture)
        case _:
            return ImageOps.invert(picture)


def _factor(level: int, sign: int) -> float:
    return 1 + sign * 0.5 * (level / 9)


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    if len(values) not in (1, like.shape[1]):
        raise ValueError(f"ats has {len(values)} channels of normalisation, the pictures have {like.shape[1]}")
    return _constant(tuple(map(float, values)), like.dtype, like.device)


@lru_cache(maxsize=64)  # sending even three numbers to a GPU waits for it
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).view(1, -1, 1, 1)
