"""Active attacks, on real photographs. Copies count as exact above SSIM 0.99."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil import (
    Attack,
    Batch,
    Chain,
    Defense,
    DualPrune,
    GaussianNoise,
    Hardened,
    Identity,
    Observation,
    RandomK,
    ThreatModel,
    TopK,
    Veil,
    adgp,
    dgp,
    observe,
)
from gradveil.attacks.analytic import LinearReadout
from gradveil.attacks.imprint import Imprint, Planted
from gradveil.attacks.pruning import pruned_shares
from gradveil.attacks.spotlight import OwnSpotlight, Spotlight, smoothed
from gradveil.attacks.traps import TrapWeights
from gradveil.core import Grads, State, Step
from gradveil.data import Dataset, load, to_pixels
from gradveil.errors import NeedError
from gradveil.gradients import gradient, parameters
from gradveil.guard import Guard
from gradveil.metrics import aligned, pair, ssim
from gradveil.models import build

PHOTOS = load("photos", split="test")


def upload(model: nn.Module, batch: Batch, defense: Defense, data: Dataset = PHOTOS) -> Observation:
    veil = Veil(defense, parameters(model), seed=0, guard=None)
    mask = veil.propose(gradient(model, cross_entropy, batch)) if "mask" in defense.needs else None
    return observe(
        veil.protect(model, cross_entropy, batch, mask=mask),
        model,
        cross_entropy,
        batch,
        ThreatModel(active=True),
        num_classes=data.num_classes,
        mean=data.mean,
        std=data.std,
        defense=defense,
        mask=mask,
    )


def steal(
    attack: Attack, name: str, defense: Defense, *, first: int = 0, count: int = 9, train: bool = False
) -> Tensor:
    """Return the SSIM of every picture of a batch after planting, upload and read-out."""
    batch = PHOTOS.batch(range(first, first + count))
    model = build(name, num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape, seed=first).train(train)
    planted = attack.plant(model, PHOTOS.input_shape, torch.Generator().manual_seed(first))
    found = attack.run(upload(planted, batch, defense), torch.Generator().manual_seed(0))
    assert len(found.inputs) <= count
    guess, truth = (to_pixels(x, PHOTOS.mean, PHOTOS.std) for x in (found.inputs, batch.inputs))
    return ssim(aligned(guess, pair(guess, truth)), truth)


def fitted(defense: Defense, **fields: int) -> Imprint:
    return Imprint(**fields).fitted(defense, PHOTOS.mean, PHOTOS.std)


@pytest.mark.parametrize("name", ["lenet", "cnn6", "mlp"])
def test_undefended_batches_of_nine_are_copied(name):
    exact = [int((steal(fitted(Identity()), name, Identity(), first=9 * i) > 0.99).sum()) for i in range(4)]
    assert sum(exact) / 4 >= 8.5


def test_a_batch_larger_than_the_bins_is_not_taken_for_noise():
    data = load("photos", split="all", size=16)
    attack = Imprint(bins=200).fitted(Identity(), data.mean, data.std)
    model = build("mlp", num_classes=data.num_classes, input_shape=data.input_shape, seed=0).eval()
    batch = data.batch(range(256))
    seen = upload(attack.plant(model, data.input_shape, torch.Generator().manual_seed(1)), batch, Identity(), data)
    found = attack.run(seen, torch.Generator().manual_seed(0)).inputs
    assert int((torch.cdist(batch.inputs.flatten(1), found.flatten(1)).amin(1) < 0.5).sum()) > 60


@pytest.mark.parametrize("train", [False, True])
def test_resnet18_in_both_modes(train):
    assert float((steal(fitted(Identity()), "resnet18", Identity(), count=4, train=train) > 0.99).sum()) >= 3


@pytest.mark.parametrize("defense", [DualPrune(), TopK()], ids=lambda d: d.key())
def test_pruning_stops_the_layout_that_ignores_it(defense):
    scores = [steal(fitted(Identity()), name, defense).mean() for name in ("lenet", "cnn6")]
    assert max(scores) < 0.35


@pytest.mark.parametrize("defense", [dgp(), dgp(0.2, 0.6), DualPrune(rounding="ceil"), TopK(), adgp()], ids=repr)
def test_decoys_and_dead_rows_get_past_pruning(defense):
    scores = [steal(fitted(defense), name, defense, first=9).mean() for name in ("lenet", "cnn6")]
    assert min(scores) > 0.95


def test_noise_and_random_pruning_do_not_stop_it():
    noise, random = GaussianNoise(1e-2), RandomK(0.2)
    assert float(steal(fitted(noise), "cnn6", noise).mean()) > 0.9
    assert float(steal(fitted(random), "cnn6", random).mean()) > 0.6


@pytest.mark.parametrize("defense", [Identity(), dgp()], ids=repr)
@pytest.mark.parametrize("count", [1, 64])
def test_batch_sizes_from_one_to_sixty_four(count, defense):
    scores = steal(fitted(defense, bins=400), "lenet", defense, count=count)
    assert len(scores) == count
    assert float((scores > 0.99).float().mean()) > 0.7


def test_the_layout_follows_the_defense():
    assert pruned_shares(dgp()) == pytest.approx((0.05, 0.75, 1))
    assert pruned_shares(TopK(0.2)) == pytest.approx((0, 0.8, 1))
    assert pruned_shares(adgp()) == pytest.approx((0.05, 0.75, 1))
    assert pruned_shares(GaussianNoise()) == (0, 0, 1)
    assert pruned_shares(Chain(dgp(), GaussianNoise())) == pytest.approx((0.05, 0.75, 1))
    assert pruned_shares(Hardened(examples=1)) == (0, 0, 1)
    assert pruned_shares(RandomK(0.2))[2] == pytest.approx(0.2, abs=0.01)
    plain, shielded = (fitted(d)._layout()[0] for d in (Identity(), dgp()))
    assert len(plain) == 200
    assert len(shielded) == pytest.approx(1000, abs=10)


def test_bins_measured_on_public_pictures_fit_unusual_data():
    digits, public = load("digits", split="test"), load("digits", split="train")
    attack = Imprint().fitted(None, digits.mean, digits.std).measured(public.batch(range(200)).inputs)
    model = build("mlp", num_classes=10, input_shape=digits.input_shape)
    planted = attack.plant(model, digits.input_shape, torch.Generator().manual_seed(0))
    batch = digits.batch(range(9))
    found = attack.run(upload(planted, batch, Identity(), digits), torch.Generator())
    guess, truth = (to_pixels(x, digits.mean, digits.std) for x in (found.inputs, batch.inputs))
    assert int((ssim(aligned(guess, pair(guess, truth)), truth) > 0.99).sum()) >= 8


def test_planting_leaves_the_model_and_the_global_generator_alone():
    model = build("lenet", num_classes=10, input_shape=(3, 32, 32))
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    planted = fitted(dgp()).plant(model, (3, 32, 32), torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert isinstance(planted, Planted)
    x = PHOTOS.batch(range(4)).inputs
    assert float((planted.imprint(x).detach() - x).abs().max()) < 1.5  # a model behind it still sees the picture


def test_a_model_with_nothing_planted_is_refused():
    model = build("lenet", num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape)
    with pytest.raises(NeedError, match="plant"):
        Imprint().run(upload(model, PHOTOS.batch([0]), Identity()), torch.Generator())


def test_an_empty_upload_gives_no_guess():
    planted = Imprint().plant(build("mlp", num_classes=3, input_shape=(3, 8, 8)), (3, 8, 8), torch.Generator())
    seen = upload(planted, Batch(torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)), Identity())
    empty = Observation(**{**vars(seen), "grads": {k: torch.zeros_like(v) for k, v in seen.grads.items()}})
    assert len(Imprint().run(empty, torch.Generator()).inputs) == 0


@dataclass(frozen=True)
class RelativeNoise(Defense):
    """Noise of so many times the root mean square of each tensor: what a spotlight is made for."""

    ratio: float

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        noise = {name: torch.randn(g.shape, generator=step.rng) * g.square().mean().sqrt() for name, g in grads.items()}
        return {name: g + self.ratio * noise[name] for name, g in grads.items()}, state


@pytest.mark.parametrize("silence", ["copies", "scattered", "outgoing"])
def test_a_spotlight_singles_out_the_brightest_picture(silence):
    flat = PHOTOS.batch(range(64)).inputs.flatten(1)
    # Bright and rich in contrast: of a white wall nobody could tell whether it was found.
    victim = int(torch.where(flat.mean(1) > 0.5, flat.std(1), 0).argmax())
    batch = PHOTOS.batch([victim, *flat.mean(1).argsort()[:7].tolist()])
    level = batch.inputs.flatten(1).mean(1).sort(descending=True).values
    for defense, least in ((Identity(), 0.99), (RelativeNoise(16), 0.4)):
        attack = Spotlight(batch=8, rows=1024, silence=silence).fitted(defense, PHOTOS.mean, PHOTOS.std)
        # A threshold between the two brightest: how often that happens by itself is luck.
        attack = replace(attack, center=attack.center + float(level[:2].mean()) - attack._threshold())
        model = build("lenet", num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape)
        planted = attack.plant(model, PHOTOS.input_shape, torch.Generator().manual_seed(0))
        found = attack.run(upload(planted, batch, defense), torch.Generator())
        assert len(found.inputs) == 1
        guess, truth = (to_pixels(x, PHOTOS.mean, PHOTOS.std) for x in (found.inputs, batch.inputs[:1]))
        assert float(ssim(guess, truth)) > least


def test_own_units_can_be_a_spotlight_within_the_guards_limits():
    flat = PHOTOS.batch(range(64)).inputs.flatten(1)
    victim = int(torch.where(flat.mean(1) > 0.5, flat.std(1), 0).argmax())
    others = [i for i in flat.mean(1).argsort()[:16].tolist() if PHOTOS.labels[i] != 0][:7]
    batch = PHOTOS.batch([victim, *others])
    level = batch.inputs.flatten(1).mean(1).sort(descending=True).values
    model = build("mlp", num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape)
    correlations = []
    for defense in (Identity(), RelativeNoise(16), Hardened(noise=16.0, examples=1)):
        attack = OwnSpotlight(batch=8, lit=0.01).fitted(defense, PHOTOS.mean, PHOTOS.std)
        attack = replace(attack, center=attack.center + float(level[:2].mean()) - attack._threshold())
        changed = attack.plant(model, PHOTOS.input_shape, torch.Generator().manual_seed(0))
        Guard.pin(model).admit(changed, input_shape=PHOTOS.input_shape)
        found = attack.run(upload(changed, batch, defense), torch.Generator()).inputs
        assert len(found) == 1
        correlations.append(
            float(torch.corrcoef(torch.stack([found.flatten(), batch.inputs[0].flatten()]))[0, 1].abs())
        )
    bare, noise, held = correlations
    assert bare > 0.99
    assert noise > 0.6
    assert held < noise - 0.2  # the noise follows the units that stand out


@pytest.mark.parametrize("name", ["lenet", "cnn6"])
def test_own_spotlight_needs_a_first_layer_that_sees_the_picture(name):
    model = build(name, num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape)
    with pytest.raises(NeedError, match="first layer"):
        OwnSpotlight().plant(model, PHOTOS.input_shape, torch.Generator())


@pytest.mark.parametrize(("defense", "least"), [(GaussianNoise(), 0.99), (RelativeNoise(16), 0.3)], ids=str)
def test_a_spotlight_knows_how_bright_the_picture_is(defense, least):
    order = PHOTOS.batch(range(64)).inputs.flatten(1).mean(1).argsort()
    attack = Spotlight(batch=1, rows=1024).fitted(defense, PHOTOS.mean, PHOTOS.std)
    model = build("lenet", num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape)
    planted = attack.plant(model, PHOTOS.input_shape, torch.Generator().manual_seed(0))
    for index in order[[8, -8]].tolist():  # a dark picture and a bright one
        batch = PHOTOS.batch([index])
        found = attack.run(upload(planted, batch, defense), torch.Generator())
        guess, truth = (to_pixels(x, PHOTOS.mean, PHOTOS.std) for x in (found.inputs, batch.inputs))
        assert float(ssim(guess, truth)) > least


def test_noise_over_pruning_does_not_save_the_bins():
    defense = Chain(dgp(), GaussianNoise())
    assert float((steal(fitted(defense), "lenet", defense) > 0.99).float().mean()) > 0.7


def test_a_spotlight_on_an_empty_stage_returns_nothing():
    attack = replace(Spotlight(rows=64), center=50.0)
    model = build("mlp(hidden=16)", num_classes=PHOTOS.num_classes, input_shape=PHOTOS.input_shape)
    planted = attack.plant(model, PHOTOS.input_shape, torch.Generator().manual_seed(0))
    for defense in (Identity(), GaussianNoise(1.0)):
        assert len(attack.run(upload(planted, PHOTOS.batch(range(4)), defense), torch.Generator()).inputs) == 0


def test_smoothing_takes_noise_out_of_a_photograph():
    picture = PHOTOS.batch([5]).inputs[0].double()
    picture = picture - picture.mean()
    noisy = picture + torch.randn(picture.shape, generator=torch.Generator().manual_seed(0))
    assert (smoothed(noisy, 1.0) - picture).square().mean() < 0.5 * (noisy - picture).square().mean()
    assert torch.equal(smoothed(picture, 0.0), picture)


def test_trap_weights_single_out_pictures_of_a_large_batch():
    trapped, honest = (steal(attack, "mlp", Identity(), count=32) for attack in (TrapWeights(), LinearReadout()))
    assert int((trapped > 0.99).sum()) >= 8 > int((honest > 0.99).sum())


def test_trap_weights_need_a_first_linear_layer():
    with pytest.raises(NeedError, match="first layer"):
        TrapWeights().plant(build("lenet", num_classes=10, input_shape=(3, 32, 32)), (3, 32, 32), torch.Generator())
