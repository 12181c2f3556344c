"""Guesses made without looking at the gradient: the floor of every score."""

from dataclasses import dataclass

import torch

from .. import check
from ..core import Attack, Observation, Reconstruction
from .space import box


@dataclass(frozen=True)
class Blind(Attack):
    """Return mid-grey pictures, or uniform random pixels: whoever scores no better has learnt nothing.

    The guess depends on the public facts only (shape, normalisation, number of examples), never on `seen.grads`.
    """

    guess: str = "grey"

    def __post_init__(self) -> None:
        check.one_of(("grey", "random"), guess=self.guess)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        low, high = box(seen)
        shape = (seen.num_examples, *seen.input_shape)
        share = torch.full(shape, 0.5)
        if self.guess == "random":
            share = torch.rand(shape, generator=rng, device=rng.device)
        return Reconstruction(low + share.to(low.device) * (high - low))
