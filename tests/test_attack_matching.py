"""The optimisation attacks: right at the truth, repeatable, better than a blind guess, better when they know more."""

import copy
import logging
from dataclasses import replace

import pytest
import torch
from torch import nn

from gradveil.attacks import (
    ATTACKS,
    Blind,
    GradientMatching,
    deep_leakage,
    eased_matching,
    gi_paper,
    improved_deep_leakage,
    inverting_gradients,
    missing,
    see_through_gradients,
    watch,
)
from gradveil.attacks.bypass import before_bottleneck
from gradveil.attacks.imitation import flat, understand
from gradveil.attacks.objectives import total_variation
from gradveil.core import ThreatModel
from gradveil.defenses import (
    PRECODE,
    Chain,
    DualPrune,
    GaussianNoise,
    Hardened,
    Identity,
    Outpost,
    Quantize,
    Soteria,
    TopK,
)

from .attack_kit import PHOTOS, batch, fedavg, model, rngs, ssim, uploads

ONES = [batch(i) for i in range(2)]
SHORT = {"steps": 120, "lr": 0.2, "decay": "cosine", "tv": 3e-2}
QUICK = GradientMatching(**SHORT)


def cost_at_truth(attack, seen, one):
    view = before_bottleneck(seen)
    labels = view.labels[None] if view.labels is not None else None
    cost = attack.cost(view, [attack.aim(view)], labels)
    return float(cost([one.inputs[None]], torch.ones(()))[1].detach())


@pytest.mark.parametrize("preset", [inverting_gradients, gi_paper, see_through_gradients, improved_deep_leakage])
@pytest.mark.parametrize("defense", [Identity(), DualPrune(), TopK(0.2), Quantize(1), Soteria(), PRECODE(latent=16)])
def test_no_loss_at_the_truth(preset, defense):
    net = defense.prepare_model(model())
    seen = uploads(net, ONES[:1], defense)[0]
    # A sign may flip where an entry is as small as the rounding of two ways to add it up.
    limit = 1e-4 if isinstance(defense, Quantize) else 1e-6
    assert cost_at_truth(preset(normalise=True, restarts=1, group=0.0), seen, ONES[0]) < limit


def test_exchanging_two_tensors_breaks_the_match():
    seen = uploads(model(), ONES[:1])[0]
    grads = dict(seen.grads)
    one, two = "features.2.weight", "features.4.weight"
    grads[one], grads[two] = grads[two], grads[one]
    assert cost_at_truth(GradientMatching(), replace(seen, grads=grads), ONES[0]) > 0.1


