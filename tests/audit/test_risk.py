"""The fast score against what can be worked out by hand."""

import math

import pytest
import torch
from torch import nn

from gradveil import GaussianNoise, Identity, RandomK, dgp
from gradveil.audit import Plan, clients, risk, subject
from gradveil.gradients import gradient
from gradveil.veil import derive_rng


@pytest.fixture(scope="module")
def scene():
    plan = Plan(model="lenet", data="digits", pictures=2, batch_size=1, round=0)
    defenses = {
        "none": Identity(),
        "dgp": dgp(),
        "little": GaussianNoise(1e-3),
        "much": GaussianNoise(1.0),
        "few": RandomK(0.002),
    }
    found = subject(plan, defenses=defenses)
    column = clients.column_info("diagnostic", plan, found)
    return found, lambda name: clients.uploads(plan, found, column, name)


def test_clients_compute_in_full_precision(scene, monkeypatch) -> None:
    allowed = []

    def spy(*args):
        allowed.append(torch.backends.cudnn.allow_tf32)
        return gradient(*args)

    monkeypatch.setattr(clients, "gradient", spy)
    with torch.backends.cudnn.flags(allow_tf32=True):
        scene[1]("none")
    assert allowed
    assert not any(allowed)


def test_directions_span_the_coarse_picture() -> None:
    flat = risk.smooth_directions((3, 16, 16)).flatten(1)
    assert flat.shape == (3 * risk.SIDE**2, 768)
    assert torch.allclose(flat @ flat.T, torch.eye(len(flat)), atol=1e-5)


def test_jacobian_columns_are_derivatives(scene) -> None:
    _, uploads = scene
    sent = uploads("none")[0]
    directions = risk.smooth_directions((1, 8, 8))[:3]
    jacobian = risk.Jacobian(sent, directions, 0)
    gradient_of = risk.gradient_function(sent.seen.model.double(), sent.seen.loss_fn, sent.trained_on.labels)
    x, step = sent.trained_on.inputs.double(), 1e-4
    for column, direction in zip(jacobian.columns, directions.double(), strict=True):
        high, low = (jacobian.flat(gradient_of(x + sign * step * direction)) for sign in (1, -1))
        assert torch.allclose(column.double(), (high - low) / (2 * step), rtol=1e-3, atol=1e-6)


def test_score_falls_with_noise_and_bound_rises(scene) -> None:
    found, uploads = scene
    score = risk.fast_score(uploads, found, seed=0)
    readable = {r.defense: sum(r.readable) / len(r.readable) for r in score.risks}
    bounds = {r.defense: sum(r.bound) / len(r.bound) for r in score.risks}
    assert readable["none"] > readable["little"] > readable["much"]
    assert readable["dgp"] > readable["few"]
    assert all(0 <= value <= 1 for value in readable.values())
    assert bounds["none"] == 0
    assert bounds["dgp"] > 0
    assert bounds["much"] > bounds["little"]


def test_bound_is_that_of_proposition_one(scene) -> None:
    """In a linear gradient map the bound is tight along the leading singular direction."""
    found, uploads = scene
    sent = uploads("dgp")[0]
    jacobian = risk.Jacobian(sent, risk.smooth_directions((1, 8, 8))[:1], 0)
    distance = math.sqrt(sum(float((sent.seen.grads[k] - g).square().sum()) for k, g in sent.grads.items()))
    expected = distance / jacobian.spectral_norm * found.victims.std[0] / math.sqrt(64)
    assert jacobian.bound(sent, found.victims) == pytest.approx(expected, rel=1e-4)


def test_nothing_sent_nothing_read(scene) -> None:
    _, uploads = scene
    sent = uploads("none")[0]
    jacobian = risk.Jacobian(sent, risk.smooth_directions((1, 8, 8)), 0)
    for value in sent.seen.grads.values():
        value.zero_()
    assert jacobian.readable(sent, torch.ones(len(jacobian.columns))) == 0.0


def test_a_large_model_is_sampled(monkeypatch) -> None:
    plan = Plan(model="lenet", data="digits", pictures=1, batch_size=1, round=0)
    found = subject(plan)
    column = clients.column_info("diagnostic", plan, found)
    sent = clients.uploads(plan, found, column, "none")[0]
    directions = risk.smooth_directions((1, 8, 8))
    variance = risk.prior_variance(found.public, directions)
    whole = risk.Jacobian(sent, directions, 0).readable(sent, variance)
    monkeypatch.setattr(risk, "SAMPLE", 1500)
    part = risk.Jacobian(sent, directions, 0)
    assert part.columns.shape[1] == 1500
    assert part.readable(sent, variance) == pytest.approx(whole, abs=0.05)


def test_a_slow_model_is_scored_on_fewer_pictures(scene, monkeypatch) -> None:
    found, uploads = scene
    monkeypatch.setattr(risk, "PATIENCE", 0.0)
    score = risk.fast_score(uploads, found, seed=0)
    assert {len(r.readable) for r in score.risks} == {1}


def test_rank_correlation() -> None:
    def of(a, b):
        return risk.rank_correlation(list(zip(a, b, strict=True)))

    assert of([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert of([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert of([1, 1, 1, 1], [1, 2, 3, 4]) is None
    assert of([1, 2, 3], [1, 2, 3]) is None
    assert of([1, 2, 3, 4, math.nan], [1, 2, 3, 4, 5]) == pytest.approx(1.0)


def test_an_impatient_score_looks_at_the_coarsest_directions_only(scene, monkeypatch) -> None:
    found, uploads = scene
    full = risk.fast_score(uploads, found, seed=0)
    monkeypatch.setattr(risk, "PATIENCE", 0.0)
    short = risk.fast_score(uploads, found, seed=0)
    assert short.directions == risk.AT_ONCE < full.directions
    assert all(len(one.readable) == 1 for one in short.risks)


def test_nothing_global_is_drawn(scene) -> None:
    before = torch.random.get_rng_state()
    found, uploads = scene
    risk.fast_score(uploads, found, seed=0)
    assert torch.equal(before, torch.random.get_rng_state())
    assert derive_rng(0, "risk", 0).initial_seed() == derive_rng(0, "risk", 0).initial_seed()
    assert isinstance(found.model, nn.Module)
