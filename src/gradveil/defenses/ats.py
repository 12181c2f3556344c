"""ATS: train on pictures transformed by a searched policy, so that what leaks is the transformed picture."""

import math
from dataclasses import dataclass

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

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        return dict(grads), state

    def prepare_batch(self, batch: Batch, step: Step) -> Batch:
        policies = parse_policy(self.policy)
        if not policies:
            return batch
        # Drawn in one go, so that a generator on a GPU is waited for once.
        count, longest = len(batch.inputs), max(map(len, policies))
        device = step.rng.device
        chosen = torch.randint(len(policies), (count,), generator=step.rng, device=device).tolist()
        signs = (2 * torch.randint(2, (count, longest), generator=step.rng, device=device) - 1).tolist()
        changed = [
            apply_policy(picture, policies[which], sign)
            for picture, which, sign in zip(self._to_pictures(batch.inputs), chosen, signs, strict=True)
        ]
        return Batch(self._to_inputs(changed, batch.inputs), batch.labels)

    def _to_pictures(self, inputs: Tensor) -> list[Image.Image]:
        if inputs.dim() != 4 or inputs.shape[1] not in (1, 3):
            raise ValueError(f"ats needs pictures [N, 1 or 3, H, W], got inputs of shape {tuple(inputs.shape)}")
        pixels = inputs.detach() * _per_channel(self.std, inputs) + _per_channel(self.mean, inputs)
        if pixels.numel() and not (pixels.min() >= -_TOLERANCE and pixels.max() <= 1 + _TOLERANCE):
            raise ValueError(
                f"with mean {self.mean} and std {self.std} the pixels lie in [{float(pixels.min()):.2f}, "
                f"{float(pixels.max()):.2f}] instead of [0, 1]: give ats the normalisation your data uses"
            )
        levels = (pixels.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        return [Image.fromarray(level.squeeze(2) if level.shape[2] == 1 else level) for level in levels]

    def _to_inputs(self, pictures: list[Image.Image], like: Tensor) -> Tensor:
        if not pictures:
            return like
        levels = np.stack([np.asarray(picture) for picture in pictures]).reshape(len(pictures), *like.shape[2:], -1)
        pixels = torch.from_numpy(levels).permute(0, 3, 1, 2).to(like.device, like.dtype) / 255
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


def _transform(picture: Image.Image, operation: str, level: int, sign: int) -> Image.Image:
    share = level / 9
    black: int | tuple[int, ...] = 0 if picture.mode == "L" else (0, 0, 0)
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
            return _ENHANCERS[operation](picture).enhance(1 + sign * 0.5 * share)
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


def _per_channel(values: tuple[float, ...], like: Tensor) -> Tensor:
    if len(values) not in (1, like.shape[1]):
        raise ValueError(f"ats has {len(values)} channels of normalisation, the pictures have {like.shape[1]}")
    return torch.tensor(values, dtype=like.dtype, device=like.device).view(1, -1, 1, 1)