@pytest.mark.parametrize("attack", [QUICK, replace(QUICK, steps=30, langevin=0.1, restarts=2, group=0.1)])
def test_same_seed_same_pictures(attack):
    seen = uploads(model(), ONES[:1])[0]
    first, second = (attack.run(seen, rngs(1)[0]) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert first.loss == second.loss


def test_each_preset_beats_a_blind_guess():
    seen = uploads(model(), ONES)
    floor = ssim(Blind(), seen, ONES)
    for preset in (inverting_gradients, gi_paper, see_through_gradients):
        assert ssim(preset(**SHORT, restarts=2), seen, ONES) > floor + 0.2


def test_smoothing_eases_off_from_the_first_step_to_the_last():
    seen = uploads(model(), ONES[:1])[0]
    attack = eased_matching(tv=0.5, tv_first=16.0, tv_share=False)
    cost, x = attack.cost(seen, [attack.aim(seen)], seen.labels[None]), torch.randn(1, *ONES[0].inputs.shape)
    rough = float(total_variation(x)[0])
    for progress, times in ((0.0, 16.0), (0.5, 4.0), (1.0, 1.0)):
        whole, match = (part.detach() for part in cost([x], torch.tensor(progress)))
        assert float(whole - match) == pytest.approx(0.5 * times * rough, rel=1e-4)


def test_smoothing_is_weighed_by_what_the_start_costs():
    seen = uploads(model(), ONES[:1])[0]
    attack, x = eased_matching(tv=0.5), [ONES[0].inputs[None] + 0.01 * torch.randn(1, *ONES[0].inputs.shape)]
    cost = attack.cost(seen, [attack.aim(seen)], seen.labels[None])
    match = float(cost(x, torch.zeros(()))[1].detach())
    assert 0 < match < 0.1
    cost.smooth_by_start(x)
    assert cost.tv.item() == pytest.approx(0.5 * match / 0.25, rel=1e-4)


def test_our_own_schedule_is_stronger_than_the_published_one_in_as_many_steps():
    seen = uploads(model(), ONES, DualPrune())
    assert ssim(eased_matching(steps=150), seen, ONES) > ssim(inverting_gradients(steps=150), seen, ONES) + 0.05


@pytest.mark.parametrize("preset", [deep_leakage, improved_deep_leakage])
def test_deep_leakage_is_near_exact(preset):
    seen = uploads(model(), ONES[:1], labels=False)
    found = preset(steps=250, restarts=3).run(seen[0], rngs(1)[0])
    assert found.labels.tolist() == ONES[0].labels.tolist()
    assert float((found.inputs - ONES[0].inputs).square().mean()) < 0.1  # the pixels' variance is about 1


def test_diverging_rows_are_given_up():
    seen = uploads(model(), ONES[:1])[0]
    found = improved_deep_leakage(steps=200, restarts=1, lr=50.0).run(seen, rngs(1)[0])
    assert found.info["steps"] <= 100
    assert torch.isfinite(found.inputs).all()


def test_masked_matching_breaks_dual_pruning():
    seen = uploads(model("cnn6"), ONES, DualPrune())
    naive = ssim(replace(QUICK, masked="never"), seen, ONES)
    aware = ssim(QUICK, seen, ONES)
    unaware_but_observant = ssim(QUICK, [replace(one, defense=None) for one in seen], ONES)
    assert aware > naive + 0.1
    assert unaware_but_observant > naive + 0.1


@pytest.mark.parametrize(
    ("defense", "ignorant"),
    [
        (Soteria(), {"masked": "never"}),
        (Quantize(1), {"reapply": "never"}),
        (Chain(DualPrune(), GaussianNoise(0.1, sent_only=True)), {"weighting": "none"}),
        (GaussianNoise(0.3), {"weighting": "none"}),
    ],
)
def test_an_attacker_who_knows_the_defense_does_better(defense, ignorant):
    seen = uploads(model(), ONES, defense)
    assert ssim(replace(QUICK, tv=None), seen, ONES) > ssim(replace(QUICK, tv=None, **ignorant), seen, ONES) + 0.1


@pytest.mark.parametrize("prunes", [DualPrune(), TopK(0.1)])
@pytest.mark.parametrize("noise", [1e-6, 1e-3])
def test_noise_over_pruning_does_not_hide_what_was_sent(prunes, noise):
    seen = uploads(model(), ONES[:1], Chain(prunes, GaussianNoise(noise)))[0]
    known = understand(seen)
    assert all(known.behaviour[name].prunes for name, g in seen.grads.items() if g.dim() > 1)
    bare = flat(uploads(model(), ONES[:1], prunes)[0].grads)
    arrived = known.arrived(seen.grads)
    assert float((arrived & (bare == 0)).float().mean()) < 1e-3
    assert bool(arrived[bare.abs() > 10 * noise].all())


@pytest.mark.parametrize("name", ["lenet", "cnn6"])
@pytest.mark.parametrize("drowns", [Hardened(examples=1), Hardened(noise=2.0, examples=1), GaussianNoise(1.0)], ids=str)
def test_noise_that_drowns_everything_is_not_taken_for_pruning(name, drowns):
    seen = uploads(model(name), ONES[:1], drowns)[0]
    known = understand(seen)
    assert not any(done.prunes or done.floor for done in known.behaviour.values())
    assert bool(known.arrived(seen.grads).all())


def test_noise_over_dual_pruning_costs_the_attacker_little():
    noisy = uploads(model("cnn6"), ONES, Chain(DualPrune(), GaussianNoise(1e-6)))
    assert ssim(QUICK, noisy, ONES) > ssim(replace(QUICK, masked="never"), noisy, ONES) + 0.1


def test_columns_that_hold_zeros_have_no_noise():
    seen = uploads(model(), ONES, Outpost(always=True, noise_scale=30.0))
    truth = [flat(one.grads) for one in uploads(model(), ONES)]
    for one, exact in zip(seen, truth, strict=True):
        target = QUICK.aim(one)
        trusted = target.weight == 1
        assert float(trusted.float().mean()) > 0.05
        assert torch.equal(target.sent[trusted], exact[trusted])
    sent_only = uploads(model(), ONES[:1], Chain(DualPrune(), GaussianNoise(0.1, sent_only=True)))[0]
    assert not any(done.clean_columns for done in understand(sent_only).behaviour.values() if done.noise)


def test_top_k_leaves_no_room_above_what_was_sent():
    for defense, open_ in ((TopK(0.1), True), (DualPrune(), False)):
        seen = uploads(model(), ONES[:1], defense)[0]
        first = next(iter(seen.grads.values())).flatten()
        high = replace(QUICK, band=1.0).aim(seen).high[: len(first)]
        assert bool(high[first == 0].isinf().all()) == open_
        assert not bool(high[first != 0].any())


@pytest.mark.parametrize("how", [{}, {"masked": "never", "reapply": "always"}])
def test_uploads_of_several_defenses_are_attacked_together_as_alone(how):
    attack, net = GradientMatching(steps=6, **how), model()
    defenses = (DualPrune(), Hardened(noise=4.0, examples=1), Identity(), Quantize(1))
    seen = [uploads(net, ONES[:1], defense)[0] for defense in defenses]
    together = attack.run_many(seen, rngs(len(seen)))
    for one, rng, found in zip(seen, rngs(len(seen)), together, strict=True):
        alone = attack.run(one, rng)
        assert alone.loss == pytest.approx(found.loss, rel=1e-3, abs=1e-6)
        assert float((alone.inputs - found.inputs).abs().mean()) < 1e-3


def test_want_of_memory_does_not_make_an_attacker_ignorant(monkeypatch):
    def full(self, grads, state, step):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    seen = uploads(model(), ONES[:1], TopK(0.2))[0]
    monkeypatch.setattr(TopK, "apply", full)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        understand(seen)


def test_a_bottleneck_is_gone_round():
    defense = PRECODE(latent=32)
    seen = uploads(defense.prepare_model(model()), ONES, defense)
    assert all(before_bottleneck(one) is not one for one in seen)
    assert ssim(QUICK, seen, ONES) > ssim(Blind(), seen, ONES) + 0.1
    pair = [batch(0, 2)]
    seen = uploads(defense.prepare_model(model()), pair, defense)
    naive = replace(QUICK, masked="never", weighting="none")
    assert not naive.adaptive
    assert ssim(QUICK, seen, pair) > ssim(naive, seen, pair) + 0.1


def test_names_of_a_model_do_not_hide_what_its_defense_does():
    """`inner` is what wrappers like to call the model they hold."""

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    seen = uploads(Wrapped().eval(), ONES[:1], GaussianNoise(0.1))[0]
    assert QUICK.aim(seen).noise > 0.1


def test_labels_are_not_searched_behind_a_bottleneck():
    # Round the bottleneck slopes take the labels' place; searching ten classes for them was an error of shapes.
    defense = PRECODE(latent=16)
    (seen,) = uploads(defense.prepare_model(model()), ONES[:1], defense)
    found = replace(QUICK, steps=2, labels="joint").run(replace(seen, labels=None), torch.Generator())
    assert found.labels is not None
    assert found.labels.shape == (1,)


def test_a_pruned_bottleneck_is_completed_and_gone_round():
    whole, pruned = PRECODE(latent=32), Chain(PRECODE(latent=32), DualPrune())
    net = whole.prepare_model(model())
    torch.manual_seed(0)
    truth = before_bottleneck(uploads(net, ONES[:1], whole)[0])
    torch.manual_seed(0)
    view = before_bottleneck(uploads(net, ONES[:1], pruned)[0])
    shown = view.labels != 0
    bias = next(g for name, g in view.grads.items() if name.endswith("encode.bias"))
    assert int(shown.sum()) > 1.5 * int((bias != 0).sum())
    assert torch.allclose(view.labels[shown], truth.labels[shown], rtol=1e-3, atol=1e-6)
    seen = uploads(net, ONES, pruned)
    assert ssim(QUICK, seen, ONES) > ssim(Blind(), seen, ONES) + 0.1


def test_together_as_one_by_one_and_over_different_models():
    seen = [*uploads(model(), ONES[:2]), *uploads(model(seed=1), ONES[:1])]
    attack = replace(QUICK, steps=5)
    together = attack.run_many(seen, rngs(3))
    for one, rng, found in zip(seen, rngs(3), together, strict=True):
        assert torch.allclose(attack.run(one, rng).inputs, found.inputs, atol=1e-3)
    chunked = replace(attack, chunk=1).run_many(seen, rngs(3))
    assert all(torch.allclose(a.inputs, b.inputs, atol=1e-3) for a, b in zip(together, chunked, strict=True))


def test_uploads_do_not_suffer_from_their_company():
    attack = replace(QUICK, steps=5)
    defense = PRECODE(latent=32)
    seen = uploads(defense.prepare_model(model()), ONES, defense)
    bias = next(name for name in seen[1].grads if name.endswith("encode.bias"))
    torn = replace(seen[1], grads={**seen[1].grads, bias: torch.zeros_like(seen[1].grads[bias])})
    late = [replace(one, round=400 * i) for i, one in enumerate(uploads(model(), ONES, Outpost(noise_scale=9.0)))]
    for one, other in ((seen[0], torn), late[::-1]):
        alone, together = attack.run(one, rngs(1)[0]), attack.run_many([other, one], rngs(2)[::-1])[1]
        assert torch.allclose(alone.inputs, together.inputs, atol=1e-3)


def test_of_several_restarts_the_lowest_own_loss_is_returned():
    seen = uploads(model(), ONES[:1])[0]
    losses = []
    attack = replace(QUICK, steps=20, restarts=3)
    with watch(lambda p: losses.append(p.losses), every=20):
        found = attack.run(seen, rngs(1)[0])
    assert len(losses[-1]) == 3
    assert found.loss == pytest.approx(float(losses[-1].min()), rel=0.2)


def test_progress_is_told_and_can_cancel():
    seen = uploads(model(), ONES[:1])[0]
    told = []
    with watch(told.append, every=10):
        replace(QUICK, steps=25).run(seen, rngs(1)[0])
    assert [p.step for p in told] == [10, 20, 25]
    assert all(p.total == 25 and p.inputs.shape == (1, 1, 3, 16, 16) for p in told)
    assert told[-1].loss < told[0].loss

    def cancel(_progress):
        raise KeyboardInterrupt

    with watch(cancel, every=1), pytest.raises(KeyboardInterrupt):
        QUICK.run(seen, rngs(1)[0])


def test_pictures_stay_in_the_box_and_nothing_is_changed():
    seen = uploads(model(), ONES[:1])[0]
    before = copy.deepcopy((seen.grads, seen.model.state_dict()))
    found = replace(QUICK, steps=20).run(seen, rngs(1)[0])
    pixels = found.inputs * torch.tensor(seen.std).view(-1, 1, 1) + torch.tensor(seen.mean).view(-1, 1, 1)
    assert float(pixels.min()) >= -1e-5
    assert float(pixels.max()) <= 1 + 1e-5
    for old, new in zip(before, (seen.grads, seen.model.state_dict()), strict=True):
        assert all(torch.equal(t, new[name]) for name, t in old.items())


def test_a_batch_with_inferred_labels_and_early_stop():
    pair = [batch(0, 2)]
    seen = uploads(model(), pair, labels=False)
    found = replace(QUICK, steps=100, stop=1e9).run(seen[0], rngs(1)[0])
    assert found.info["steps"] == 50
    assert sorted(found.labels.tolist()) == sorted(pair[0].labels.tolist())
    assert ssim(QUICK, seen, pair) > ssim(Blind(), seen, pair) + 0.1


def test_fedavg_updates():
    net, one = model(), batch(0)
    seen = fedavg(net, one, steps=2, lr=0.05)
    assert ssim(QUICK, [seen], [one]) > ssim(Blind(), [seen], [one]) + 0.2
    dlg = improved_deep_leakage(steps=60, restarts=1, normalise=True)
    assert ssim(dlg, [seen], [one]) > ssim(Blind(), [seen], [one]) + 0.2


@pytest.mark.parametrize("attack", [gi_paper(**SHORT | {"tv": 1e-3}), improved_deep_leakage(steps=60, restarts=1)])
def test_one_local_step_is_attacked_as_well_as_its_gradient(attack):
    net, one = model(), batch(0)
    update, plain = fedavg(net, one, steps=1, lr=0.01), uploads(net, [one])[0]
    assert cost_at_truth(attack, update, one) < 1e-6
    assert ssim(attack, [update], [one]) == pytest.approx(ssim(attack, [plain], [one]), abs=0.05)


def test_a_defense_is_tried_out_on_an_update_where_one_is_sent():
    seen = replace(fedavg(model(), batch(0), steps=1, lr=1e-3), defense=Hardened(noise=4.0, examples=1))
    plain = replace(seen, local_lr=None)
    on_update, on_gradient = (understand(one).behaviour for one in (seen, plain))
    for name, done in on_update.items():  # noise that follows the size of what is sent, on a grid of sizes
        assert 0.7 < done.noise / (1e-3 * on_gradient[name].noise) < 1.4


def test_the_way_round_a_bottleneck_is_open_for_updates():
    net, one = PRECODE(latent=16).prepare_model(model()), batch(0)
    seen = fedavg(net, one, steps=1, lr=0.01)
    assert cost_at_truth(gi_paper(), seen, one) < 1e-6


def test_clients_in_training_mode():
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Sigmoid(), nn.Flatten()]
    net = nn.Sequential(*body, nn.Linear(512, PHOTOS.num_classes)).train()
    pair = [batch(0, 2)]
    seen = uploads(net, pair)
    assert seen[0].model.training
    assert ssim(replace(QUICK, tv=1e-2), seen, pair) > ssim(Blind(), seen, pair) + 0.1


