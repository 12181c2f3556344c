"""Attackers who remember what a client sent before."""

from dataclasses import replace

import pytest
import torch

from gradveil.attacks import Chained, GradientMatching, Joint, RepeatedRounds
from gradveil.attacks.adaptive import freshness
from gradveil.attacks.averaging import combined
from gradveil.attacks.bypass import UpToEncoder, before_bottleneck
from gradveil.attacks.imitation import flat, forgets, shaped, understand
from gradveil.attacks.rounds import accumulated, averaged, feeds_back
from gradveil.defenses import (
    PRECODE,
    Chain,
    CorrelatedNoise,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Hardened,
    Quantize,
    TopK,
    dgp,
)
from gradveil.errors import NeedError
from gradveil.gradients import gradient

from .attack_kit import batch, model, rngs, rounds, ssim

THREE = [batch(i) for i in range(3)]
QUICK = GradientMatching(steps=120, lr=0.2, decay="cosine", tv=2e-2)


def test_accumulated_uploads_give_the_gradient_exactly(rng):
    g = torch.randn(200, generator=rng)
    residual, sent = torch.zeros(200), []
    for _ in range(8):
        total = g + residual
        order = total.abs().argsort(descending=True)
        kept = torch.zeros(200).index_fill(0, order[10:50], 1.0)
        sent.append(total * kept)
        residual = total * (1 - kept)
    uploads = torch.stack(sent)
    for first, whole in ((0, True), (3, False)):
        found, known = accumulated(uploads[first:], whole)
        assert int(known.sum()) >= 50
        assert torch.allclose(found[known], g[known], rtol=1e-5)
    mean, ever = averaged(uploads)
    assert torch.equal(ever, (uploads != 0).any(0))
    assert torch.isfinite(mean).all()


def test_repeating_the_model_wears_error_feedback_out():
    net = model("cnn6")
    seen = rounds(net, [THREE[0]] * 8, dgp(), lr=0.0)
    target = RepeatedRounds().target(seen)
    truth = flat(gradient(net, seen.loss_fn, THREE[0]))
    known = target.weight != 0
    assert float(known.float().mean()) > 0.5
    assert torch.allclose(target.sent[known], truth[known], rtol=1e-3, atol=1e-7)
    assert ssim(RepeatedRounds(QUICK), [seen], THREE[:1]) > ssim(QUICK, [replace(seen, earlier=())], THREE[:1]) + 0.1


def test_a_missing_round_does_not_spoil_the_sum():
    net = model()
    seen = rounds(net, [THREE[0]] * 5, dgp(), lr=0.0)
    target = RepeatedRounds().target(replace(seen, earlier=(seen.earlier[0], *seen.earlier[2:])))
    truth = flat(gradient(net, seen.loss_fn, THREE[0]))
    known = target.weight != 0
    assert bool(known.any())
    assert torch.allclose(target.sent[known], truth[known], rtol=1e-3, atol=1e-7)


def test_repeating_the_model_goes_round_a_bottleneck_too():
    defense = PRECODE(latent=32)
    seen = rounds(defense.prepare_model(model()), [THREE[0]] * 3, defense, lr=0.0)
    view, target = RepeatedRounds(QUICK).sum(seen)
    assert isinstance(view.model, UpToEncoder)
    assert torch.equal(target.sent, flat(view.grads))
    assert torch.isfinite(RepeatedRounds(replace(QUICK, steps=2)).run(seen, rngs(1)[0]).inputs).all()


def test_a_bottleneck_is_gone_round_in_later_rounds_too():
    defense = Chain(PRECODE(latent=32), ErrorFeedback(TopK(keep=0.9)))
    seen = rounds(defense.prepare_model(model()), THREE, defense)
    view = before_bottleneck(seen)
    assert isinstance(view.model, UpToEncoder)
    assert len(freshness(view, understand(seen))) == len(flat(view.grads))
    assert torch.isfinite(replace(QUICK, steps=2).run(seen, rngs(1)[0]).inputs).all()


def test_summed_tensors_count_by_what_noise_is_left_in_them():
    seen = rounds(model(), [THREE[0]] * 8, Hardened(noise=4.0, examples=1), lr=0.0)
    weights = [float(w.amax()) for w in shaped(RepeatedRounds(QUICK).target(seen).weight, seen.grads).values()]
    assert max(weights) > 2 * min(weights)


SUMMED = [
    (Hardened(noise=4.0, examples=1), 0.92),
    (Hardened(noise=4.0, examples=1, memory=0.98), 0.92),
    (Hardened(noise=4.0, examples=1, bits=0), 0.92),
    (CorrelatedNoise(noise_multiplier=0.1), 0.7),
    (GaussianNoise(0.1), 0.9),
]


