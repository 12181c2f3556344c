"""One class fished out of a batch: that it works, that the guard does not see it, and that `hardened` bounds it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil import Batch, Hardened, Veil, theory, tree, unseal
from gradveil.attacks import Fishing, eased_matching
from gradveil.attacks.imitation import understand
from gradveil.defenses import Chain, GaussianNoise
from gradveil.errors import NeedError
from gradveil.gradients import parameters, per_example_gradient
from gradveil.guard import Guard
from gradveil.models import build

from . import attack_kit as kit

LABEL = 0
SHAPE = kit.PHOTOS.input_shape
FOUND = eased_matching(steps=150, tv_first=30.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fishing(**fields: object) -> Fishing:
    return replace(Fishing(FOUND, label=LABEL), **fields).fitted(None, kit.PHOTOS.mean, kit.PHOTOS.std)


def crowd(count: int = 8, own: int = 1) -> Batch:
    """Return a batch with `own` pictures of the class that is fished, the others of any other class."""
    batch = kit.batch(0, count)
    others = torch.arange(count) % (kit.PHOTOS.num_classes - 1) + 1
    return Batch(batch.inputs, torch.where(torch.arange(count) < own, LABEL, others))


def shares(model: nn.Module, batch: Batch) -> Tensor:
    """Return the share of each example in the squared gradient of the layers before the classifier."""
    each = per_example_gradient(model, cross_entropy, batch)
    squares = sum(g.flatten(1).square().sum(1) for name, g in each.items() if not name.startswith("classifier"))
    assert isinstance(squares, Tensor)
    return squares / squares.sum()


@pytest.mark.parametrize("name", ["lenet", "cnn6", "mlp", "vgg11", "resnet18"])
def test_one_class_alone_answers_and_only_one_row_changed(name: str) -> None:
    own, batch = kit.model(name), crowd()
    planted = fishing().plant(own, SHAPE, rng())
    assert float(shares(own, batch)[0]) < 0.5
    assert float(shares(planted, batch)[0]) > 0.95
    before, after = parameters(own), parameters(planted)
    changed = [n for n in before if not torch.equal(before[n], after[n])]
    assert set(changed) <= {"classifier.weight", "classifier.bias"}
    rows = (before["classifier.weight"] != after["classifier.weight"]).any(1)
    assert rows.tolist() == [i == LABEL for i in range(len(rows))]


def test_the_guard_lets_it_pass() -> None:
    """As docs/guard.md says: a classifier has too few rows to be looked at, and no structure changes."""
    own = kit.model("cnn6")
    Guard.pin(own).admit(fishing().plant(own, SHAPE, rng()), input_shape=SHAPE)


def test_the_picture_comes_out_of_noise_that_hides_the_batch() -> None:
    """Behind the noise of `hardened` on a batch of 32: found where the noise follows the mean, lost where it follows
    the largest example."""
    own, batch = kit.model("cnn6"), crowd(32)
    one = Batch(batch.inputs[:1], batch.labels[:1])
    attack = fishing()
    planted = attack.plant(own, SHAPE, rng())
    loose, bound = (Hardened(noise=0.5, balance=balance) for balance in (0.0, 1.0))
    fished = kit.ssim(attack, kit.uploads(planted, [batch], loose, active=True), [one])
    covered = kit.ssim(attack, kit.uploads(planted, [batch], bound, active=True), [one])
    whole = kit.ssim(FOUND, kit.uploads(own, [batch], loose), [one])
    assert fished > 0.3
    assert covered < 0.22
    assert whole < 0.22


def test_the_attacker_weighs_tensors_as_the_noise_on_them_is() -> None:
    """It tries the release out on gradients of its own, which are as large where it takes the label it knows."""
    planted, batch = fishing().plant(kit.model("cnn6"), SHAPE, rng()), crowd(32)
    view = fishing()._caught(kit.uploads(planted, [batch], Hardened(balance=0), active=True)[0])
    assert view is not None
    known = understand(view).behaviour
    assert known is not None
    off = [known[name].noise / float(g.square().mean().sqrt()) for name, g in view.grads.items()]
    assert max(off) < 3 * min(off)


def test_a_batch_without_the_class_gives_no_guess_and_several_give_as_many() -> None:
    own = kit.model("lenet")
    attack = fishing(inner=eased_matching(steps=2))
    planted = attack.plant(own, SHAPE, rng())
    batches = [crowd(6, own=0), crowd(6, own=2)]
    found = attack.run_many(kit.uploads(planted, batches, active=True), kit.rngs(2))
    assert [len(f.inputs) for f in found] == [0, 2]


def test_it_says_what_it_needs() -> None:
    assert Fishing().needs == {"active", "prior"}
    with pytest.raises(ValueError, match="label must be below the 5 classes"):
        Fishing(label=7).plant(build("lenet", num_classes=5, input_shape=SHAPE), SHAPE, rng())
    with pytest.raises(NeedError, match="three classes"):
        Fishing().plant(build("lenet", num_classes=2, input_shape=SHAPE), SHAPE, rng())
    seen = kit.fedavg(kit.model("lenet"), crowd(4), steps=2, lr=0.1)
    with pytest.raises(NeedError, match="one step"):
        fishing().run_many([seen], kit.rngs(1))


def test_without_labels_it_takes_the_batch_to_hold_one_picture_of_the_class() -> None:
    own, batch = kit.model("cnn6"), crowd(8)
    attack = fishing(inner=eased_matching(steps=100, tv_first=30.0))
    planted = attack.plant(own, SHAPE, rng())
    seen = kit.uploads(planted, [batch], active=True, labels=False)
    (found,) = attack.run_many(seen, kit.rngs(1))
    assert found.inputs.shape == (1, *SHAPE)
    assert kit.ssim(attack, seen, [Batch(batch.inputs[:1], batch.labels[:1])]) > 0.25


def noise_of(defense: Hardened, model: nn.Module, batch: Batch) -> dict[str, float]:
    """Return the size of the noise on each tensor of a first upload, which its smallest level tells."""
    payload = Veil(defense, parameters(model), seed=1, guard=None).protect(model, cross_entropy, batch)
    noise = defense.strength(sum(p.numel() for p in parameters(model).values()))
    return {n: float(g.abs().min()) / defense.levels(noise)[0] for n, g in unseal(payload).items()}


def test_the_noise_of_hardened_follows_the_largest_example() -> None:
    """Of eight equal examples none stands out; of one that alone answers the noise grows by the root of the eight."""
    own, batch = kit.model("cnn6"), crowd(8)
    planted = fishing().plant(own, SHAPE, rng())
    same = Batch(batch.inputs[:1].expand(8, *SHAPE), batch.labels[:1].expand(8))
    loose, bound = Hardened(examples=8, balance=0), Hardened(examples=8, balance=1)
    assert noise_of(loose, own, same) == noise_of(bound, own, same)
    before, after = noise_of(loose, planted, batch), noise_of(bound, planted, batch)
    grid = 2**0.25
    for name in before:
        if not name.startswith("classifier"):
            assert math.sqrt(8) / grid <= after[name] / before[name] * 1.001
            assert after[name] / before[name] <= math.sqrt(8) * grid * 1.001


@pytest.mark.parametrize("balance", [0.25, 1.0])
@pytest.mark.parametrize("planted", [False, True])
def test_no_example_gets_more_than_its_bound(balance: float, planted: bool) -> None:
    model, batch = kit.model("cnn6"), crowd(16)
    model = fishing().plant(model, SHAPE, rng()) if planted else model
    defense = Hardened(examples=16, balance=balance)
    noise = noise_of(defense, model, batch)
    each = per_example_gradient(model, cross_entropy, batch)
    nats = sum((g.flatten(1) / 16).square().sum(1) / (2 * noise[name] ** 2) for name, g in each.items())
    assert isinstance(nats, Tensor)
    entries = sum(p.numel() for p in parameters(model).values())
    bound = theory.example_information(entries, defense.strength(entries), balance * 16)
    assert float(nats.max()) <= bound * 1.001
    if planted and balance == 1:
        loose = noise_of(replace(defense, balance=0), model, batch)
        nats = sum((g.flatten(1) / 16).square().sum(1) / (2 * loose[name] ** 2) for name, g in each.items())
        assert isinstance(nats, Tensor)
        assert float(nats.max()) > 2 * bound  # else the bound would show nothing


def test_the_largest_of_all_that_was_mixed_counts() -> None:
    """A model that fishes in one round and gives next to nothing in the next leaves the first one covered."""
    own, batch = kit.model("cnn6"), crowd(8)
    defense = Hardened(examples=16, balance=1, bits=0)
    big = {n: torch.full((), 1.0) for n in parameters(own)}
    g = tree.tmap(lambda p: torch.full_like(p, 0.1), parameters(own))
    small = tree.tmap(lambda p: 1e-6 * p, g)
    veil = Veil(defense, parameters(own), seed=0, guard=None)
    assert not any(t.any() for t in unseal(veil.seal(g, 8, largest=big)).values())
    sent = unseal(veil.seal(small, 8, largest=tree.tmap(lambda t: 1e-6 * t, big)))
    noise = defense.strength(sum(p.numel() for p in g.values()))
    for tensor in sent.values():
        if tensor.numel() > 1000:
            assert float(tensor.std()) == pytest.approx(noise * 4, rel=0.25)  # 4 is the root of 16; the grid adds
    assert all(not bool(v.any()) for v in tree.only("single", veil._state).values()), "and then it starts anew"
    assert len(batch.labels) == 8


def test_an_example_alone_in_its_batch_weighs_what_its_gradient_does() -> None:
    g = {"w": torch.ones(10, 500)}
    veil = Veil(Hardened(examples=4, balance=1, bits=0, noise=8.0), g, seed=0, guard=None)
    for _ in range(3):
        veil.seal(tree.zeros_like(g), 1)
    assert float(unseal(veil.seal(g, 1))["w"].std()) == pytest.approx(16.0, rel=0.05)


def test_who_weighs_examples_says_so() -> None:
    assert Hardened().weighs_examples
    assert Chain(Hardened(), GaussianNoise(0.1)).weighs_examples
    assert not Hardened(balance=0).weighs_examples
    assert not Hardened(examples=1).weighs_examples
    assert not GaussianNoise(0.1).weighs_examples
