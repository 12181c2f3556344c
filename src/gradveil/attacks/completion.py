"""Completing a matrix of low rank from some of its entries, by alternating least squares."""

import torch
from torch import Tensor

MATCHED = 1e-5  # a relative error no wrong solution reaches; gradients are exact to about 1e-7


def complete(
    matrix: Tensor, known: Tensor, rank: int, rng: torch.Generator, steps: int = 300, restarts: int = 1
) -> tuple[Tensor, Tensor, float]:
    """Return (left `[m, r]`, right `[n, r]`, relative error on the known entries) with `left @ right.T` near `matrix`.

    Starts anew, up to `restarts` times, while the known entries are not matched; the best fit counts.

    >>> truth = torch.outer(torch.arange(1.0, 5), torch.arange(1.0, 7)).double()
    >>> known = torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.7
    >>> left, right, error = complete(truth * known, known, 1, torch.Generator().manual_seed(0))
    >>> bool((left @ right.T - truth).abs().max() < 1e-6)
    True
    """
    known = known.to(matrix.dtype)
    scale = matrix.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
    data = matrix / scale * known
    found: list[tuple[Tensor, Tensor, float]] = []
    for _ in range(restarts):
        start = torch.randn(matrix.shape[1], rank, generator=rng, dtype=matrix.dtype, device=rng.device)
        found.append(_alternate(data, known, start.to(matrix.device), steps))
        if found[-1][2] < MATCHED:
            break
    left, right, error = min(found, key=lambda fit: fit[2])
    return left * scale, right, error


def _alternate(data: Tensor, known: Tensor, right: Tensor, steps: int) -> tuple[Tensor, Tensor, float]:
    for _ in range(3):  # a few power iterations: a start near the leading directions of what is known
        right = torch.linalg.qr(data.T @ (data @ right)).Q
    left = _solve(data, known, right)
    error = 1.0
    for step in range(1, steps + 1):
        right = _solve(data.T, known.T, left)
        left = _solve(data, known, right)
        if step % 10 == 0:
            before, error = error, float((left @ right.T * known - data).norm())
            if error < 1e-9 or (step > 50 and before - error <= 1e-3 * error):
                break
    return left, right, error


def _solve(data: Tensor, known: Tensor, right: Tensor) -> Tensor:
    """Return the left factor that fits each row of `data` best on its known entries; rows without any become 0."""
    rank = right.shape[1]
    squares = (right[:, :, None] * right[:, None, :]).reshape(-1, rank * rank)
    gram = (known @ squares).reshape(-1, rank, rank)
    ridge = 1e-12 * gram.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
    gram = gram + ridge[:, None, None] * torch.eye(rank, dtype=data.dtype, device=data.device)
    solved: Tensor = torch.linalg.solve(gram, (data @ right)[:, :, None])[:, :, 0]
    return solved
