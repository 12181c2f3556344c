"""Scores of pictures against pictures, one number per picture: MSE, PSNR, SSIM, and the paper's own SSIM."""

import torch
from torch import Tensor
from torch.nn import functional as F

PSNR_CAP = 100.0  # dB; equal pictures would give infinity
SSIM_WINDOW, SSIM_SIGMA = 11, 1.5
PAPER_WINDOW, PAPER_RANGE = 7, 2.0


def mse(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the mean squared error of each picture.

    >>> mse(torch.zeros(1, 1, 2, 2), torch.full((1, 1, 2, 2), 0.5))
    tensor([0.2500])
    """
    require_pictures(guess, truth)
    return (guess - truth).square().mean(dim=(1, 2, 3))


def psnr(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each picture in dB for data range 1, at most 100."""
    from torchmetrics.functional.image import peak_signal_noise_ratio

    require_pictures(guess, truth)
    found: Tensor = peak_signal_noise_ratio(guess, truth, data_range=1.0, reduction="none", dim=(1, 2, 3))
    return found.clamp(max=PSNR_CAP)


def ssim(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the structural similarity (Wang et al. 2004) of each picture for data range 1.

    Gaussian 11x11 window of sigma 1.5, population covariance, only windows that lie wholly inside. A picture with a
    side below 11 pixels gets the largest odd window that fits, with sigma shrunk in proportion (8x8 digits: 7x7,
    sigma 0.95), so figures for such pictures compare with each other only.

    torchmetrics' own mean also counts windows that reach over a mirrored border (a grey picture then scores 0.20 on
    CIFAR-10 instead of 0.13): its map is cut to the inside, where it agrees with scikit-image.
    """
    from torchmetrics.functional.image import structural_similarity_index_measure

    require_pictures(guess, truth)
    height, width = guess.shape[-2:]
    window, sigma = ssim_window((height, width))
    # A variance is a small difference of large numbers, and GPUs round float32 convolutions to TF32. CPUs do not, and
    # are slow at float64 convolutions.
    kind = torch.float64 if guess.is_cuda else torch.float32
    _, every = structural_similarity_index_measure(
        guess.to(kind), truth.to(kind), sigma=sigma, data_range=1.0, reduction="none", return_full_image=True
    )
    edge = window // 2
    inside: Tensor = every[..., edge : height - edge, edge : width - edge]
    return inside.mean(dim=(1, 2, 3)).to(guess.dtype)


def paper_ssim(guess: Tensor, truth: Tensor) -> Tensor:
    """Return SSIM as the DGP paper's tables seem to count it: uniform 7x7 window, sample covariance, data range 2.

    It flatters: a grey picture scores 0.27 on CIFAR-10 where `ssim` gives 0.13. Use it only beside the paper's figures.
    """
    require_pictures(guess, truth)
    window = min(PAPER_WINDOW, _largest_odd(guess.shape[-2:]))
    unbiased = window**2 / max(window**2 - 1, 1)

    def blur(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, window, stride=1)

    g, t = guess.double(), truth.double()
    mean_g, mean_t = blur(g), blur(t)
    var_g, var_t = unbiased * (blur(g * g) - mean_g * mean_g), unbiased * (blur(t * t) - mean_t * mean_t)
    cov = unbiased * (blur(g * t) - mean_g * mean_t)
    return similarity(mean_g, mean_t, var_g, var_t, cov, PAPER_RANGE).mean(dim=(1, 2, 3)).to(guess.dtype)


def similarity(mean_a: Tensor, mean_b: Tensor, var_a: Tensor, var_b: Tensor, cov: Tensor, data_range: float) -> Tensor:
    """Return the SSIM of each window from its local statistics."""
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    luminance = (2 * mean_a * mean_b + c1) / (mean_a * mean_a + mean_b * mean_b + c1)
    return luminance * (2 * cov + c2) / (var_a + var_b + c2)


def ssim_window(sides: tuple[int, ...]) -> tuple[int, float]:
    """Return side and sigma of the Gaussian window `ssim` uses for pictures of this height and width.

    >>> ssim_window((32, 32))
    (11, 1.5)
    """
    window = min(SSIM_WINDOW, _largest_odd(sides))
    return window, SSIM_SIGMA * window / SSIM_WINDOW


def require_pictures(guess: Tensor, truth: Tensor) -> None:
    """Raise unless both are float `[N, C, H, W]` of one shape with values in 0..1."""
    if guess.ndim != 4 or guess.shape != truth.shape:
        raise ValueError(f"pictures must share one shape [N, C, H, W], got {tuple(guess.shape)}, {tuple(truth.shape)}")
    for name, pictures in (("guess", guess), ("truth", truth)):
        # Written so that NaN fails it too.
        if pictures.numel() and not bool(((pictures >= -1e-6) & (pictures <= 1 + 1e-6)).all()):
            raise ValueError(f"{name} must have pixels in 0..1: convert model inputs with gradveil.data.to_pixels")


def _largest_odd(sides: tuple[int, ...]) -> int:
    return min(sides) - (min(sides) + 1) % 2
