"""Quantised uploads: the promised bits on the wire, the promised error, nothing lost over time."""

import math

import pytest
import torch
from torch import Tensor

from gradveil import Chain, DualPrune, ErrorFeedback, Step, TopK, Veil, tree, unseal, wire
from gradveil.defenses import Quantize

BITS = (1, 2, 4, 8, 16)


def step(seed: int = 0) -> Step:
    return Step(rng=torch.Generator().manual_seed(seed))


def gradient(n: int = 50_000, seed: int = 0) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed)) * 1e-3


def quantised(g: Tensor, bits: int, rounding: str = "nearest", seed: int = 0) -> Tensor:
    return Quantize(bits, rounding).apply({"w": g}, {}, step(seed))[0]["w"]


def pruned(n: int = 50_000) -> Tensor:
    return DualPrune().apply({"w": gradient(n)}, {}, step())[0]["w"]


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_zeros_stay_zero_and_sent_entries_stay_non_zero_on_few_values(bits, rounding, dtype):
    for g in (pruned().to(dtype), TopK().apply({"w": gradient() ** 3 * 1e6}, {}, step())[0]["w"].to(dtype)):
        out = quantised(g, bits, rounding)
        assert out.dtype == dtype
        assert torch.equal(out != 0, g != 0)
        assert len(out[out != 0].unique()) <= 2**bits or bits >= 8 * g.element_size()


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_nearest_rounding_moves_no_magnitude_by_more_than_half_a_level(bits):
    g = pruned()
    magnitudes = g[g != 0].abs()
    width = float(magnitudes.max() - magnitudes.min())
    level = width / (2 ** (bits - 1) - 1) if bits > 1 else 2 * width
    assert float((quantised(g, bits) - g).abs().max()) <= 0.5 * level * 1.001


def test_sixteen_bits_keep_fourteen_bits_of_mantissa():
    g = pruned()
    assert float((quantised(g, 16) / g)[g != 0].sub(1).abs().max()) <= 2**-15


@pytest.mark.parametrize("bits", BITS)
def test_stochastic_rounding_is_unbiased(bits):
    g, trials = pruned(200), 4_000
    error = quantised(g.repeat(trials), bits, "stochastic").view(trials, 200).double() - g.double()
    spread = error.square().mean(0).sqrt()
    assert float(spread.max()) > 0
    assert float((error.mean(0).abs() / spread.clamp(min=1e-12)).max()) * math.sqrt(trials) < 4.5


@pytest.mark.parametrize(("bits", "rounding"), [(1, "nearest"), (2, "stochastic"), (4, "nearest"), (8, "stochastic")])
def test_an_upload_costs_the_bits_it_promises(bits, rounding):
    grads = {"w": quantised(pruned(), bits, rounding)}
    report = wire.size_report(grads, wire.encode(grads))
    table = 4 * 2 ** (bits - 1) + 300
    assert report.values_bytes <= bits * report.tensors["w"].sent / 8 + table


def test_sixteen_bits_are_left_out_of_32():
    grads = {"w": quantised(pruned(200_000), 16)}
    report = wire.size_report(grads, wire.encode(grads))
    assert report.values_bytes * 8 <= 16 * report.tensors["w"].sent


@pytest.mark.parametrize("bits", BITS)
def test_nothing_is_lost_over_time_inside_error_feedback(bits):
    defense = ErrorFeedback(Chain(DualPrune(), Quantize(bits)))
    assert not defense.noisy
    veil = Veil(defense, {"w": torch.zeros(2_000)}, seed=1)
    given, arrived = torch.zeros(2_000), torch.zeros(2_000)
    for round_ in range(12):
        g = gradient(2_000, seed=round_)
        given += g
        arrived += unseal(veil.seal({"w": g}, num_examples=1))["w"]
    assert veil.residual is not None
    torch.testing.assert_close(arrived + veil.residual["w"], given, rtol=1e-5, atol=1e-8)


def test_feedback_recovers_what_rounding_lost():
    """The same gradient again and again: on average what arrives is the gradient, although each upload is coarse."""
    g = {"w": gradient(1_000)}
    for bits, limit in ((1, 0.2), (4, 0.02)):  # one bit contracts slowly
        coarse = ErrorFeedback(Quantize(bits))
        state, total, rounds = coarse.init(g), tree.zeros_like(g), 200
        for round_ in range(rounds):
            sent, state = coarse.apply(g, state, step(round_))
            total = tree.add(total, sent)
        once = float((quantised(g["w"], bits) - g["w"]).norm())
        assert float((total["w"] / rounds - g["w"]).norm()) < limit * once


@pytest.mark.parametrize("g", [torch.zeros(0), torch.zeros(5), torch.tensor(-0.3), torch.full((4,), 2.0)])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_small_and_even_tensors_are_no_trouble(g, bits, rounding):
    out = quantised(g, bits, rounding)
    assert out.shape == g.shape
    torch.testing.assert_close(out.abs(), g.abs())  # one level, or none


@pytest.mark.parametrize("bits", BITS)
def test_denormal_and_huge_values_stay_finite(bits):
    for dtype in (torch.float32, torch.float64):
        type_ = torch.finfo(dtype)
        g = torch.tensor([type_.tiny / 8, -type_.tiny, 1.0, -type_.max], dtype=dtype)
        for rounding in ("nearest", "stochastic"):
            out = quantised(g, bits, rounding)
            assert bool(torch.isfinite(out).all())
            assert bool((out != 0).all())


@pytest.mark.parametrize("wrong", [{"bits": 3}, {"bits": 0}, {"bits": 32}, {"rounding": "up"}])
def test_bad_arguments_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Quantize(**wrong)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bits", BITS)
def test_a_gpu_rounds_as_the_cpu_does(bits):
    g = pruned()
    torch.testing.assert_close(quantised(g.cuda(), bits).cpu(), quantised(g, bits), rtol=1e-6, atol=0)
    on_gpu = Step(rng=torch.Generator("cuda").manual_seed(0))
    out = Quantize(bits, "stochastic").apply({"w": g.cuda()}, {}, on_gpu)[0]["w"]
    assert torch.equal((out != 0).cpu(), g != 0)
