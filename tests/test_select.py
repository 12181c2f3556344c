"""Every selection path against a plain numpy sort."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradveil import select
from gradveil.errors import GradientError
from gradveil.select.plain import band, band_mask

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def oracle(values: Tensor, top: int, kept: int) -> Tensor:
    """Sort by falling magnitude, then by index; keep ranks [top, top + kept)."""
    flat = values.double().reshape(-1).numpy()
    order = np.lexsort((np.arange(flat.size), -np.abs(flat)))
    out = np.zeros_like(flat)
    chosen = order[top : top + kept]
    out[chosen] = flat[chosen]
    return torch.from_numpy(out).view(values.shape).to(values.dtype)


def shares() -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(0, 0.6), st.floats(0, 0.999)).filter(lambda s: s[0] + s[1] < 1)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Random normals with zeros, ties, subnormals and huge values mixed in."""
    shape = draw(st.sampled_from([(), (0,), (1,), (2,), (3, 1), (10,), (7, 11), (0, 4), (513,), (40, 50)]))
    kind = draw(st.sampled_from(["normal", "ties", "zeros", "wide", "constant"]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    values = rng.standard_normal(shape)
    if kind == "ties":
        values = np.round(values)
    elif kind == "zeros":
        values = values * (rng.random(shape) < 0.1)
    elif kind == "wide":
        values = values * 10.0 ** rng.integers(-44, 37, shape)
    elif kind == "constant":
        values = np.full(shape, -0.5)
    return torch.from_numpy(np.asarray(values)).to(draw(st.sampled_from(DTYPES))).nan_to_num_(0, 6e4, -6e4)


@settings(max_examples=400, deadline=None)
@given(values=tensors(), share=shares(), rounding=st.sampled_from(["floor", "round", "ceil"]))
def test_prune_equals_a_sort(values: Tensor, share: tuple[float, float], rounding: str) -> None:
    limits = band(values.numel(), *share, rounding)
    before = values.clone()
    (sent,) = select.prune([values], [limits])
    assert torch.equal(sent, oracle(values, *limits))
    assert sent.dtype == values.dtype
    assert torch.equal(values, before)
    plain = torch.where(band_mask(values, *limits), values, torch.zeros_like(values))
    assert torch.equal(sent, plain)


@settings(max_examples=200, deadline=None)
@given(values=tensors(), share=shares(), seed=st.integers(0, 100))
def test_feedback_equals_add_sort_subtract(values: Tensor, share: tuple[float, float], seed: int) -> None:
    residual = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    if values.dtype == torch.float64:
        residual = residual.double()
    limits = band(values.numel(), *share)
    (sent,), (held,) = select.prune_with_feedback([values], [residual], [limits])
    total = values.to(residual.dtype) + residual
    assert torch.equal(sent, oracle(total, *limits).to(values.dtype))
    assert torch.equal(held, total - sent.to(total.dtype))
    assert sent.dtype == values.dtype
    assert held.dtype == residual.dtype


@pytest.mark.parametrize("n", [0, 1, 2, 3, 10, 19, 20, 21, 1000])
@pytest.mark.parametrize("rounding", ["floor", "round", "ceil"])
def test_band_is_defined_for_every_size(n: int, rounding: str) -> None:
    top, kept = band(n, 0.05, 0.75, rounding)
    assert 0 <= top <= n
    assert kept >= min(n, 1)
    assert top + kept <= n
    if rounding == "floor" and n:
        assert top == math.floor(n * 0.05 + 1e-9)


def test_many_large_tensors_run_on_the_pool(rng: torch.Generator) -> None:
    values = [torch.randn(n, generator=rng) for n in (100_000, 3, 60_000, 0, 1)]
    values[2] = values[2].round()  # ties across a large tensor
    limits = [band(v.numel(), 0.05, 0.75) for v in values]
    for sent, value, limit in zip(select.prune(values, limits), values, limits, strict=True):
        assert torch.equal(sent, oracle(value, *limit))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_not_finite_is_an_error(bad: float, dtype: torch.dtype) -> None:
    values = torch.ones(50, dtype=dtype)
    values[7] = bad
    with pytest.raises(GradientError, match="NaN or infinity"):
        select.prune([values], [band(50, 0.05, 0.75)])
    with pytest.raises(GradientError, match="NaN or infinity"):
        select.prune_with_feedback([values], [torch.zeros(50)], [band(50, 0.05, 0.75)])


def test_overflow_of_the_sum_is_an_error() -> None:
    huge = torch.full((8,), 3e38)
    with pytest.raises(GradientError):
        select.prune_with_feedback([huge], [huge], [(0, 4)])


def test_non_contiguous_tensors(rng: torch.Generator) -> None:
    values = torch.randn(30, 20, generator=rng).T
    limits = band(600, 0.05, 0.75)
    (sent,) = select.prune([values], [limits])
    assert torch.equal(sent, oracle(values.contiguous(), *limits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "constant", "wide"])
def test_gpu_selects_the_same_entries(kind: str, rng: torch.Generator) -> None:
    sizes = [0, 1, 2, 10, 64, 1728, 5120, 16_384, 16_385, 100_003, 2_359_296]
    values = [torch.randn(n, generator=rng) for n in sizes]
    if kind == "ties":
        values = [(v * 3).round() for v in values]
    elif kind == "zeros":
        values = [v * (torch.rand(v.shape, generator=rng) < 0.1) for v in values]
    elif kind == "constant":
        values = [torch.full_like(v, 0.25) for v in values]
    elif kind == "wide":
        values = [v * 10 ** (torch.rand(v.shape, generator=rng) * 60 - 35) for v in values]
    residuals = [torch.randn(n, generator=rng).round() for n in sizes]
    for shares_ in ((0.05, 0.75), (0.0, 0.8), (0.2, 0.6), (0.0, 0.0), (0.5, 0.4999)):
        limits = [band(n, *shares_) for n in sizes]
        on_gpu = [v.cuda() for v in values]
        for a, b in zip(select.prune(on_gpu, limits), select.prune(values, limits), strict=True):
            assert torch.equal(a.cpu(), b)
        sent, held = select.prune_with_feedback(on_gpu, [r.cuda() for r in residuals], limits)
        sent_cpu, held_cpu = select.prune_with_feedback(values, residuals, limits)
        for a, b in zip([*sent, *held], [*sent_cpu, *held_cpu], strict=True):
            assert torch.equal(a.cpu(), b)
    with pytest.raises(GradientError):
        select.prune([torch.tensor([1.0, math.nan], device="cuda")], [(0, 1)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("length", [8192, 8190])  # rows that begin at multiples of 16 bytes, and rows that do not
def test_gpu_writes_the_mean_of_several_clients(length: int, rng: torch.Generator) -> None:
    from gradveil.select import gpu

    sizes = [length - 3000, 3000]
    # In bfloat16 many entries are equal, so that boundaries cut through ties.
    grads, held = (torch.randn(3, length, generator=rng).bfloat16().float() for _ in range(2))
    limits = [select.band(n, 0.05, 0.75) for n in sizes] * 3
    rows = [grads.cuda(), held.cuda()]
    segments = [[part for row in each for part in row.split(sizes)] for each in rows]
    mean = torch.zeros(length, device="cuda")
    gpu.Selector(*segments, *segments, limits, mean, 3).run_mean()
    parts = [[part for row in each for part in row.split(sizes)] for each in (grads, held)]
    sent, rest = select.prune_with_feedback(*parts, limits)
    torch.testing.assert_close(mean.cpu(), torch.cat(sent).view(3, length).mean(0))
    assert torch.equal(rows[1].cpu(), torch.cat(rest).view(3, length))
