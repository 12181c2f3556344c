"""What can be calculated about pruning with error feedback, and what such a number promises.

`docs/theory.md` derives every formula. gamma is always the *measured* share of energy a step held back, never an
assumed constant: dual pruning is not a contraction, and its gamma can reach 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp

from . import check, tree
from .core import Batch, Grads, LossFn
from .gradients import parameters

# The noise of the hardened release has one of finitely many sizes for each tensor: zero, a power of 2 ** (1 / 4) from
# 2 ** LOWEST to 2 ** HIGHEST, or one beyond, which is not sent.
PER_OCTAVE, LOWEST, HIGHEST = 4, -32, 64
SCALES = PER_OCTAVE * (HIGHEST - LOWEST) + 3


def gamma(total: Grads, sent: Grads) -> float:
    """Return ||total - sent||^2 / ||total||^2, the share of energy a step held back (0 for an all-zero gradient).

    For pruning, whose sent and held parts do not overlap, this is 1 - ||sent||^2 / ||total||^2. A compressor is a
    contraction if this stays below a constant under 1; Top-k is, dual pruning is not.

    >>> gamma({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
    0.64
    """
    whole = tree.global_norm(total)
    return round((tree.global_norm(tree.sub(total, sent)) / whole) ** 2, 12) if whole else 0.0


def euclidean_degradation(distance: float, gamma: float, gradient_norm: float) -> float:
    """Theorem 1, Euclidean: how far an attacker who is `distance` from what was sent can be from the true gradient.

    By the triangle inequality this is at most distance + sqrt(gamma) * ||g||. It is an upper bound on the attacker's
    error: the attacker may do better, down to zero, so it guarantees no privacy.
    """
    check.fraction(gamma=gamma)
    check.non_negative(distance=distance, gradient_norm=gradient_norm)
    return distance + math.sqrt(gamma) * gradient_norm


def cosine_degradation(distance: float, gamma: float, *, orthogonal: bool = False) -> float:
    """Theorem 1, cosine: the largest cosine distance to the true gradient of an attacker at `distance` from the sent.

    The angle between sent and true gradient is arccos(sqrt(1 - gamma)) exactly, since pruning is an orthogonal
    projection. Angles add, which gives the general bound. `orthogonal=True` assumes, as the paper does, that the
    attacker's gradient is zero wherever something was pruned; then cosines multiply and the bound is tighter:
    1 - (1 - distance) * sqrt(1 - gamma). Either way an upper bound on the attacker's error, no guarantee.

    >>> round(cosine_degradation(0.0, 0.64, orthogonal=True), 6), round(cosine_degradation(0.0, 0.64), 6)
    (0.4, 0.4)
    """
    check.fraction(gamma=gamma)
    if not 0 <= distance <= 2:
        raise ValueError(f"distance must be a cosine distance in [0, 2], got {distance}")
    if orthogonal:
        return 1 - (1 - distance) * math.sqrt(1 - gamma)
    angle = math.acos(1 - distance) + math.acos(math.sqrt(1 - gamma))
    return 1 - math.cos(min(angle, math.pi))


def residual_bound(gamma: float, gradient_norm: float) -> float:
    """Lemma 1: a bound on E||residual||^2 for all time, if gamma < 1 bounds every step and ||g||^2 <= gradient_norm^2.

    4 gamma / (1 - gamma)^2 * gradient_norm^2. Promises nothing where gamma reaches 1, which dual pruning's does in
    long runs: the bound is then infinite, as the measured residual suggests.

    >>> residual_bound(0.5, 1.0), residual_bound(1.0, 1.0)
    (8.0, inf)
    """
    check.fraction(gamma=gamma)
    check.non_negative(gradient_norm=gradient_norm)
    if gamma == 1:
        return math.inf
    return 4 * gamma / (1 - gamma) ** 2 * gradient_norm**2


def convergence_bound(
    *,
    gap: float,
    lr: float,
    rounds: int,
    smoothness: float,
    noise: float,
    users: int,
    gamma: float,
    gradient_norm: float,
) -> float:
    """Theorem 2: a bound on the mean of E||grad f||^2 over `rounds` of SGD with error feedback.

    4 gap / (lr T) + 2 L lr noise^2 / users + 2 L^2 lr^2 * residual_bound, for lr <= 1 / (2 L), f L-smooth and below
    `gap` above its minimum at the start, gradient noise of variance noise^2 per user. Without pruning (gamma = 0) the
    last term vanishes and plain SGD's bound is left. Momentum is not covered.
    """
    check.positive(lr=lr, smoothness=smoothness)
    check.at_least(1, rounds=rounds, users=users)
    check.non_negative(gap=gap, noise=noise)
    if lr > 1 / (2 * smoothness):
        raise ValueError(f"lr must be at most 1 / (2 * smoothness) = {1 / (2 * smoothness):g}, got {lr}")
    drift = 2 * smoothness**2 * lr**2 * residual_bound(gamma, gradient_norm)
    return 4 * gap / (lr * rounds) + 2 * smoothness * lr * noise**2 / users + drift


def corollary_step(*, gap: float, rounds: int, smoothness: float, noise: float, users: int) -> float:
    """Corollary of Theorem 2: the step that balances its first two terms; the bound then falls like 1 / sqrt(users T).

    min(1 / (2 L), sqrt(2 users gap / (L noise^2 T))). The square root is missing in the paper's main text.
    """
    check.positive(smoothness=smoothness, gap=gap)
    check.at_least(1, rounds=rounds, users=users)
    ceiling = 1 / (2 * smoothness)
    return ceiling if noise == 0 else min(ceiling, math.sqrt(2 * users * gap / (smoothness * noise**2 * rounds)))


def reconstruction_lower_bound(distance: float, spectral_norm: float) -> float:
    """Proposition 1: the least ||x' - x|| of an attacker whose gradient is `distance` away from the true one.

    distance / ||J||, to first order in x' - x. It speaks of the distance the attacker *ends* at. A mask-aware
    attacker matches what was sent without being pushed away from the rest, ends near 0, and the bound is then 0 too.
    """
    check.non_negative(distance=distance)
    check.positive(spectral_norm=spectral_norm)
    return distance / spectral_norm


def release_information(entries: int, noise: float, tensors: int = 0) -> float:
    """Return the most nats one upload of `Hardened(noise)` can carry about the batch.

    entries / (2 noise^2) by its values, and ln(SCALES) for each of its `tensors` by the size of the noise. Given that
    size, each entry is a Gaussian channel whose signal is, on average over its tensor, at most 1 / noise^2 of the
    noise in power; ln(1 + p) <= p, and rounding what was received cannot add information. Holds for any attacker,
    label and mask knowledge included, about one upload. It does not hold for many uploads of the same batch together.

    >>> round(release_information(11_173_962, 64.0)), round(release_information(11_173_962, 64.0, tensors=62))
    (1364, 1733)
    """
    check.at_least(0, entries=entries, tensors=tensors)
    check.positive(noise=noise)
    return entries / (2 * noise**2) + tensors * math.log(SCALES)


def example_information(entries: int, noise: float, equal: float, vectors: int = 0, tensors: int = 0) -> float:
    """Return the most nats one upload of `Hardened` can carry about any one of its examples, whatever the model.

    `equal` is `balance * examples`: in every weight the noise is at least `noise * sqrt(equal)` times the largest
    example's share, so that this example is a signal of at most 1 / (noise^2 equal) of the noise in power; in tensors
    of one axis, which hold `vectors` of the `entries`, at most 1 / noise^2. Whoever knows all other examples can
    subtract them, so this holds for such an attacker too. It holds where the client can tell what single examples
    contribute (`Veil.protect`).

    >>> round(example_information(11_173_962, 64.0, 8.0, 9_610)), round(example_information(11_173_962, 64.0, 32.0))
    (172, 43)
    """
    check.positive(equal=equal)
    weights = release_information(entries - vectors, noise * math.sqrt(max(equal, 1.0)), tensors)
    return weights + release_information(vectors, noise)


def release_error_bound(entries: int, noise: float, unknowns: int, tensors: int = 0) -> float:
    """Return a lower bound on the mean squared error of any reconstruction, as a share of the prior variance.

    exp(-2 I / d) for d unknown numbers that are Gaussian and independent a priori, I the nats above (rate-distortion).
    Pictures are not: neighbouring pixels agree, so a real attacker starts from a smaller prior variance than the
    pixels' own, and the bound then speaks of the error relative to what its prior leaves open.

    >>> [round(release_error_bound(11_173_962, 64.0, pictures * 3072, tensors=62), 2) for pictures in (1, 32)]
    [0.32, 0.97]
    """
    check.at_least(1, unknowns=unknowns)
    return math.exp(-2 * release_information(entries, noise, tensors) / unknowns)


def gradient_function(model: nn.Module, loss_fn: LossFn, labels: Tensor) -> Callable[[Tensor], Grads]:
    """Return the map from inputs to the gradient the client would compute, for JVPs and VJPs."""
    params, buffers = parameters(model), {name: b.detach() for name, b in model.named_buffers()}

    def loss_of(p: Grads, inputs: Tensor) -> Tensor:
        return loss_fn(functional_call(model, {**p, **buffers}, (inputs,)), labels)

    return lambda inputs: grad(loss_of)(params, inputs)


def jacobian_spectral_norm(
    model: nn.Module, loss_fn: LossFn, batch: Batch, *, rng: torch.Generator, steps: int = 20, tolerance: float = 1e-3
) -> float:
    """Return the largest singular value of the Jacobian from inputs to gradient, by power iteration.

    Uses Jacobian-vector and vector-Jacobian products only, so memory stays that of a few gradients. The value is
    approached from below; `steps` caps the iterations, `tolerance` is the relative change at which they stop. The
    model must be in evaluation mode if it has BatchNorm, whose buffers cannot change under a transform.
    """
    gradient_of = gradient_function(model, loss_fn, batch.labels)
    inputs = batch.inputs.detach()
    direction = torch.randn(inputs.shape, generator=rng, device=rng.device).to(inputs)
    value = 0.0
    for _ in range(steps):
        direction = direction / direction.norm().clamp_min(torch.finfo(direction.dtype).tiny)
        pushed = jvp(gradient_of, (inputs,), (direction,))[1]
        new_value = tree.global_norm(pushed)
        pull = vjp(gradient_of, inputs)[1]
        (direction,) = pull(pushed)
        if abs(new_value - value) <= tolerance * new_value:
            return new_value
        value = new_value
    return value
