"""Which guess is meant for which truth."""

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from .pairwise import pairwise_mse, pairwise_ssim

GREY = 0.5


def pair(guess: Tensor, truth: Tensor) -> Tensor:
    """Return for each of N truths the index of its guess among R, or -1 where too few guesses were made.

    Each guess serves at most one truth; the sum of 1 - SSIM is the least possible (Hungarian assignment), or that of
    the squared error for tensors that are not pictures `[N, C, H, W]`. With more guesses than truths the best ones
    are taken, so compare with a blind guesser who may guess as often (`floor_guesses(count=R)`).
    """
    if guess.shape[1:] != truth.shape[1:]:
        raise ValueError(f"guess and truth must agree but for their number: {guess.shape[1:]} and {truth.shape[1:]}")
    index = torch.full((len(truth),), -1)
    if len(guess) and len(truth):
        cost = -pairwise_ssim(truth, guess) if truth.ndim == 4 else pairwise_mse(truth, guess)
        rows, columns = linear_sum_assignment(cost.cpu().double().numpy())
        index[torch.from_numpy(rows)] = torch.from_numpy(columns)
    return index.to(truth.device)


def aligned(guess: Tensor, index: Tensor) -> Tensor:
    """Return `[N, ...]` guesses in the order of the truths; a missing one (-1) is mid-grey.

    >>> aligned(torch.tensor([[0.1], [0.9]]), torch.tensor([1, -1]))
    tensor([[0.9000],
            [0.5000]])
    """
    grey = guess.new_full((1, *guess.shape[1:]), GREY)
    return torch.cat([guess, grey])[index]
