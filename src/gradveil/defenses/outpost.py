"""Outpost: prune, then add noise where the weights spread most, less and less often as training goes on."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check, select
from ..core import Defense, Grads, Need, State, Step
from ..gradients import parameters
from .noise import normal_like


@dataclass(frozen=True)
class Outpost(Defense):
    """Behind a random gate, remove the `prune` share of each tensor and add noise to the riskiest coordinates.

    In round t (counted from 0) the gate opens with probability 1 / (1 + decay * (t + 1)). A tensor's risk is the
    variance of its weights, at most 1; its noise has standard deviation `noise_scale * risk`. The coordinates that
    get noise are the `noise_share` with the largest mean squared gradient over the first axis, pooled over tensors.

    Does not guarantee anything while the gate is shut: then the gradient leaves as it is, 9 % of the time in the
    first round and 91 % in the hundredth. `always=True` forces it open, for attacking the mechanism itself. The
    noise also lands on pruned coordinates, so the message is dense, unlike what its traffic figures suppose;
    `noise_on_kept_only=True` keeps it sparse.

    Published form: the first axis is the output channel although the text calls the score Fisher information; the
    released code counts iterations per epoch, here they are the client's rounds.

    Compose: last in a Chain, alone or after ErrorFeedback; never inside ErrorFeedback, which would return the noise.

    Reference: Wang et al., "More than Enough is Too Much: Adaptive Defenses against Gradient Leakage in Production
    Federated Learning".
    """

    noise_scale: float = 0.8
    noise_share: float = 0.4
    decay: float = 0.1
    prune: float = 0.8
    noise_on_kept_only: bool = False
    always: bool = False

    def __post_init__(self) -> None:
        check.non_negative(noise_scale=self.noise_scale, decay=self.decay)
        check.fraction(noise_share=self.noise_share, prune=self.prune)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"model"})

    @property
    def noisy(self) -> bool:
        return True

    def gate_probability(self, round_: int) -> float:
        """Return how likely the defense acts in this round; otherwise the gradient leaves untouched."""
        return 1.0 if self.always else 1.0 / (1.0 + self.decay * (round_ + 1))

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        weights = parameters(step.require_model(self.key()))
        draw = float(torch.rand((), generator=step.rng, device=step.rng.device))
        if draw >= self.gate_probability(step.round):
            return dict(grads), state
        kept = select.prune(list(grads.values()), [select.band(g.numel(), 0.0, self.prune) for g in grads.values()])
        noisy_at = self._where(grads)
        sent = {}
        for (name, g), keep in zip(grads.items(), kept, strict=True):
            noise = (normal_like(g, step.rng) * (self.noise_scale * _risk(weights[name]))).to(g.dtype)
            chosen = noisy_at[name].expand_as(g) & (keep != 0) if self.noise_on_kept_only else noisy_at[name]
            sent[name] = keep + torch.where(chosen, noise, torch.zeros_like(g))
        return sent, state

    def _where(self, grads: Grads) -> dict[str, Tensor]:
        """Return, for each tensor, where noise goes; it broadcasts over the tensor's first axis."""
        scores = {name: _score(g) for name, g in grads.items()}
        pooled = torch.cat([score.reshape(-1) for score in scores.values()])
        count = select.band(pooled.numel(), 0.0, 1.0 - self.noise_share)[1] if self.noise_share else 0
        if not count:
            return {name: torch.zeros_like(score, dtype=torch.bool) for name, score in scores.items()}
        chosen = torch.zeros_like(pooled, dtype=torch.bool)
        chosen[pooled.topk(count).indices] = True  # not by the last one's score: many may share it
        parts = chosen.split([score.numel() for score in scores.values()])
        return {name: part.view_as(score) for (name, score), part in zip(scores.items(), parts, strict=True)}


def _score(g: Tensor) -> Tensor:
    square = g.float().square()
    # The mean over no entries is NaN; an empty tensor has no coordinate to score.
    return square.sum(0) / max(len(g), 1) if g.dim() else square


def _risk(weight: Tensor) -> Tensor:
    """Return the variance of the weights, at most 1; one weight has none."""
    return weight.float().var().clamp_max(1.0) if weight.numel() > 1 else weight.new_zeros(())
