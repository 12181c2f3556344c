"""R-GAP on CNN6 and real photographs; small ones where the size does not matter, for its cost grows steeply."""

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus

from gradveil import (
    Batch,
    Chain,
    Defense,
    DualPrune,
    GaussianNoise,
    Identity,
    RandomK,
    ThreatModel,
    TopK,
    Veil,
    observe,
)
from gradveil.attacks.rgap import RGAP, margins
from gradveil.core import LossFn, Reconstruction
from gradveil.data import Dataset, load, to_pixels
from gradveil.defenses import Soteria
from gradveil.errors import NeedError
from gradveil.gradients import gradient, local_update, parameters
from gradveil.metrics import ssim
from gradveil.models import build


def logistic(outputs: Tensor, labels: Tensor) -> Tensor:
    return softplus(-(2 * labels - 1) * outputs[:, 0]).mean()


@cache
def pictures(side: int) -> Dataset:
    return load("photos", split="test", size=side)


def recover(
    index: int,
    defense: Defense,
    *,
    side: int = 16,
    outputs: int = 10,
    label: int | None = None,
    attack: RGAP = RGAP(),
    lr: float | None = None,
) -> tuple[float, float, Reconstruction]:
    """Return SSIM, MSE and the reconstruction of one photograph sent through `defense`."""
    photos = pictures(side)
    batch = photos.batch([index])
    model = build("cnn6", num_classes=outputs, input_shape=photos.input_shape, seed=index)
    loss: LossFn = logistic if outputs == 1 else cross_entropy
    batch = Batch(batch.inputs, batch.labels % outputs if label is None else torch.tensor([label]))
    sent = gradient(model, loss, batch) if lr is None else local_update(model, loss, [batch], lr)
    payload = Veil(defense, parameters(model), seed=0).seal(sent, 1, model=model, batch=batch)
    facts = {"num_classes": outputs, "mean": photos.mean, "std": photos.std, "local_lr": lr}
    seen = observe(payload, model, loss, batch, ThreatModel(), defense=defense, **facts)
    found = attack.run(seen, torch.Generator().manual_seed(0))
    guess, truth = (to_pixels(x, photos.mean, photos.std) for x in (found.inputs, batch.inputs))
    return float(ssim(guess, truth)), float((guess - truth).square().mean()), found


def test_a_photograph_is_solved_for_exactly():
    similarity, error, found = recover(0, Identity(), side=32)
    assert similarity > 0.99
    assert error < 1e-6
    assert found.loss < 1e-4


def test_dual_pruning_does_not_stop_the_attacker_who_leaves_out_missing_equations():
    similarity, error, _ = recover(1, DualPrune(), side=32)
    assert similarity > 0.99
    assert error < 1e-4


@pytest.mark.parametrize("defense", [RandomK(0.1), Soteria()], ids=repr)
def test_fewer_outputs_than_inputs_are_enough_where_gradients_arrive(defense):
    """A tenth of the classifier's gradient leaves two thirds of its inputs open, Soteria all but a fifth of them."""
    similarity, error, found = recover(4, defense)
    assert similarity > 0.99
    assert error < 1e-4
    assert found.loss < 1e-5


@pytest.mark.parametrize("index", [0, 9])
def test_ten_classes_give_the_label_too(index):
    similarity, _, found = recover(index, Identity())
    assert similarity > 0.99
    assert found.labels is not None
    assert found.labels.tolist() == pictures(16).labels[[index]].tolist()


@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("outputs", [1, 2])
def test_one_logit_and_two_classes(label, outputs):
    assert recover(3, Identity(), outputs=outputs, label=label)[0] > 0.99


@pytest.mark.parametrize("outputs", [1, 2])
def test_the_rate_of_one_local_step_is_taken_out(outputs):
    assert recover(3, Identity(), outputs=outputs, label=1, lr=0.1)[0] > 0.99


def test_the_published_attack_gets_nothing_from_pruned_gradients():
    for defense in (DualPrune(), TopK()):
        similarity, _, found = recover(2, defense, attack=RGAP(masked=False))
        assert abs(similarity) < 0.25
        assert found.loss > 1e-2  # and the attacker can tell


def test_top_k_and_noise():
    assert recover(2, TopK())[0] > 0.99
    assert abs(recover(2, GaussianNoise(1e-2))[0]) < 0.25


def test_noise_over_everything_does_not_hide_what_was_pruned():
    """Noise on the entries that were left out must not pass for equations."""
    similarity, _, found = recover(4, Chain(TopK(), GaussianNoise(1e-8)))
    assert similarity > 0.98
    assert found.loss < 1e-4


def test_margins_solve_the_equation():
    for mu in (-30.0, -2.0, -0.1, 0.3, 1.2, 1.5, 6.0):
        product = -mu / (1 + math.exp(mu))
        assert min(abs(root - mu) for root in margins(product)) < 1e-6
    assert len(margins(-0.2)) == 2
    assert margins(-1.0) == pytest.approx([1.27846], abs=1e-4)  # no solution: the nearest


@pytest.mark.parametrize("name", ["lenet", "resnet18", "mlp"])
def test_other_networks_are_refused(name):
    model = build(name, num_classes=10, input_shape=(3, 16, 16)).eval()
    batch = Batch(torch.zeros(1, 3, 16, 16), torch.zeros(1, dtype=torch.int64))
    payload = Veil(Identity(), parameters(model)).protect(model, cross_entropy, batch)
    with pytest.raises(NeedError, match="chain"):
        RGAP().run(observe(payload, model, cross_entropy, batch, ThreatModel(), num_classes=10), torch.Generator())


def test_batches_are_refused():
    model: nn.Module = build("cnn6", num_classes=10, input_shape=(3, 16, 16))
    batch = Batch(torch.zeros(2, 3, 16, 16), torch.zeros(2, dtype=torch.int64))
    payload = Veil(Identity(), parameters(model)).protect(model, cross_entropy, batch)
    with pytest.raises(NeedError, match="one example"):
        RGAP().run(observe(payload, model, cross_entropy, batch, ThreatModel(), num_classes=10), torch.Generator())
