"""The calculators against brute force on small problems."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradveil import Batch, DualPrune, ErrorFeedback, Step, TopK, theory, tree
from gradveil.core import Grads


def vector(n: int, rng: torch.Generator) -> Grads:
    return {"w": torch.randn(n, generator=rng, dtype=torch.float64)}


@pytest.mark.parametrize("defense", [DualPrune(), TopK()])
def test_gamma_is_one_minus_kept_energy(defense: DualPrune, rng: torch.Generator) -> None:
    total = vector(1000, rng)
    sent, _ = defense.apply(total, {}, Step(rng))
    kept = (tree.global_norm(sent) / tree.global_norm(total)) ** 2
    assert theory.gamma(total, sent) == pytest.approx(1 - kept)


def test_degradation_bounds_hold_for_random_attackers(rng: torch.Generator) -> None:
    for _ in range(200):
        true = vector(50, rng)
        sent, _ = DualPrune(0.1, 0.5).apply(true, {}, Step(rng))
        g = theory.gamma(true, sent)
        noise = torch.randn(50, generator=rng, dtype=torch.float64) * 10 ** (
            torch.rand(1, generator=rng).item() * 3 - 2
        )
        attacker = sent["w"] + noise
        distance = float((attacker - sent["w"]).norm())
        assert float((attacker - true["w"]).norm()) <= theory.euclidean_degradation(
            distance, g, tree.global_norm(true)
        ) * (1 + 1e-9)

        def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
            return 1 - float(a @ b / (a.norm() * b.norm()))

        assert cosine(attacker, true["w"]) <= theory.cosine_degradation(cosine(attacker, sent["w"]), g) + 1e-9
        masked = attacker * (sent["w"] != 0)
        tight = theory.cosine_degradation(cosine(masked, sent["w"]), g, orthogonal=True)
        assert cosine(masked, true["w"]) == pytest.approx(tight)


def test_residual_bound_holds_for_topk_and_is_void_for_a_constant_gradient_under_dual_pruning(
    rng: torch.Generator,
) -> None:
    step = Step(rng)
    top_k = ErrorFeedback(TopK(0.2))
    grads = {"w": torch.randn(200, generator=rng)}
    norm = tree.global_norm(grads)
    state, worst = top_k.init(grads), 0.0
    for _ in range(100):
        sent, new = top_k.apply(grads, state, step)
        total = tree.add(grads, tree.only("residual", state))
        worst, state = max(worst, theory.gamma(total, sent)), new
        assert tree.global_norm(tree.only("residual", state)) ** 2 <= theory.residual_bound(worst, norm)

    dual = ErrorFeedback(DualPrune())
    state, norms = dual.init(grads), []
    for _ in range(200):
        sent, new = dual.apply(grads, state, step)
        total = tree.add(grads, tree.only("residual", state))
        last, state = theory.gamma(total, sent), new
        norms.append(tree.global_norm(tree.only("residual", state)))
    assert norms[-1] > 1.8 * norms[99]  # grows in step with time
    assert last > 0.99


def test_convergence_bound_holds_on_a_quadratic(rng: torch.Generator) -> None:
    scale = torch.linspace(0.1, 1.0, 30)  # f(x) = sum scale x^2 / 2, so L = 1 and the minimum is 0
    x, defense, step = torch.ones(30), ErrorFeedback(TopK(0.3)), Step(rng)
    state, lr, rounds = defense.init({"w": x}), 0.2, 300
    gap = float((scale * x**2).sum() / 2)
    squares, worst, largest = [], 0.0, 0.0
    for _ in range(rounds):
        g = {"w": scale * x}
        squares.append(tree.global_norm(g) ** 2)
        largest = max(largest, squares[-1] ** 0.5)
        total = tree.add(g, tree.only("residual", state))
        sent, state = defense.apply(g, state, step)
        worst = max(worst, theory.gamma(total, sent))
        x = x - lr * sent["w"]
    bound = theory.convergence_bound(
        gap=gap, lr=lr, rounds=rounds, smoothness=1.0, noise=0.0, users=1, gamma=worst, gradient_norm=largest
    )
    assert sum(squares) / rounds <= bound
    assert theory.corollary_step(gap=gap, rounds=rounds, smoothness=1.0, noise=1.0, users=4) <= 0.5
    with pytest.raises(ValueError, match="lr must be at most"):
        theory.convergence_bound(gap=1, lr=1.0, rounds=1, smoothness=1.0, noise=0, users=1, gamma=0.5, gradient_norm=1)


def test_corollary_balances_the_first_two_terms() -> None:
    common = {"gap": 2.0, "rounds": 10_000, "smoothness": 3.0, "noise": 1.5, "users": 10}
    lr = theory.corollary_step(**common)  # type: ignore[arg-type]
    first = 4 * 2.0 / (lr * 10_000)
    second = 2 * 3.0 * lr * 1.5**2 / 10
    assert first == pytest.approx(second)


def test_spectral_norm_equals_the_svd_of_the_whole_jacobian(rng: torch.Generator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3)).double()
    batch = Batch(torch.randn(1, 6, generator=rng, dtype=torch.float64), torch.tensor([1]))
    gradient_of = theory.gradient_function(model, cross_entropy, batch.labels)
    whole = torch.func.jacrev(gradient_of)(batch.inputs)
    matrix = torch.cat([j.reshape(-1, 6) for j in whole.values()])
    exact = float(torch.linalg.svdvals(matrix)[0])
    found = theory.jacobian_spectral_norm(model, cross_entropy, batch, rng=rng, steps=200, tolerance=1e-10)
    assert found == pytest.approx(exact, rel=1e-4)

    nearby = batch.inputs + 1e-4 * torch.randn(1, 6, generator=rng, dtype=torch.float64)
    moved = tree.global_norm(tree.sub(gradient_of(nearby), gradient_of(batch.inputs)))
    bound = theory.reconstruction_lower_bound(moved, found)
    assert bound <= float((nearby - batch.inputs).norm()) * 1.01
    assert theory.reconstruction_lower_bound(0.0, found) == 0.0
    assert math.isinf(theory.residual_bound(1.0, 1.0))
