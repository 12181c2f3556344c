from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

from gradveil import (
    Attack,
    Batch,
    Chain,
    Defense,
    DualPrune,
    GaussianNoise,
    Identity,
    Observation,
    RandomK,
    ThreatModel,
    TopK,
    Veil,
    observe,
)
from gradveil.attacks.analytic import LinearReadout
from gradveil.attacks.lowrank import LowRankCompletion
from gradveil.attacks.received import received
from gradveil.errors import NeedError
from gradveil.gradients import parameters


def photos(count: int) -> Tensor:
    """Real photographs, 32 x 32, scaled to about unit variance as models receive them."""
    from skimage import data

    crops = []
    for image in (data.astronaut(), data.chelsea(), data.coffee(), data.rocket()):
        picture = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None] / 255
        h, w = picture.shape[2] // 2, picture.shape[3] // 2
        corners = ((0, 0), (h, w), (h // 2, w // 2))
        crops += [interpolate(picture[:, :, i : i + h, j : j + w], (32, 32), mode="area") for i, j in corners]
    return (torch.cat(crops)[:count] - 0.5) / 0.25


def mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.ReLU(), nn.Linear(256, 10))


def upload(model: nn.Module, inputs: Tensor, defense: Defense) -> Observation:
    batch = Batch(inputs, torch.arange(len(inputs)) % 10)
    payload = Veil(defense, parameters(model), seed=0).protect(model, cross_entropy, batch)
    return observe(
        payload, model, cross_entropy, batch, ThreatModel(), num_classes=10, mean=(0.5,), std=(0.25,), defense=defense
    )


def psnr(guess: Tensor, truth: Tensor) -> list[float]:
    """The best score of each truth over all guesses, in pixels of 0..1."""
    errors = (0.25 * (guess[None] - truth[:, None])).square().flatten(2).mean(2)
    return (-10 * errors.clamp_min(1e-12).log10()).max(1).values.tolist()


def run(attack: Attack, seen: Observation) -> Tensor:
    return attack.run(seen, torch.Generator().manual_seed(0)).inputs


def test_one_example_is_read_exactly():
    truth = photos(1)
    guess = run(LinearReadout(), upload(mlp(), truth, Identity()))
    assert float((guess - truth).square().mean()) < 1e-10


def test_a_linear_classifier_gives_mixtures_not_pictures():
    torch.manual_seed(0)
    truth = photos(8)
    guess = run(LinearReadout(), upload(nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), truth, Identity()))
    assert guess.shape == truth.shape
    assert max(psnr(guess, truth)) < 40


@pytest.mark.parametrize("defense", [DualPrune(), DualPrune(0.2, 0.6), TopK(), RandomK()], ids=lambda d: d.key())
def test_pruning_does_not_hide_a_rank_one_gradient(defense):
    for truth in photos(3).split(1):
        seen = upload(mlp(), truth, defense)
        completed = psnr(run(LowRankCompletion(), seen), truth)[0]
        assert completed >= 30
        assert completed >= psnr(run(LinearReadout(), seen), truth)[0]


@pytest.mark.parametrize("inner", [DualPrune(), TopK()], ids=lambda d: d.key())
def test_noise_over_everything_does_not_hide_what_was_pruned(inner):
    for truth in photos(2).split(1):
        seen = upload(mlp(), truth, Chain(inner, GaussianNoise(1e-3)))
        found = {attack: psnr(run(attack, seen), truth)[0] for attack in (LowRankCompletion(), LinearReadout())}
        told_nothing = {attack: psnr(run(attack, replace(seen, defense=None)), truth)[0] for attack in found}
        assert found[LowRankCompletion()] >= 30
        assert all(found[attack] > told_nothing[attack] + 3 for attack in found)


def test_noise_that_drowns_a_tensor_leaves_the_attacker_what_arrived():
    seen = upload(mlp(), photos(1), Chain(DualPrune(), GaussianNoise(10.0)))
    assert all(bool(g.any()) for g in received(seen).grads.values())


@pytest.mark.parametrize("defense", [Identity(), DualPrune()], ids=lambda d: d.key())
def test_a_batch_of_eight_comes_apart(defense):
    truth = photos(8)
    assert min(psnr(run(LowRankCompletion(), upload(mlp(), truth, defense)), truth)) >= 30


def test_the_loss_tells_a_failed_completion_from_a_good_one():
    good = LowRankCompletion().run(upload(mlp(), photos(1), DualPrune()), torch.Generator().manual_seed(0))
    seen = upload(mlp(), photos(1), DualPrune())
    shuffled = {k: v.flatten()[torch.randperm(v.numel())].view_as(v) for k, v in seen.grads.items()}
    bad = LowRankCompletion().run(Observation(**{**vars(seen), "grads": shuffled}), torch.Generator().manual_seed(0))
    assert good.loss < 1e-5 < 0.1 < bad.loss


@pytest.mark.parametrize("attack", [LinearReadout(), LowRankCompletion()], ids=lambda a: a.key())
def test_a_model_without_a_first_linear_layer_is_refused(attack):
    model = nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.Flatten(), nn.Linear(900, 10))
    with pytest.raises(NeedError, match="first layer"):
        attack.run(upload(model, photos(1), Identity()), torch.Generator())


@pytest.mark.parametrize("attack", [LinearReadout(), LowRankCompletion()], ids=lambda a: a.key())
def test_an_all_zero_upload_gives_finite_guesses(attack):
    seen = upload(mlp(), photos(2), Identity())
    empty = Observation(**{**vars(seen), "grads": {k: torch.zeros_like(v) for k, v in seen.grads.items()}})
    assert bool(torch.isfinite(attack.run(empty, torch.Generator().manual_seed(0)).inputs).all())
