"""What the rows of a layer measure of a natural picture, and what that says about the layer.

A look at a layer is `[rows, k]`: the inner product of two rows stands for the covariance of their measurements.
"""

import math
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

BAND = 8  # lowest frequencies each way: nine tenths of what natural pictures consist of
DIMS = 96  # of a row's sketch
COLOUR = 0.3  # how much a picture's channels differ from their mean, against that mean
ALIKE = 0.8  # correlation below which two rows measure different things
PARALLEL = 0.1  # spread of the difference of two standardised measurements below which they are one
NESTED = 1.0  # thresholds so far apart, against the spread of the difference, nest the rows
DEAD = 1e-6  # a row so small against the middle one is a dead unit, not a measurement
RARE = 0.5  # a threshold so many spreads off the centre: a unit fires for under a third of the pictures or over two
ONE_SIDED = 5.0  # training shifts the balance of the means by up to a fifth
UNNORMALISED = 1.9  # mean over spread of pixels in 0..1
GROUP = 4  # so many rows nested with one are a staircase, not chance


def nested_shares(looks: Tensor, bias: Tensor | None) -> tuple[float, float]:
    """Return the share of rows nested with another one, and with at least `GROUP` others.

    `looks` `[looks, rows, k]` holds what each row measures.
    The inner product of two rows of a look stands for the covariance of their measurements over natural pictures; the
    look that finds most counts. The thresholds of a layer without a bias are unknown: there every parallel pair counts.

    >>> rows = torch.eye(4).repeat_interleave(2, 0)[None]
    >>> nested_shares(rows, torch.zeros(8)), nested_shares(rows, torch.arange(8.0))
    ((0.0, 0.0), (1.0, 0.0))
    """
    spread = looks.norm(dim=-1)
    alive = spread > DEAD * spread.median(-1, keepdim=True).values
    spread = spread.clamp_min(torch.finfo(spread.dtype).tiny)
    units = looks / spread[..., None]
    cosine = units @ units.mT
    cosine.diagonal(dim1=-2, dim2=-1).zero_()
    alike = cosine.abs()
    difference = (2 - 2 * alike).clamp_min(0).sqrt()  # spread of the difference of two standardised measurements
    if bias is None:
        nested = difference < PARALLEL
    else:
        threshold = -bias / spread
        gap = (threshold[..., None] - cosine.sign() * threshold[..., None, :]).abs()
        # Equal rows with equal thresholds are one row twice: rounding must not part them.
        nested = (alike > ALIKE) & (gap > NESTED * difference + 1e-3)
    partners = (nested & alive[..., None] & alive[..., None, :]).sum(-1)
    shares = torch.stack([(partners >= least).sum(-1) / alive.sum(-1).clamp_min(1) for least in (1, GROUP)])
    pairs, groups = shares.amax(1).tolist()
    return pairs, groups


def repeated_share(look: Tensor) -> float:
    """Return the share of rows that measure what another one does, whatever their thresholds; rows of zeros apart.

    >>> repeated_share(torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    0.5
    """
    spread = look.norm(dim=1)
    alive = spread > DEAD * spread.median()
    units = look[alive] / spread[alive, None]
    alike = (units @ units.mT).abs().fill_diagonal_(0)
    return float(((2 - 2 * alike).clamp_min(0).sqrt() < PARALLEL).any(1).float().mean())


def rare_share(rows: Tensor, bias: Tensor, look: Tensor, *, centred: bool = False) -> float:
    """Return the share of units whose threshold lies off the centre of what they measure, by bias or by mean.

    The mean of pixels in 0..1 moves honest thresholds either way; only what moves more one way than the other counts.
    Of inputs that need not be pixels the mean is unknown: `centred` leaves it out.
    """
    spread = look.norm(dim=1)
    alive = spread > DEAD * spread.median()
    threshold = -bias[alive] / spread[alive]
    by_bias = float((threshold.abs() > RARE).float().mean())
    if centred:
        return by_bias
    shifted = threshold - UNNORMALISED * rows.sum(1)[alive] / spread[alive]
    by_mean = float((shifted > RARE).float().mean()) - float((shifted < -RARE).float().mean())
    return max(by_bias, by_mean / ONE_SIDED)


def low_band(rows: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return what rows over pictures of `shape` measure of a natural one: low frequencies, weighted by their amplitude.

    Natural pictures have amplitudes that fall as one over the frequency, and channels that move together. Scaled so
    that every pixel has spread 1. What an attacker adds above the band hardly moves a measurement, and is not seen.
    """
    channels, height, width = shape
    waves = rows.reshape(-1, channels, height, width) @ _cosines(width).to(rows.device)
    waves = waves.transpose(-1, -2) @ _cosines(height).to(rows.device)
    waves = waves * _amplitudes(height, width).to(rows.device)
    grey = waves.mean(1, keepdim=True)
    return torch.cat([channels * grey, COLOUR * (waves - grey)], dim=1).flatten(1)


def sketched(rows: Tensor, rng: torch.Generator) -> Tensor:
    """Return `[rows, DIMS]` with about the same inner products: random signs, then sums."""
    signs = torch.randint(2, (rows.shape[1],), generator=rng, device=rng.device).to(rows) * 2 - 1
    signed, spare = rows * signs, -rows.shape[1] % DIMS
    return (F.pad(signed, (0, spare)) if spare else signed).view(len(rows), -1, DIMS).sum(1)


@cache
def _cosines(n: int) -> Tensor:
    places, waves = torch.arange(n) + 0.5, torch.arange(min(BAND, n))
    basis = torch.cos(math.pi / n * places[:, None] * waves) * math.sqrt(2 / n)
    basis[:, 0] = math.sqrt(1 / n)
    return basis


@cache
def _amplitudes(height: int, width: int) -> Tensor:
    """Return the amplitude of each wave in the band, `[width, height]`."""
    square = torch.arange(width)[:, None] ** 2 + torch.arange(height) ** 2
    power = 1 / (1 + square.float())
    return (power / power.mean()).sqrt()[: min(BAND, width), : min(BAND, height)]
