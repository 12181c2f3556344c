"""All scores of one reconstruction, picture by picture."""

from collections import Counter

import torch
from torch import Tensor

from ..core import Metric
from .identify import identification_rank, lpips_possible
from .images import mse, paper_ssim, psnr, ssim
from .pairing import GREY, aligned, pair
from .perceptual import lpips

METRICS: dict[str, Metric] = {
    "mse": Metric(mse, "low"),
    "psnr": Metric(psnr, "high"),
    "ssim": Metric(ssim, "high"),
    "lpips": Metric(lpips, "low"),
    "paper_ssim": Metric(paper_ssim, "high"),
}


def score(
    guess: Tensor,
    truth: Tensor,
    *,
    guess_labels: Tensor | None = None,
    truth_labels: Tensor | None = None,
    gallery: Tensor | None = None,
) -> dict[str, list[float]]:
    """Return every score for each true picture of one upload, after the best pairing of guesses to truths.

    Score each upload by itself: pairing across uploads would let a guess at one stand for another.

    Args:
        guess: `[R, C, H, W]` in 0..1, any number of guesses; NaN counts as mid-grey, as does a missing guess.
        truth: `[N, C, H, W]` in 0..1.
        guess_labels: `[R]`; with `truth_labels` gives `label_accuracy`, counted as a set with repetitions, so that
            right labels in the wrong order are right.
        truth_labels: `[N]`.
        gallery: Other pictures of the same kind; with them comes `rank`, the place of the true picture in the line-up
            of truths and gallery (best over MSE, SSIM and LPIPS), and `identified`, whether that is the first.

    Columns that cannot be had are left out: `lpips` without weights or for pictures below 31 pixels.
    """
    clean = guess.nan_to_num(nan=GREY, posinf=1.0, neginf=0.0).clamp(0, 1).to(truth)
    index = pair(clean, truth)
    paired = aligned(clean, index)
    names = [name for name in METRICS if name != "lpips" or lpips_possible(truth)]
    columns = {name: METRICS[name].fn(paired, truth).tolist() for name in names}
    if guess_labels is not None and truth_labels is not None:
        columns["label_accuracy"] = _labels_found(guess_labels[index[index >= 0].to(guess_labels.device)], truth_labels)
    if gallery is not None:
        line_up = torch.cat([truth, gallery.to(truth)])
        own_place = torch.arange(len(truth), device=truth.device)
        rank = identification_rank(paired, own_place, line_up)["best"]
        columns["rank"] = rank.tolist()
        columns["identified"] = (rank == 1).float().tolist()
    return columns


def _labels_found(guessed: Tensor, true: Tensor) -> list[float]:
    left = Counter(guessed.tolist())
    found = []
    for label in true.tolist():
        found.append(float(left[label] > 0))
        left[label] -= 1
    return found
