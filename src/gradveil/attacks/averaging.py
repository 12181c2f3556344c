"""Many noisy uploads of one unchanging gradient, put together so that the least noise is left.

Noise that a client takes back later (`Hardened`, `CorrelatedNoise`) hangs together from upload to upload. If all of it
is taken back, the sum of R uploads holds the newest noise only, so that of their mean falls like 1 / R. A line through
all partial sums does better, like R ** -1.5. Both are cases of generalised least squares, and the covariance that needs
shows when the attacker runs the defense on a gradient of its own.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from ..core import Grads
from .imitation import Imitation

WARM_UP = 2  # rounds before the first one seen, after which the noise of a client is like that of any later round
SAMPLE = 2**18  # entries that tell how noise hangs together
RIDGE = 1e-6  # of the variance: noise that cancels exactly must not make the equations singular


def noise_over(imitation: Imitation, own: Tensor, rounds: Sequence[int], begin: int) -> Tensor:
    """Return the covariance `[R, R]` of the noise of uploads in these rounds, each tensor in a unit of its own.

    `begin` is the round in which the client started, or any not long before the first one seen.
    """
    sizes = [g.numel() for g in imitation.like.values()]
    every = max(sum(sizes) // SAMPLE, 1)
    tensor = torch.repeat_interleave(torch.tensor(sizes, device=own.device))[::every]

    def some(seed: int) -> Tensor:
        sent = islice(imitation.uploads(own, seed), rounds[-1] - begin + 1)
        return torch.stack([one[::every].double() for t, one in enumerate(sent, begin) if t in rounds])

    gap = (some(0) - some(1)) / 2**0.5  # what is not noise is alike in both
    energy = gap.new_zeros(len(sizes)).index_add(0, tensor, gap.square().mean(0))
    unit = (energy / tensor.bincount(minlength=len(sizes)).clamp_min(1)).sqrt()[tensor]
    gap = gap[:, unit > 0] / unit[unit > 0]
    covariance = gap @ gap.T / max(gap.shape[1], 1)
    return covariance + RIDGE * torch.eye(len(rounds), dtype=gap.dtype, device=gap.device)


def combined(uploads: Tensor, noise: Tensor, holds: Tensor) -> tuple[Tensor, float]:
    """Return the gradient `[P]` that upload t of `[R, P]` holds `holds[t]` times, and its variance in units of `noise`.

    >>> sums = torch.tensor([[1.0], [1.0], [4.0]]).double()  # noise 0, 0 and 3, each taken back in the next upload
    >>> taken_back = torch.tensor([[1.0, -1, 0], [-1, 2, -1], [0, -1, 2]]).double()
    >>> combined(sums, taken_back, torch.ones(3).double())
    (tensor([1.6429], dtype=torch.float64), 0.0714...)
    """
    solved = torch.linalg.solve(noise, holds)
    variance = 1 / (holds @ solved)
    return (variance * solved).to(uploads.dtype) @ uploads, float(variance)


def noise_left(
    uploads: Sequence[Grads], found: Grads, noise: Tensor, holds: Tensor, variance: float
) -> dict[str, float]:
    """Return the standard deviation of what is wrong with each tensor found, by how its uploads scatter round it."""
    freedom = float(noise.trace()) - variance * float(holds.square().sum())
    left = {}
    for name, g in found.items():
        scatter = sum(
            float((one[name] - times * g).square().sum()) for one, times in zip(uploads, holds.tolist(), strict=True)
        )
        left[name] = (scatter / max(g.numel(), 1) / freedom * variance) ** 0.5
    return left
