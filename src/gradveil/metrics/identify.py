"""Would somebody who sees the guess pick the right picture out of a line-up?"""

import torch
from torch import Tensor

from .pairwise import pairwise_lpips, pairwise_mse, pairwise_ssim, same_picture
from .perceptual import MIN_SIDE, lpips_available

DISTANCES = {"mse": pairwise_mse, "ssim": lambda a, b: -pairwise_ssim(a, b), "lpips": pairwise_lpips}


def identification_rank(
    guess: Tensor, truth_index: Tensor, gallery: Tensor, metrics: tuple[str, ...] | None = None
) -> dict[str, Tensor]:
    """Return the place of the true picture among the gallery, 1 being the nearest to the guess, per metric and `best`.

    Args:
        guess: `[N, C, H, W]` in 0..1.
        truth_index: `[N]`, where in the gallery each true picture is.
        gallery: `[M, C, H, W]`, the line-up.
        metrics: Some of mse, ssim, lpips; by default all that can be computed here.

    Candidates as far away as the truth count half, since a coin must decide. Copies of the true picture in the gallery
    are not held against it. `best` is the least place over the metrics: chance alone then reaches place 1 with up to
    `len(metrics)/M` instead of `1/M`.
    """
    if metrics is None:
        metrics = ("mse", "ssim", "lpips") if lpips_possible(gallery) else ("mse", "ssim")
    own = truth_index.to(gallery.device)
    copies = same_picture(gallery[own], gallery)
    ranks = {name: _rank(DISTANCES[name](guess, gallery), own, copies) for name in metrics}
    return {**ranks, "best": torch.stack(list(ranks.values())).amin(dim=0)}


def lpips_possible(pictures: Tensor) -> bool:
    """Say whether LPIPS can score these pictures: large enough, one or three channels, weights at hand."""
    return min(pictures.shape[-2:]) >= MIN_SIDE and pictures.shape[1] in (1, 3) and lpips_available()


def _rank(distance: Tensor, own: Tensor, copies: Tensor) -> Tensor:
    true = distance.gather(1, own[:, None])
    closer = ((distance < true) & ~copies).sum(dim=1)
    level = ((distance == true) & ~copies).sum(dim=1)
    return 1 + closer + level / 2
