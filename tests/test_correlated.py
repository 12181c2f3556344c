"""Correlated noise: what it adds, what its strategy matrix allows one example, and what that is worth in epsilon."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

from gradveil import Step, Veil, unseal
from gradveil.core import Grads
from gradveil.defenses import CorrelatedNoise, correlated_epsilon, epsilon, gaussian_epsilon, strategy_sensitivity
from gradveil.errors import StateError


def strategy(correlation: float, rounds: int) -> np.ndarray:
    """Return C by inverting what the defense does to the noise."""
    return np.linalg.inv(np.eye(rounds) - correlation * np.eye(rounds, k=-1))


def patterns(rounds: int, participations: int, separation: int) -> list[tuple[int, ...]]:
    """Return every choice of rounds that one example may take part in."""
    chosen = (p for k in range(1, participations + 1) for p in itertools.combinations(range(rounds), k))
    return [p for p in chosen if all(b - a >= separation for a, b in itertools.pairwise(p))]


@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("rounds", [1, 5, 8])
@pytest.mark.parametrize(("participations", "separation"), [(1, 1), (3, 1), (2, 3), (3, 2), (9, 2), (4, 7)])
def test_sensitivity_is_the_worst_over_all_participations(
    correlation: float, rounds: int, participations: int, separation: int
) -> None:
    c = strategy(correlation, rounds)
    gram = c.T @ c
    assert gram.min() >= -1e-12, "contributions that point the same way are the worst only if no product is negative"
    brute = max(math.sqrt(gram[np.ix_(p, p)].sum()) for p in patterns(rounds, participations, separation))
    found = strategy_sensitivity(correlation, rounds=rounds, participations=participations, separation=separation)
    assert found == pytest.approx(brute, rel=1e-9)


def test_no_directions_move_the_mechanism_further() -> None:
    c, draw = strategy(0.8, 7), np.random.default_rng(0)
    worst = strategy_sensitivity(0.8, rounds=7, participations=3, separation=2)
    for pattern in patterns(7, 3, 2):
        x = draw.normal(size=(20, len(pattern), 3))
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        moved = np.linalg.norm(np.einsum("tp,npd->ntd", c[:, pattern], x), axis=(1, 2))
        assert moved.max() <= worst + 1e-9


@pytest.mark.parametrize("noise", [0.2, 1.0, 5.0, 40.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-6])
def test_epsilon_is_that_of_the_gaussian_mechanism(noise: float, delta: float) -> None:
    found = gaussian_epsilon(noise, delta)

    def overshoot(x: float) -> float:
        return max(norm.pdf(x, 1, noise) - math.exp(found) * norm.pdf(x, 0, noise), 0.0)

    edge = 0.5 + found * noise**2  # where the two densities stand in the ratio e^epsilon
    spent = quad(overshoot, edge, edge + 40 * noise, epsabs=1e-12, limit=400)[0]
    if found:
        assert spent == pytest.approx(delta, rel=1e-3, abs=1e-10)
    else:
        assert spent <= delta


def test_without_correlation_it_is_no_better_than_the_general_accountant_says() -> None:
    pytest.importorskip("opacus")
    exact = correlated_epsilon(4.0, correlation=0.0, rounds=30, participations=10, separation=3, delta=1e-5)
    bound = epsilon(4.0, steps=10, delta=1e-5)
    assert 0.8 * bound < exact <= bound


def test_correlation_buys_a_better_sum_at_the_same_epsilon() -> None:
    """The model follows the sum of the uploads: its noise, for noise scaled to the same epsilon, must fall."""

    def noise_of_the_sum(correlation: float, rounds: int = 200) -> float:
        reach = strategy_sensitivity(correlation, rounds=rounds, participations=1)
        return reach * math.sqrt(1 + (1 - correlation) ** 2 * (rounds - 1))

    assert noise_of_the_sum(0.9) < 0.3 * noise_of_the_sum(0.0)


def test_the_noise_is_fresh_less_a_share_of_the_last() -> None:
    defense = CorrelatedNoise(clip=2.0, noise_multiplier=1.5, correlation=0.7)
    veil = Veil(defense, {"w": torch.zeros(50_000)}, seed=1)
    nothing: Grads = {"w": torch.zeros(4, 50_000)}
    sent = [4 * unseal(veil.seal(nothing, 4))["w"] for _ in range(4)]
    assert float(sent[0].std()) == pytest.approx(3.0, rel=0.02)
    for before, now in itertools.pairwise(sent):
        assert float(now.std()) == pytest.approx(3.0 * math.sqrt(1 + 0.7**2), rel=0.02)
        share = float((before * now).mean() / 9.0)
        assert share == pytest.approx(-0.7, abs=0.05)
    assert float((sent[0] * sent[2]).mean() / 9.0) == pytest.approx(0.0, abs=0.05)


def test_examples_are_clipped_over_all_tensors() -> None:
    rng = torch.Generator().manual_seed(0)
    each = {"w": torch.randn(5, 30, generator=rng), "b": torch.randn(5, generator=rng)}
    defense = CorrelatedNoise(clip=0.5, noise_multiplier=0.0)
    sent, _ = defense.apply(each, defense.init({"w": torch.zeros(30), "b": torch.zeros(())}), Step(rng))
    rows = torch.cat([each["w"], each["b"][:, None]], 1)
    wanted = (rows * (0.5 / rows.norm(dim=1, keepdim=True)).clamp_max(1)).mean(0)
    torch.testing.assert_close(torch.cat([sent["w"], sent["b"][None]]), wanted)


def test_a_state_of_another_model_is_refused() -> None:
    defense = CorrelatedNoise()
    with pytest.raises(StateError, match="init"):
        defense.apply({"w": torch.zeros(1, 2)}, defense.init({"v": torch.zeros(2)}), Step(torch.Generator()))


@pytest.mark.parametrize("wrong", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"correlation": 1.5}])
def test_arguments(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        CorrelatedNoise(**wrong)