def test_bn_term_only_with_statistics_from_data():
    attack = see_through_gradients()
    assert missing(attack, ThreatModel(statistics=False)) == ["statistics"]
    fresh = uploads(model("vgg11"), ONES[:1])[0]
    assert attack.terms(fresh).bn == 0.0
    trained = copy.deepcopy(fresh.model).train()
    trained(batch(0, 8).inputs)
    assert attack.terms(replace(fresh, model=trained)).bn > 0


def test_needs_that_are_not_granted_are_named():
    assert missing(ATTACKS["chained"](), ThreatModel(defense=False)) == ["defense", "rounds"]
    assert missing(ATTACKS["repeated_rounds"](), ThreatModel(rounds=True)) == ["active"]
    assert missing(inverting_gradients(), ThreatModel()) == []


@pytest.mark.parametrize("wrong", [{"lr": 0}, {"objective": "l1"}, {"masked": True}, {"steps": 0}, {"chunk": 0}])
def test_bad_settings_are_refused(wrong):
    with pytest.raises(ValueError):
        GradientMatching(**wrong)


def test_band_term_vanishes_at_the_truth_and_runs():
    seen = uploads(model(), ONES[:1], DualPrune())[0]
    attack = replace(QUICK, band=1.0, tv=0.0)
    cost = attack.cost(seen, [attack.aim(seen)], seen.labels[None])
    total, match = cost([ONES[0].inputs[None]], torch.ones(()))
    assert float((total - match).detach()) < 1e-6
    total, match = cost([ONES[1].inputs[None]], torch.ones(()))
    assert float((total - match).detach()) > 1e-4


def test_a_defense_that_cannot_be_imitated_is_noted(caplog):
    class Stubborn(Identity):
        def apply(self, grads, state, step):
            raise ValueError("only for clients")

    seen = replace(uploads(model(), ONES[:1])[0], defense=Stubborn())
    with caplog.at_level(logging.INFO):
        replace(QUICK, steps=2).run(seen, rngs(1)[0])
    assert "cannot be imitated" in caplog.text


@pytest.mark.parametrize("examples", [2, 8])
def test_a_release_that_mixes_batches_is_understood(examples):
    """Whether it sends at once or after several batches: its noise is known to the attacker either way."""
    seen = uploads(model(), [batch(0, 2)], Hardened(noise=4.0, examples=examples))[0]
    behaviour = understand(seen).behaviour
    assert behaviour is not None
    assert all(found.noise > 0 for found in behaviour.values())
