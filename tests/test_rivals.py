"""What each rival defense must do, checked against its definition."""

import copy
import math
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil import Veil, models, observe, select, unseal
from gradveil.core import Batch, Step, ThreatModel
from gradveil.defenses import (
    ATS,
    PRECODE,
    PRESETS,
    AlignedDualPrune,
    Chain,
    ClipNoise,
    DPNoise,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Outpost,
    Soteria,
    TopK,
    epsilon,
)
from gradveil.defenses.ats import TRANSFORMATIONS, apply_policy, parse_policy
from gradveil.defenses.dp import clipped_sum
from gradveil.defenses.precode import divergence
from gradveil.defenses.soteria import estimated_scores, feature_scores
from gradveil.errors import NeedError
from gradveil.gradients import gradient, parameters, per_example_gradient, total_loss
from gradveil.models import last_linear
from gradveil.tree import global_norm

SHAPE = (3, 32, 32)


def step(seed: int = 0, **rest: object) -> Step:
    return Step(torch.Generator().manual_seed(seed), **rest)  # type: ignore[arg-type]


def pictures(count: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return Batch(torch.rand(count, *shape, generator=generator), torch.arange(count) % 10)


@pytest.fixture(scope="module")
def lenet() -> nn.Module:
    return models.build("lenet", num_classes=10, input_shape=SHAPE)


def small_net() -> nn.Module:
    """ReLU features, some of them dead, behind BatchNorm."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten()]
        return nn.Sequential(*body, nn.Linear(32, 10))


def test_the_paper_line_up_carries_the_paper_settings() -> None:
    assert PRESETS["soteria"]() == Soteria(prune=0.8)
    assert PRESETS["outpost"]() == Outpost(noise_scale=0.8, noise_share=0.4, decay=0.1, prune=0.8)
    assert PRESETS["precode"]() == PRECODE(latent=256, beta=1e-3)
    assert PRESETS["dp"]() == GaussianNoise(std=1e-2)
    assert PRESETS["topk"]() == ErrorFeedback(TopK(0.2))
    assert PRESETS["dgp"]() == ErrorFeedback(DualPrune(0.05, 0.75))
    for name, preset in PRESETS.items():
        assert name == "none" or "Compose:" in (preset.__doc__ or ""), f"{name} must say where it may be composed"


class TestSoteria:
    def test_only_the_classifier_changes_and_four_fifths_of_its_columns_are_zero(self, lenet: nn.Module) -> None:
        batch = pictures(2)
        grads = gradient(lenet, cross_entropy, batch)
        sent, _ = Soteria().apply(grads, {}, step(model=lenet, batch=batch))
        columns = (sent["classifier.weight"] == 0).all(0)
        assert int(columns.sum()) == math.floor(0.8 * 768)
        assert torch.equal(sent["classifier.weight"][:, ~columns], grads["classifier.weight"][:, ~columns])
        for name in grads.keys() - {"classifier.weight"}:
            assert sent[name] is grads[name]

    def test_scores_equal_one_backward_pass_per_feature(self) -> None:
        net, batch = small_net().eval(), pictures(3, shape=(3, 16, 16))
        inputs = batch.inputs.clone().requires_grad_()
        features = net[:-1](inputs)
        expected = torch.zeros(32)
        for i in range(32):
            (jacobian,) = torch.autograd.grad(features[:, i].sum(), inputs, retain_graph=True)
            expected[i] = (jacobian.flatten(1).norm(dim=1) / (features[:, i].abs() + 1e-6)).sum()
        torch.testing.assert_close(feature_scores(net, net[-1], batch), expected, rtol=1e-4, atol=1e-5)

    def test_estimated_scores_are_the_exact_ones_on_average(self) -> None:
        net, batch = small_net().eval(), pictures(3, shape=(3, 16, 16))
        exact = feature_scores(net, net[-1], batch)
        directions = torch.randn(4000, *batch.inputs.shape, generator=torch.Generator().manual_seed(0))
        alive = exact > 0
        ratio = estimated_scores(net, net[-1], batch.inputs, directions)[alive] / exact[alive]
        assert (ratio - 1).abs().max() < 0.06  # 0.76 / sqrt(4000) is 0.012 for one picture

    def test_two_probes_hide_as_many_columns_and_mostly_the_same(self, lenet: nn.Module) -> None:
        batch = pictures(8)
        grads = gradient(lenet, cross_entropy, batch)
        kept = []
        for defense in (Soteria(), Soteria(probes=2), Soteria(probes=2)):
            sent, _ = defense.apply(grads, {}, step(model=lenet, batch=batch))
            kept.append((sent["classifier.weight"] != 0).any(0))
        assert [int(k.sum()) for k in kept] == [768 - math.floor(0.8 * 768)] * 3
        assert torch.equal(kept[1], kept[2])  # the same generator
        assert (kept[0] & kept[1]).sum() > 0.7 * kept[0].sum()

    def test_dead_features_do_not_switch_it_off(self) -> None:
        net, batch = small_net().eval(), pictures(1, shape=(3, 16, 16))
        with torch.no_grad():
            net[1].bias[:4] = -100.0  # half of the channels never fire: r = 0 and dr/dx = 0
        grads = gradient(net, cross_entropy, batch)
        sent, _ = Soteria().apply(grads, {}, step(model=net, batch=batch))
        assert bool(torch.isfinite(sent["5.weight"]).all())
        assert int((sent["5.weight"] == 0).all(0).sum()) >= math.floor(0.8 * 32)

    def test_training_mode_leaves_the_statistics_alone(self) -> None:
        net, batch = small_net().train(), pictures(4, shape=(3, 16, 16))
        grads = gradient(net, cross_entropy, batch)
        before = copy.deepcopy(net.state_dict())
        for defense in (Soteria(), Soteria(probes=1)):
            defense.apply(grads, {}, step(model=net, batch=batch))
        assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
        assert net.training

    def test_cnn6_has_its_classifier_masked_not_the_last_convolution(self) -> None:
        net, batch = models.build("cnn6", num_classes=10, input_shape=(3, 8, 8)), pictures(1, shape=(3, 8, 8))
        grads = gradient(net, cross_entropy, batch)
        sent, _ = Soteria().apply(grads, {}, step(model=net, batch=batch))
        changed = [name for name in grads if not torch.equal(sent[name], grads[name])]
        assert changed == ["classifier.weight"]

    def test_a_model_without_a_linear_classifier_is_refused(self) -> None:
        net = nn.Sequential(nn.Conv2d(3, 10, 32), nn.Flatten())
        batch = pictures(1)
        with pytest.raises(NeedError, match="classifier"):
            Soteria().apply(gradient(net, cross_entropy, batch), {}, step(model=net, batch=batch))

    def test_a_frozen_classifier_is_refused(self, lenet: nn.Module) -> None:
        net, batch = copy.deepcopy(lenet), pictures(1)
        net.get_parameter("classifier.weight").requires_grad_(False)
        with pytest.raises(NeedError, match=r"classifier\.weight"):
            Soteria().apply(gradient(net, cross_entropy, batch), {}, step(model=net, batch=batch))


class TestATS:
    def test_the_published_list_has_fifty_entries(self) -> None:
        assert len(TRANSFORMATIONS) == 50
        assert TRANSFORMATIONS[3] == ("translate_x", 9)
        assert TRANSFORMATIONS[18] == ("contrast", 7)
        assert TRANSFORMATIONS[43] == TRANSFORMATIONS[48] == ("translate_y", 3)
        assert TRANSFORMATIONS[49] == ("autocontrast", 1)

    def test_an_empty_policy_changes_nothing(self) -> None:
        batch = pictures(2)
        assert ATS(policy="").prepare_batch(batch, step()) is batch

    @pytest.mark.parametrize(("index", "axis", "least"), [(3, 1, 14), (21, 1, 8), (43, 0, 4), (7, 0, 3)])
    def test_shifts_move_by_the_published_number_of_pixels(self, index: int, axis: int, least: int) -> None:
        white = Image.fromarray(np.full((32, 32, 3), 255, dtype=np.uint8))
        for sign in (1, -1):
            black = (np.asarray(apply_policy(white, (index,), [sign])) == 0).all(2)
            assert int(black.all(1 - axis).sum()) in (least, least + 1)
            assert bool(black[-1, -1]) == (sign == 1)

    @pytest.mark.parametrize("index", range(50))
    def test_every_transformation_keeps_size_and_mode(self, index: int) -> None:
        levels = (np.random.default_rng(0).random((30, 40, 3)) ** 2 * 225 + 15).astype(np.uint8)
        for picture in (Image.fromarray(levels), Image.fromarray(levels[:, :, 0])):
            out = apply_policy(picture, (index,), [-1])
            assert (out.size, out.mode) == (picture.size, picture.mode)
        identities = {28, 39}  # solarize 0 and color 0
        assert np.array_equal(np.asarray(apply_policy(Image.fromarray(levels), (index,), [1])), levels) == (
            index in identities
        )

    def test_rotation_fills_with_grey_and_has_one_sign(self) -> None:
        white = Image.fromarray(np.full((32, 32, 3), 255, dtype=np.uint8))
        turned = [np.asarray(apply_policy(white, (2,), [sign])) for sign in (1, -1)]
        assert np.array_equal(*turned)
        assert turned[0][0, 0].tolist() == [128, 128, 128]

    def test_a_hybrid_draws_both_policies_and_both_signs(self) -> None:
        batch = Batch(torch.ones(60, 3, 32, 32), torch.zeros(60, dtype=torch.long))
        out = ATS(policy="3+43").prepare_batch(batch, step()).inputs
        sideways = (out == 0).all(2).any(2).any(1)  # a black column: shifted along x
        assert 15 <= int(sideways.sum()) <= 45
        assert 5 <= int((out[sideways, 0, 0, 0] == 0).sum()) < int(sideways.sum())

    def test_normalised_inputs_come_back_normalised(self) -> None:
        mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
        scale = torch.tensor(std).view(1, 3, 1, 1), torch.tensor(mean).view(1, 3, 1, 1)
        raw = pictures(3)
        plain = ATS("43-18-18").prepare_batch(raw, step()).inputs
        normalised = Batch((raw.inputs - scale[1]) / scale[0], raw.labels)
        out = ATS("43-18-18", mean, std).prepare_batch(normalised, step()).inputs
        torch.testing.assert_close(out * scale[0] + scale[1], plain, atol=1.01 / 255, rtol=0)
        assert not torch.allclose(plain, raw.inputs, atol=0.05)

    def test_one_channel_and_other_shapes_work(self) -> None:
        out = ATS().prepare_batch(pictures(2, shape=(1, 8, 12)), step()).inputs
        assert out.shape == (2, 1, 8, 12)

    def test_the_wrong_normalisation_is_named(self) -> None:
        batch = pictures(2)
        with pytest.raises(ValueError, match="normalisation your data uses"):
            ATS().prepare_batch(Batch(batch.inputs * 4 - 2, batch.labels), step())
        with pytest.raises(ValueError, match="2 channels"):
            ATS(mean=(0.0, 0.0), std=(1.0, 1.0)).prepare_batch(batch, step())
        with pytest.raises(ValueError, match=r"\[N, 1 or 3, H, W\]"):
            ATS().prepare_batch(Batch(torch.zeros(2, 5), batch.labels), step())

    @pytest.mark.parametrize("text", ["3-1-50", "3--1", "a", "3-1+", "+"])
    def test_a_bad_policy_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match="policy"):
            ATS(policy=text)
        assert parse_policy("21-13-3+7-4-15") == ((21, 13, 3), (7, 4, 15))

    def test_the_gradient_is_that_of_the_transformed_picture(self, lenet: nn.Module) -> None:
        batch, defense = pictures(2), ErrorFeedback(ATS())
        sent = unseal(Veil(defense, parameters(lenet), seed=5).protect(lenet, cross_entropy, batch))
        raw = gradient(lenet, cross_entropy, batch)
        assert not torch.allclose(sent["classifier.weight"], raw["classifier.weight"], rtol=1e-2)


class TestPRECODE:
    @pytest.mark.parametrize(
        ("name", "wide"), [("lenet", 768), ("cnn6", 3200), ("vgg11", 512), ("resnet18", 512)], ids=lambda v: str(v)
    )
    def test_it_adds_769_d_plus_512_parameters(self, name: str, wide: int) -> None:
        model = models.build(name, num_classes=10, input_shape=SHAPE)
        wrapped = PRECODE().prepare_model(model)
        extra = sum(p.numel() for p in wrapped.parameters()) - sum(p.numel() for p in model.parameters())
        assert extra == 769 * wide + 512
        assert last_linear(wrapped)[1].weight.shape == (10, wide)  # type: ignore[union-attr]

    def test_two_forward_passes_differ_also_in_evaluation(self, lenet: nn.Module) -> None:
        wrapped, batch = PRECODE().prepare_model(lenet).eval(), pictures(2)
        assert not torch.equal(wrapped(batch.inputs), wrapped(batch.inputs))

    def test_a_generator_or_a_given_noise_settles_the_draw(self, lenet: nn.Module) -> None:
        wrapped, batch = PRECODE(latent=8).prepare_model(lenet), pictures(2)
        bottleneck = wrapped.get_submodule("net.classifier.bottleneck")
        outputs = []
        for _ in range(2):
            bottleneck.generator = torch.Generator().manual_seed(3)
            outputs.append(wrapped(batch.inputs))
        bottleneck.noise = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
        outputs.append(wrapped(batch.inputs))
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[0], outputs[2])

    def test_the_divergence_is_that_of_two_normals(self) -> None:
        assert float(divergence(torch.zeros(3, 256), torch.ones(3, 256))) == 0.0
        mean, spread = torch.randn(2, 5), torch.rand(2, 5) + 0.1
        normal = torch.distributions.Normal
        exact = torch.distributions.kl_divergence(normal(mean, spread), normal(0.0, 1.0)).sum(1).mean()
        torch.testing.assert_close(divergence(mean, spread), exact)

    def test_the_loss_gains_beta_times_the_divergence_in_bits(self, lenet: nn.Module) -> None:
        batch = pictures(2)
        for model in (PRECODE(beta=0.5).prepare_model(lenet), nn.Sequential(PRECODE(beta=0.5).prepare_model(lenet))):
            bottleneck = next(m for n, m in model.named_modules() if n.endswith("bottleneck"))
            bottleneck.noise = torch.zeros(2, 256)
            loss = total_loss(model, cross_entropy, batch)
            expected = cross_entropy(model(batch.inputs), batch.labels) + 0.5 * bottleneck.divergence / math.log(2)
            torch.testing.assert_close(loss, expected)

    def test_per_example_gradients_carry_the_divergence_too(self, lenet: nn.Module) -> None:
        model, batch = PRECODE(latent=4, beta=1.0).prepare_model(lenet), pictures(3)
        model.get_submodule("net.classifier.bottleneck").noise = torch.zeros(1, 4)
        each = per_example_gradient(model, cross_entropy, batch)
        whole = gradient(model, cross_entropy, batch)
        for name, g in whole.items():
            torch.testing.assert_close(each[name].mean(0), g, rtol=1e-4, atol=1e-6)

    def test_a_copy_holds_neither_draws_nor_graph(self, lenet: nn.Module) -> None:
        wrapped, batch = PRECODE().prepare_model(lenet), pictures(1)
        bottleneck = wrapped.get_submodule("net.classifier.bottleneck")
        bottleneck.generator = torch.Generator()
        payload = Veil(PRECODE(), parameters(wrapped), seed=0).protect(wrapped, cross_entropy, batch)
        seen = observe(payload, wrapped, cross_entropy, batch, ThreatModel(), num_classes=10)
        twin = seen.model.get_submodule("net.classifier.bottleneck")
        assert (twin.generator, twin.noise, twin.divergence) == (None, None, None)
        assert bottleneck.generator is not None

    def test_a_spread_that_underflows_stays_finite(self) -> None:
        wrapped = PRECODE(latent=2).prepare_model(nn.Linear(3, 2))
        bottleneck = wrapped.get_submodule("net.bottleneck")
        with torch.no_grad():
            bottleneck.encode.bias[2:] = -1e4
        wrapped(torch.ones(1, 3))
        assert bool(torch.isfinite(wrapped.auxiliary_loss()))

    def test_a_plain_model_is_refused_not_passed_undefended(self, lenet: nn.Module) -> None:
        with pytest.raises(NeedError, match="prepare_model"):
            Veil(PRECODE(), parameters(lenet)).protect(lenet, cross_entropy, pictures(1))
        with pytest.raises(NeedError, match="call the model first"):
            PRECODE().prepare_model(lenet).auxiliary_loss()


class TestOutpost:
    def test_the_gradient_really_changes(self, lenet: nn.Module) -> None:
        grads = gradient(lenet, cross_entropy, pictures(1))
        sent, _ = Outpost(always=True).apply(grads, {}, step(model=lenet))
        assert not torch.equal(sent["classifier.weight"], grads["classifier.weight"])

    def test_the_gate_opens_as_often_as_it_says(self) -> None:
        net = nn.Linear(4, 2)
        grads = {"weight": torch.randn(2, 4), "bias": torch.randn(2)}
        for round_ in (0, 9, 99):
            rng = torch.Generator().manual_seed(round_)
            shut = sum(
                torch.equal(Outpost().apply(grads, {}, Step(rng, round_, net))[0]["weight"], grads["weight"])
                for _ in range(600)
            )
            chance = 1 / (1 + 0.1 * (round_ + 1))
            assert abs(1 - shut / 600 - chance) < 4 * math.sqrt(chance * (1 - chance) / 600)

    def test_pruning_risk_and_the_place_of_the_noise(self) -> None:
        net = nn.Linear(50, 40)
        with torch.no_grad():
            net.weight.normal_(0, 0.5, generator=torch.Generator().manual_seed(0))
        grads = {"weight": torch.randn(40, 50, generator=torch.Generator().manual_seed(1)), "bias": torch.zeros(40)}
        sent, _ = Outpost(always=True, noise_share=0.4).apply(grads, {}, step(model=net))
        kept, _ = TopK(0.2).apply(grads, {}, step())
        noise = sent["weight"] - kept["weight"]
        columns = noise.ne(0).any(0)
        scores = grads["weight"].square().mean(0)
        assert int(columns.sum()) == math.ceil(0.4 * 51)  # 50 columns and one score for the bias
        assert float(scores[columns].min()) > float(scores[~columns].max())
        sigma = 0.8 * float(net.weight.detach().var())
        assert abs(float(noise[:, columns].std()) / sigma - 1) < 0.1
        assert not sent["bias"].any()

    def test_risk_is_at_most_one_and_zero_for_a_single_weight(self) -> None:
        net = nn.Linear(1, 1, bias=False)
        sent, _ = Outpost(always=True, noise_share=1.0).apply({"weight": torch.ones(1, 1)}, {}, step(model=net))
        assert sent["weight"].item() == 1.0
        wide = nn.Linear(100, 100, bias=False)
        with torch.no_grad():
            wide.weight.normal_(0, 50.0, generator=torch.Generator().manual_seed(0))
        sent, _ = Outpost(noise_share=1.0, always=True).apply({"weight": torch.zeros(100, 100)}, {}, step(model=wide))
        assert abs(float(sent["weight"].std()) - 0.8) < 0.02

    def test_noise_fills_the_message_unless_it_is_told_not_to(self, lenet: nn.Module) -> None:
        grads = gradient(lenet, cross_entropy, pictures(1))
        density = {}
        for kept_only in (False, True):
            sent, _ = Outpost(always=True, noise_on_kept_only=kept_only).apply(grads, {}, step(model=lenet))
            nonzero = sum(int(g.count_nonzero()) for g in sent.values())
            density[kept_only] = nonzero / sum(g.numel() for g in sent.values())
        assert density[False] > 0.3
        assert abs(density[True] - 0.2) < 0.01


class TestNoise:
    def test_gaussian_noise_has_its_standard_deviation(self) -> None:
        zeros = {"w": torch.zeros(1_000_000)}
        first, _ = GaussianNoise(1e-2).apply(zeros, {}, step(0))
        assert abs(float(first["w"].std()) / 1e-2 - 1) < 0.01
        assert abs(float(first["w"].mean())) < 5e-5

    def test_per_example_clipping_against_a_loop(self, lenet: nn.Module) -> None:
        batch = pictures(4)
        each = per_example_gradient(lenet, cross_entropy, batch)
        clip = 30.3
        sent, _ = DPNoise(clip=clip, noise_multiplier=0.0).apply(each, {}, step())
        expected = {name: torch.zeros_like(g) for name, g in parameters(lenet).items()}
        norms = []
        for i in range(4):
            one = gradient(lenet, cross_entropy, Batch(batch.inputs[i : i + 1], batch.labels[i : i + 1]))
            norms.append(global_norm(one))
            for name, g in one.items():
                expected[name] += g * min(1.0, clip / norms[-1]) / 4
        assert max(norms) > clip > min(norms), "the test must clip some and spare some"
        for name, g in expected.items():
            torch.testing.assert_close(sent[name], g, rtol=1e-4, atol=1e-6)

    def test_dp_noise_is_scaled_by_clip_multiplier_and_number(self) -> None:
        each = {"w": torch.zeros(8, 500_000)}
        sent, _ = DPNoise(clip=2.0, noise_multiplier=1.5).apply(each, {}, step())
        assert abs(float(sent["w"].std()) / (3.0 / 8) - 1) < 0.01

    def test_an_empty_batch_still_sends_noise(self) -> None:
        sent, _ = DPNoise().apply({"w": torch.zeros(0, 1000), "b": torch.zeros(0)}, {}, step())
        assert sent["w"].shape == (1000,)
        assert sent["b"].shape == ()
        assert float(sent["w"].std()) > 0.9

    def test_clip_noise_bounds_the_whole_gradient(self) -> None:
        grads = {"w": torch.full((300,), 3.0), "b": torch.tensor(4.0)}
        clipped, _ = ClipNoise(clip=1.0, noise_multiplier=0.0).apply(grads, {}, step())
        assert global_norm(clipped) == pytest.approx(1.0)
        small, _ = ClipNoise(clip=1e3, noise_multiplier=0.0).apply(grads, {}, step())
        assert torch.equal(small["w"], grads["w"])
        noisy, _ = ClipNoise(clip=2.0, noise_multiplier=0.5).apply({"w": torch.zeros(1_000_000)}, {}, step())
        assert abs(float(noisy["w"].std()) - 1.0) < 0.01

    def test_what_follows_dp_noise_may_prune_and_remember(self, lenet: nn.Module) -> None:
        defense = Chain(DPNoise(), ErrorFeedback(TopK(0.2)))
        veil = Veil(defense, parameters(lenet), seed=0)
        veil.protect(lenet, cross_entropy, pictures(2))
        assert veil.health is not None
        assert abs(veil.health.density - 0.2) < 0.01

    def test_the_accountants_agree_with_known_values(self) -> None:
        pytest.importorskip("opacus")
        spent = {
            kind: epsilon(1.0, steps=1000, delta=1e-5, sample_rate=0.01, accountant=kind) for kind in ("rdp", "prv")
        }
        assert spent["rdp"] == pytest.approx(2.10, abs=0.02)
        assert spent["prv"] == pytest.approx(1.84, abs=0.02)
        # One Gaussian release, no sampling: the analytic bound lies between the numerical value and the RDP one.
        assert epsilon(4.0, steps=1, delta=1e-5) < 4 * math.sqrt(2 * math.log(1.25e5)) / 4
        assert epsilon(2.0, steps=10, delta=1e-5) > epsilon(4.0, steps=10, delta=1e-5)

    def test_without_opacus_the_extra_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "opacus", None)
        with pytest.raises(NeedError, match=r"gradveil\[dp\]"):
            epsilon(1.0, steps=1, delta=1e-5)

    @pytest.mark.parametrize("bad", [{"clip": 0.0}, {"noise_multiplier": -1.0}, {"clip": float("nan")}])
    def test_bad_parameters_are_named(self, bad: dict[str, float]) -> None:
        for kind in (DPNoise, ClipNoise):
            with pytest.raises(ValueError, match=next(iter(bad))):
                kind(**bad)


class TestADGP:
    @staticmethod
    def plain(defense: AlignedDualPrune, g: Tensor, mask: Tensor) -> Tensor:
        """The rule by sorting: the largest inside the mask that are not among the client's own top."""
        n = g.numel()
        order = torch.argsort(-g.abs().flatten(), stable=True)
        own_top = set(order[: math.floor(n * defense.top + 1e-9)].tolist())
        allowed = [i for i in order.tolist() if bool(mask.flatten()[i]) and i not in own_top]
        keep = allowed[: select.band(n, 0.0, 1 - defense.keep)[1]]
        out = torch.zeros(n)
        out[keep] = g.flatten()[keep]
        return out.view(g.shape)

    @pytest.mark.parametrize("ties", [False, True])
    def test_it_equals_the_rule_by_sorting(self, ties: bool) -> None:
        rng, defense = torch.Generator().manual_seed(0), AlignedDualPrune()
        grads = [{"w": torch.randn(20, 15, generator=rng), "b": torch.randn(10, generator=rng)} for _ in range(2)]
        if ties:
            grads = [{name: (g * 2).round() for name, g in one.items()} for one in grads]
        mask = defense.propose(grads[0], {}, step())
        for name, g in grads[0].items():
            assert torch.equal(mask[name], select.band_mask(g, 0, defense.mask_count(g.numel())))
        for one in grads:
            sent, _ = defense.apply(one, {}, step(mask=mask))
            for name, g in one.items():
                assert torch.equal(sent[name], self.plain(defense, g, mask[name]))

    def test_messages_lie_in_the_mask_with_the_published_densities(self, lenet: nn.Module) -> None:
        users = [gradient(lenet, cross_entropy, pictures(2, seed)) for seed in range(4)]
        defense, total = AlignedDualPrune(), 15826
        mask = defense.propose(users[0], {}, step())
        union = {name: torch.zeros_like(m) for name, m in mask.items()}
        for grads in users:
            sent, _ = defense.apply(grads, {}, step(mask=mask))
            assert sum(int(g.count_nonzero()) for g in sent.values()) / total == pytest.approx(0.2, abs=0.005)
            union = {name: union[name] | (g != 0) for name, g in sent.items()}
        assert all(bool((mask[name] | ~u).all()) for name, u in union.items())
        assert sum(int(m.sum()) for m in mask.values()) / total == pytest.approx(0.4, abs=0.001)

    def test_a_proposal_of_zeros_still_has_its_count(self) -> None:
        mask = AlignedDualPrune().propose({"w": torch.zeros(10), "v": torch.eye(3)}, {}, step())
        assert [int(m.sum()) for m in mask.values()] == [4, 4]


def test_soteria_hides_nothing_from_an_attacker_who_skips_that_tensor(lenet: nn.Module) -> None:
    """The zero columns are visible, and all the rest is the undefended gradient."""
    batch = pictures(1)
    grads = gradient(lenet, cross_entropy, batch)
    payload = Veil(Soteria(), parameters(lenet), seed=0).protect(lenet, cross_entropy, batch)
    arrived: dict[str, Tensor] = unseal(payload, like=parameters(lenet))
    assert [name for name in grads if not torch.equal(arrived[name], grads[name])] == ["classifier.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_no_example_exceeds_the_clip_in_any_precision(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        one = {"w": (torch.randn(1, 1000, generator=rng) * 3 * torch.rand((), generator=rng)).to(dtype)}
        assert float(clipped_sum(one, 1.0)["w"].double().norm()) < 1 + 1e-6


def test_outpost_puts_noise_on_no_more_than_its_share_where_scores_are_equal() -> None:
    net = nn.Linear(100, 50, bias=False)
    grads = {"weight": torch.zeros(50, 100)}
    grads["weight"][:, :10] = torch.randn(50, 10, generator=torch.Generator().manual_seed(0))
    sent, _ = Outpost(always=True, noise_share=0.4).apply(grads, {}, Step(torch.Generator(), model=net))
    assert float((sent["weight"] != 0).any(0).float().mean()) == pytest.approx(0.4)


def test_clipped_top_entries_drain_even_where_the_band_is_empty() -> None:
    veil = Veil(ErrorFeedback(DualPrune(excess="clip")), {"w": torch.zeros(1000)}, guard=None)
    grads = {"w": (torch.arange(1000) < 40).float()}  # 4 % of the entries, and the top takes 5 %
    for _ in range(5):
        payload = veil.seal(grads, 1)
    assert torch.equal(unseal(payload)["w"], grads["w"])
