"""What somebody scores who never saw a gradient."""

import torch
from torch import Tensor

from .pairing import GREY
from .pairwise import same_picture
from .scorecard import score


def floor_guesses(truth: Tensor, public: Tensor, rng: torch.Generator, count: int | None = None) -> dict[str, Tensor]:
    """Return blind guesses at `truth`: the mean of public pictures, plain grey, and public pictures drawn at random.

    `count` is how many guesses the attacker to compare with made (default: one per truth); only the random ones gain
    from more. Public pictures that equal a truth are never drawn.
    """
    others = public.to(truth)
    others = others[~same_picture(others, truth).any(dim=1)]
    if not len(others):
        raise ValueError("public must hold a picture that is not among the truths")
    n = len(truth)
    wanted = max(n, count or n)
    rounds = -(-wanted // len(others))
    drawn = torch.cat([torch.randperm(len(others), generator=rng, device=rng.device) for _ in range(rounds)])[:wanted]
    return {
        "mean_image": others.mean(dim=0).expand(n, *truth.shape[1:]),
        "grey": torch.full_like(truth, GREY),
        "random_picture": others[drawn.to(others.device)],
    }


def score_floor(
    truth: Tensor,
    public: Tensor,
    rng: torch.Generator,
    *,
    count: int | None = None,
    gallery: Tensor | None = None,
) -> dict[str, dict[str, list[float]]]:
    """Return the scorecard of each blind guess, to stand beside every attack's."""
    guesses = floor_guesses(truth, public, rng, count)
    return {name: score(guess, truth, gallery=gallery) for name, guess in guesses.items()}
