"""Scores of guesses against true pictures: `[N, C, H, W]` in 0..1 in, `[N]` out.

The libraries behind PSNR and SSIM take seconds to import, so they are imported at the first score.
"""

from .floor import floor_guesses, score_floor
from .identify import identification_rank, lpips_possible
from .images import mse, paper_ssim, psnr, ssim
from .pairing import aligned, pair
from .pairwise import pairwise_lpips, pairwise_mse, pairwise_ssim
from .perceptual import lpips, lpips_available
from .scorecard import METRICS, score

__all__ = [
    "METRICS",
    "aligned",
    "floor_guesses",
    "identification_rank",
    "lpips",
    "lpips_available",
    "lpips_possible",
    "mse",
    "pair",
    "pairwise_lpips",
    "pairwise_mse",
    "pairwise_ssim",
    "paper_ssim",
    "psnr",
    "score",
    "score_floor",
    "ssim",
]
