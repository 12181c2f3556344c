"""Noise that takes part of itself back, with a guarantee: DP-FTRL in its matrix-factorisation form.

`Hardened` takes all of its noise back and has no guarantee per example. Here examples are clipped, and each upload
takes back a share of the noise before it. Uploads T and noise Z (both one row per round) are T = G + C^-1 Z, where C^-1
has ones on the diagonal and minus `correlation` below it. That is C^-1 (C G + Z): post-processing of one Gaussian
mechanism on C G, however the gradients depend on earlier uploads (Denisov et al. 2022). What counts is how far one
example can move C G.
"""

import math
from dataclasses import dataclass

from .. import check, tree
from ..core import Grads, State, Step
from ..errors import StateError
from .dp import DPNoise, clipped_sum
from .noise import normal_like


@dataclass(frozen=True)
class CorrelatedNoise(DPNoise):
    """Clip every example's gradient to norm `clip`; add fresh noise less `correlation` times the last; take the mean.

    Guarantees: with noise of standard deviation `noise_multiplier * clip` on the clipped sum, the uploads of a whole
    run are one Gaussian mechanism, and `correlated_epsilon` gives what they say about one example that takes part at
    most `participations` times, at least `separation` rounds apart. Both must hold for the client's data loader: a
    fixed order gives one pass as separation; an order drawn anew for every pass guarantees only 1, and not even that
    where a batch can end one pass and begin the next. There is no gain from random sampling. In the sum of all uploads
    every noise but the newest counts only `1 - correlation` times. The number of examples travels in the clear,
    BatchNorm statistics are not protected, and a fixed seed or a state that leaks lets the noise be subtracted.

    Compose: first in a Chain (it takes per-example gradients), never inside ErrorFeedback.

    Reference: Denisov et al., "Improved Differential Privacy for SGD via Optimal Private Linear Operators on Adaptive
    Streams"; Choquette-Choo et al., "Multi-Epoch Matrix Factorization Mechanisms for Private Machine Learning".
    """

    correlation: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fraction(correlation=self.correlation)

    def init(self, params: Grads) -> State:
        return tree.under("last", tree.zeros_like(params))

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        last = tree.only("last", state)
        if last.keys() != grads.keys() or any(last[name].shape != g.shape[1:] for name, g in grads.items()):
            raise StateError("the last noise does not fit this gradient: start from defense.init(params)")
        std = self.noise_multiplier * self.clip
        sent, fresh = {}, {}
        for name, total in clipped_sum(grads, self.clip).items():
            fresh[name] = (std * normal_like(total, step.rng)).to(last[name].dtype)
            noise = fresh[name] - self.correlation * last[name]
            sent[name] = ((total + noise.to(total.dtype)) / max(len(grads[name]), 1)).to(grads[name].dtype)
        return sent, tree.under("last", fresh)


def strategy_sensitivity(correlation: float, *, rounds: int, participations: int = 1, separation: int = 1) -> float:
    """Return how far one example of norm 1 can move C G: the norm of the sum of the columns of C it takes part in.

    C[t, s] = correlation^(t - s) for t >= s. No entry is negative, so contributions in one common direction are the
    worst; columns fall and later ones are cut off by the end of the run, so the worst rounds are the earliest
    possible: 0, separation, 2 separation, ... (Kalinin and Lampert 2024, theorem 2).

    >>> strategy_sensitivity(0.0, rounds=100, participations=4, separation=25)
    2.0
    """
    check.fraction(correlation=correlation)
    check.at_least(1, rounds=rounds, participations=participations, separation=separation)
    level, square, left = 0.0, 0.0, participations
    for t in range(rounds):
        level *= correlation
        if left and t % separation == 0:
            level, left = level + 1.0, left - 1
        square += level**2
    return math.sqrt(square)


def correlated_epsilon(
    noise_multiplier: float,
    *,
    correlation: float,
    rounds: int,
    delta: float,
    participations: int = 1,
    separation: int = 1,
) -> float:
    """Return the epsilon of a whole run of `CorrelatedNoise` for one example that is added or left out.

    Args:
        noise_multiplier: noise on the clipped sum over the clip norm.
        correlation: share of the last noise that an upload takes back.
        rounds: uploads of the run.
        delta: the probability left out; well below one over the number of examples.
        participations: batches of this client that hold one example, at most.
        separation: rounds from one of them to the next, at least.
    """
    reach = strategy_sensitivity(correlation, rounds=rounds, participations=participations, separation=separation)
    check.positive(noise_multiplier=noise_multiplier)
    return gaussian_epsilon(noise_multiplier / reach, delta)


def gaussian_epsilon(noise: float, delta: float) -> float:
    """Return the least epsilon of a Gaussian mechanism whose noise is `noise` times its sensitivity: exact.

    Solves delta = Phi(1/(2 noise) - epsilon noise) - e^epsilon Phi(-1/(2 noise) - epsilon noise).

    Reference: Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", theorem 8.
    """
    from scipy.optimize import brentq  # here, because it would take a fifth of `import gradveil`
    from scipy.special import log_ndtr

    check.positive(noise=noise, delta=delta)
    check.fraction(delta=delta)

    def excess(epsilon: float) -> float:
        near = float(log_ndtr(0.5 / noise - epsilon * noise))
        far = epsilon + float(log_ndtr(-0.5 / noise - epsilon * noise))
        return near + math.log1p(-math.exp(min(far - near, -1e-300))) - math.log(delta)

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
    return float(brentq(excess, 0.0, high, xtol=1e-10))
