"""Labels read off the classifier's gradient."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from gradveil.attacks.labels import classifier_gradient, from_consistency, infer_labels
from gradveil.core import Batch
from gradveil.defenses import Chain, ClipNoise, DualPrune, GaussianNoise, TopK, dgp
from gradveil.errors import NeedError

from .attack_kit import batch, fedavg, model, uploads

ONES = [batch(i) for i in range(6)]


def right(seen, batches):
    """Return the share of labels found, counted with repetitions."""
    found = [Counter(infer_labels(s).tolist()) & Counter(b.labels.tolist()) for s, b in zip(seen, batches, strict=True)]
    return sum(hits.total() for hits in found) / sum(len(b.labels) for b in batches)


@pytest.mark.parametrize("name", ["lenet", "cnn6", "vgg11", "resnet18"])
def test_exact_for_one_undefended_example(name):
    some = ONES if name in ("lenet", "cnn6") else ONES[:3]
    seen = uploads(model(name), some, labels=False)
    assert all(one.labels is None for one in seen)
    assert right(seen, some) == 1.0


@pytest.mark.parametrize("defense", [DualPrune(), DualPrune(rounding="ceil"), TopK(0.05), GaussianNoise(1e-3)])
@pytest.mark.parametrize("name", ["lenet", "cnn6"])
def test_one_example_under_pruning_and_noise(name, defense):
    assert right(uploads(model(name), ONES, defense, labels=False), ONES) >= 0.8


@pytest.mark.parametrize("name", ["lenet", "mlp"])
@pytest.mark.parametrize("noise", [1e-4, 1e-2])
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_one_example_under_pruning_and_noise_in_either_order(name, noise, rounding):
    prune, cover = dgp(rounding=rounding), GaussianNoise(noise)
    for defense in (Chain(prune, cover), Chain(cover, prune)):
        assert right(uploads(model(name), ONES, defense, labels=False), ONES) >= 0.8


def test_batches_under_pruning_and_noise_in_either_order():
    some = [batch(i, 8) for i in range(0, 40, 8)]
    for defense in (Chain(dgp(), GaussianNoise()), Chain(GaussianNoise(), dgp())):
        assert right(uploads(model(), some, defense, labels=False), some) >= 0.8


@pytest.mark.parametrize("name", ["cnn6", "mlp"])
def test_what_top_k_leaves_out_of_a_batch_is_small(name):
    some = [batch(i, 8) for i in range(0, 40, 8)]
    assert right(uploads(model(name), some, TopK(0.05), labels=False), some) >= 0.8


def test_a_pruned_label_row_is_found_by_what_the_others_say():
    # Without its label row, and without any negative entry, the rest of the gradient still names the class.
    seen = uploads(model("resnet18"), ONES[:4], DualPrune(0.2, 0.6), labels=False)
    found = 0
    for one, b in zip(seen, ONES, strict=False):
        weight, _, layer = classifier_gradient(one)
        weight = weight.clone()
        weight[b.labels] = 0.0
        found += int(from_consistency(weight, layer)) == int(b.labels)
    assert found >= 3


@pytest.mark.parametrize("name", ["lenet", "cnn6"])
def test_repeated_labels_in_a_batch(name):
    picture = batch(0, 8)
    labels = torch.tensor([3, 3, 3, 5, 5, 7, 1, 0])
    repeated = [Batch(picture.inputs, labels), Batch(picture.inputs, labels.flip(0) + 2)]
    assert right(uploads(model(name), repeated, labels=False), repeated) >= 0.8


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_batches_whose_classifier_was_pruned(name):
    some = [batch(i, 8) for i in range(0, 40, 8)]
    assert right(uploads(model(name), some, dgp(), labels=False), some) >= 0.8


@pytest.mark.parametrize("name", ["lenet", "mlp"])
def test_batches_whose_gradient_was_clipped(name):
    some = [batch(i, 8) for i in range(0, 40, 8)]
    assert right(uploads(model(name), some, ClipNoise(0.1, 0.0), labels=False), some) >= 0.9


def test_an_update_of_several_local_steps():
    b = batch(0, 4)
    seen = replace(fedavg(model("lenet"), b, steps=3, lr=0.01), labels=None)
    assert right([seen], [b]) >= 0.75


def test_no_classifier_no_answer():
    seen = uploads(model("lenet"), ONES[:1], labels=False)[0]
    rest = {name: g for name, g in seen.grads.items() if not name.startswith("classifier")}
    with pytest.raises(NeedError, match="did not arrive"):
        infer_labels(replace(seen, grads=rest))
