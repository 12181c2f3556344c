"""Every picture against every other: the matrices behind pairing and identification.

They hold the same numbers as the scores of `images` and `perceptual`, but do per picture what needs no partner: a batch
of 64 against 1000 candidates is 64,000 pairs.
"""

import torch
from torch import Tensor

from .images import similarity, ssim_window
from .perceptual import CHUNK, embed, lpips_weights

SAME = (0.5 / 255) ** 2  # mean squared error below which two pictures are one, but for rounding to bytes
VALUES = 2**22  # numbers in the largest tensor held at once


def pairwise_mse(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean squared error of each `a[i]` against each `b[j]` as `[len(a), len(b)]`."""
    return _squared_distances(a.flatten(1), b.flatten(1)) / a[0].numel()


def same_picture(a: Tensor, b: Tensor) -> Tensor:
    """Say of each `a[i]` and each `b[j]` whether they are copies of one picture, as bool `[len(a), len(b)]`."""
    return pairwise_mse(a, b) < SAME


def pairwise_ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the SSIM of each `a[i]` against each `b[j]` as `[len(a), len(b)]`."""
    a, b = a.double(), b.double()  # `ssim` says why; a product of matrices is fast in float64 on CPUs too
    down, across = (_gaussian_rows(side, a) for side in a.shape[-2:])

    def blur(x: Tensor) -> Tensor:
        return down @ x @ across.T

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a * mean_a, blur(b * b) - mean_b * mean_b
    found = a.new_empty(len(a), len(b), dtype=torch.float32)
    wide = max(1, VALUES // a[0].numel())
    high = max(1, wide // len(b))
    for i in range(0, len(a), high):
        for j in range(0, len(b), wide):
            one, other = (slice(i, i + high), None), slice(j, j + wide)
            cov = blur(a[one] * b[other]) - mean_a[one] * mean_b[other]
            windows = similarity(mean_a[one], mean_b[other], var_a[one], var_b[other], cov, 1.0)
            found[one[0], other] = windows.mean(dim=(2, 3, 4))
    return found


def pairwise_lpips(a: Tensor, b: Tensor) -> Tensor:
    """Return the LPIPS distance of each `a[i]` to each `b[j]` as `[len(a), len(b)]`."""
    weights = lpips_weights(a.device)
    embedded = [torch.cat([embed(part, weights) for part in torch.split(pictures, CHUNK)]) for pictures in (a, b)]
    return _squared_distances(*embedded)


def _squared_distances(a: Tensor, b: Tensor) -> Tensor:
    # The shortcut through a matrix product loses the small distances, which decide who is nearest.
    return torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist").square()


def _gaussian_rows(side: int, like: Tensor) -> Tensor:
    """Return the matrix that blurs a line of `side` pixels, one row per window wholly inside."""
    window, sigma = ssim_window(tuple(like.shape[-2:]))
    offsets = torch.arange(window, dtype=like.dtype, device=like.device) - window // 2
    kernel = torch.exp(-offsets.square() / (2 * sigma * sigma))
    rows = like.new_zeros(side - window + 1, side)
    for i in range(len(rows)):
        rows[i, i : i + window] = kernel / kernel.sum()
    return rows
