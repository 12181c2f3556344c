"""CMA-ES: search without slopes, by learning the shape of the landscape from ranked samples."""

import math
from collections.abc import Callable

import torch
from torch import Tensor


class CMA:
    """Covariance matrix adaptation with the usual constants; `ask` for points, `tell` their costs.

    Works in float64 on the CPU; a step costs a decomposition of a `[d, d]` matrix, so d should stay below a thousand.

    >>> search = CMA(torch.zeros(5), 0.5, 12, torch.Generator().manual_seed(0))
    >>> for _ in range(150):
    ...     points = search.ask()
    ...     search.tell(points, (points - torch.arange(5)).square().sum(1))
    >>> [round(v, 3) + 0.0 for v in search.mean.tolist()]
    [0.0, 1.0, 2.0, 3.0, 4.0]

    Reference: Hansen, "The CMA Evolution Strategy: A Tutorial".
    """

    def __init__(self, start: Tensor, sigma: float, population: int, rng: torch.Generator) -> None:
        self.mean, self.sigma, self.population, self.rng = start.double().cpu(), sigma, population, rng
        d, best = len(start), population // 2
        weights = math.log((population + 1) / 2) - torch.arange(1, best + 1, dtype=torch.float64).log()
        self.weights = weights / weights.sum()
        effective = float(1 / self.weights.square().sum())
        self.effective = effective
        self.c_sigma = (effective + 2) / (d + effective + 5)
        self.damping = 1 + 2 * max(0.0, math.sqrt((effective - 1) / (d + 1)) - 1) + self.c_sigma
        self.c_path = (4 + effective / d) / (d + 4 + 2 * effective / d)
        self.c_one = 2 / ((d + 1.3) ** 2 + effective)
        self.c_many = min(1 - self.c_one, 2 * (effective - 2 + 1 / effective) / ((d + 2) ** 2 + effective))
        self.expected = math.sqrt(d) * (1 - 1 / (4 * d) + 1 / (21 * d**2))
        self.covariance = torch.eye(d, dtype=torch.float64)
        self.path = torch.zeros(d, dtype=torch.float64)
        self.path_sigma = torch.zeros(d, dtype=torch.float64)
        self.generation = 0
        self._decompose()

    def ask(self) -> Tensor:
        """Return `[population, d]` points to be tried."""
        shape = (self.population, len(self.mean))
        drawn = torch.randn(shape, generator=self.rng, dtype=torch.float64, device=self.rng.device).cpu()
        points: Tensor = self.mean + self.sigma * (drawn * self.scales) @ self.axes.T
        return points

    def tell(self, points: Tensor, costs: Tensor) -> None:
        """Learn from the costs `[population]` of points that `ask` gave."""
        order = torch.nan_to_num(costs.double().cpu(), math.inf).argsort()[: len(self.weights)]
        steps = (points[order] - self.mean) / self.sigma
        move = self.weights @ steps
        self.mean = self.mean + self.sigma * move
        self.generation += 1
        whitened = self.axes @ ((self.axes.T @ move) / self.scales)
        self.path_sigma = (1 - self.c_sigma) * self.path_sigma + whitened * math.sqrt(
            self.c_sigma * (2 - self.c_sigma) * self.effective
        )
        length = float(self.path_sigma.norm()) / math.sqrt(1 - (1 - self.c_sigma) ** (2 * self.generation))
        steady = length < (1.4 + 2 / (len(self.mean) + 1)) * self.expected
        gain = math.sqrt(self.c_path * (2 - self.c_path) * self.effective) if steady else 0.0
        self.path = (1 - self.c_path) * self.path + gain * move
        lost = 0.0 if steady else self.c_one * self.c_path * (2 - self.c_path)
        self.covariance = (
            (1 - self.c_one - self.c_many + lost) * self.covariance
            + self.c_one * torch.outer(self.path, self.path)
            + self.c_many * (steps.T * self.weights) @ steps
        )
        self.sigma *= math.exp(self.c_sigma / self.damping * (float(self.path_sigma.norm()) / self.expected - 1))
        self._decompose()

    def _decompose(self) -> None:
        values, self.axes = torch.linalg.eigh((self.covariance + self.covariance.T) / 2)
        self.scales = values.clamp_min(1e-20).sqrt()


def minimise_blindly(
    cost: Callable[[Tensor], Tensor], start: Tensor, sigma: float, population: int, steps: int, rng: torch.Generator
) -> tuple[Tensor, float]:
    """Return the best point seen in `steps` generations, and its cost; `cost` maps `[n, d]` to `[n]`."""
    search = CMA(start, sigma, population, rng)
    best, lowest = search.mean, math.inf
    for _ in range(steps):
        points = search.ask()
        costs = cost(points)
        search.tell(points, costs)
        if float(costs.min()) < lowest:
            best, lowest = points[int(costs.argmin())], float(costs.min())
    return best, lowest