@pytest.mark.parametrize(("defense", "least"), SUMMED, ids=str)
def test_repeated_noise_is_taken_out_as_far_as_it_can_be(defense, least):
    net = model()
    seen = rounds(net, [THREE[0]] * 8, defense, lr=0.0)
    view, target = RepeatedRounds(QUICK).sum(seen)
    truth, found = flat(gradient(net, seen.loss_fn, THREE[0])), flat(view.grads)
    assert float(torch.cosine_similarity(found, truth, 0)) > least
    # The attacker knows how much of it is noise, altogether and in each tensor.
    wrong = found - truth * (found @ truth) / truth.square().sum()
    weight = torch.ones_like(wrong) if target.weight is None else target.weight
    share = float((wrong * weight).square().sum() / target.sent.square().sum())
    assert target.noise == pytest.approx(share, rel=0.15)


def test_the_mean_of_fed_back_noise_is_not_the_best(rng):
    count = 12
    noise = torch.randn(count + 1, 4000, generator=rng)
    noise[0] = 0
    uploads = 1 + noise[1:] - noise[:-1]
    beside = torch.diag(torch.ones(count - 1), 1)
    covariance = 2 * torch.eye(count) - beside - beside.T
    covariance[0, 0] = 1
    found, variance = combined(uploads.double(), covariance.double(), torch.ones(count).double())
    assert variance == pytest.approx(6 / (count * (count + 1) * (2 * count + 1)))
    assert float((found - 1).var()) == pytest.approx(variance, rel=0.1)
    assert float((uploads.mean(0) - 1).var()) > 2 * variance


def test_a_client_that_mixes_batches_is_followed_by_what_it_sends():
    net = model()
    seen = rounds(net, [THREE[0]] * 24, Hardened(noise=4.0, examples=4), lr=0.0)
    truth = flat(gradient(net, seen.loss_fn, THREE[0]))
    found = flat(RepeatedRounds(QUICK).sum(seen)[0].grads)
    mean = torch.stack([flat(one.grads) for one in (*seen.earlier, seen)]).mean(0)
    best, plain = (float(torch.cosine_similarity(one, truth, 0)) for one in (found, mean))
    assert best > plain + 0.05
    assert float(found @ truth / truth.square().sum()) == pytest.approx(1.0, abs=0.1)


def test_other_weights_are_not_a_repetition():
    seen = rounds(model(), THREE[:2], dgp(), lr=0.1)
    with pytest.raises(NeedError, match="repeat"):
        RepeatedRounds().run(seen, rngs(1)[0])


def test_a_chain_from_round_to_round_undoes_error_feedback():
    seen = rounds(model("cnn6"), THREE, dgp())
    alone = ssim(QUICK, [replace(seen, earlier=())], THREE[2:])
    assert ssim(Chained(QUICK), [seen], THREE[2:]) > alone + 0.08


def test_rounds_searched_together_undo_error_feedback():
    seen = rounds(model("cnn6"), THREE, dgp())
    alone = ssim(QUICK, [replace(seen, earlier=())], THREE[2:])
    assert ssim(Joint(QUICK, rounds=2), [seen], THREE[2:]) > alone + 0.1
    found = Joint(replace(QUICK, steps=2), rounds=3).run(seen, rngs(1)[0])
    assert [x.shape for x in found.info["earlier"]] == [THREE[0].inputs.shape] * 2


def test_the_truth_of_all_rounds_costs_nothing_together():
    from gradveil.attacks.joint import JointCost

    for defense in (dgp(), ErrorFeedback(TopK(0.1)), ErrorFeedback(Chain(DualPrune(), Quantize(2)))):
        seen = rounds(model(), THREE, defense)
        attack = Joint(QUICK, rounds=3)
        cost = JointCost([attack._window(seen)], QUICK)
        x = torch.cat([b.inputs for b in THREE])[None]
        assert float(cost([x], torch.ones(()))[1].detach()) < 1e-4


def test_an_entry_sent_last_round_is_fresh():
    seen = rounds(model(), THREE[:2], dgp())
    fresh = flat(seen.earlier[0].grads) != 0
    both = fresh & (flat(seen.grads) != 0)
    truth = flat(gradient(seen.model, seen.loss_fn, THREE[1]))
    assert torch.allclose(flat(seen.grads)[both], truth[both], rtol=1e-4, atol=1e-6)
    weight = freshness(seen, understand(seen))
    assert torch.equal(weight == 1.0, fresh)


def test_which_defenses_forget():
    assert forgets(dgp())
    assert forgets(Chain(ErrorFeedback(TopK()), GaussianNoise(sent_only=True)))
    assert not forgets(DualPrune())
    seen = rounds(model(), THREE[:1], dgp())
    assert feeds_back(dgp(), seen)
    assert not feeds_back(DualPrune(), seen)


def test_without_memory_there_is_nothing_to_follow():
    seen = rounds(model(), THREE[:1], dgp())
    for attack in (Chained(QUICK), Joint(QUICK)):
        with pytest.raises(NeedError, match="previous uploads"):
            attack.run(seen, rngs(1)[0])
    late = rounds(model(), THREE, dgp())
    with pytest.raises(NeedError, match="round 0"):
        Chained(QUICK).run(replace(late, earlier=late.earlier[1:]), rngs(1)[0])
