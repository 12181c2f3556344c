"""The wire format: every bit comes back, in few bytes."""

import math
import struct
import zlib

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil import AlignedDualPrune, DualPrune, Step, wire
from gradveil.core import Grads
from gradveil.errors import GradientError, WireError
from gradveil.jit import compiled
from gradveil.wire.frame import Positions, Values, read_frame
from gradveil.wire.symbols import GROWING, GROWING_ALPHABET, growing_symbols

SIGNED = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
}
DTYPES = tuple(SIGNED)


def patterns(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor, with the sign of zeros taken off."""
    return torch.where(tensor == 0, torch.zeros_like(tensor), tensor).reshape(-1).view(SIGNED[tensor.dtype])


def assert_same(a: Grads, b: Grads) -> None:
    assert list(a) == list(b)
    for name in a:
        assert a[name].dtype == b[name].dtype
        assert a[name].shape == b[name].shape
        assert torch.equal(patterns(a[name]), patterns(b[name])), name
        assert bool((a[name] == b[name]).all())
        assert not bool(torch.signbit(b[name])[b[name] == 0].any()), "zeros must come back without a sign"


def forms(body: bytes) -> list[tuple[Positions, Values]]:
    return [(entry.positions, entry.values) for entry in read_frame(body).entries]


def band(n: int, share: float, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A gradient after dual pruning: `share` of the entries are left, between two magnitudes."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(n, generator=rng)
    order = values.abs().argsort(descending=True)
    kept = order[n // 20 : n // 20 + max(round(share * n), 1)]
    return torch.zeros(n).index_copy(0, kept, values[kept]).to(dtype)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 7), max_size=4))
    n = math.prod(shape)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    width = 8 * dtype.itemsize
    pool = rng.integers(0, 2**width, max(n, 1), dtype=np.uint64)
    match draw(st.sampled_from(["any bits", "denormal", "band", "equal", "levels", "zero"])):
        case "denormal":
            pool &= np.uint64(15 | 1 << (width - 1))
        case "band":
            pool = np.uint64(draw(st.integers(1, 2 ** (width - 3)))) + (pool & np.uint64(7))
        case "equal":
            pool[:] = pool[0]
        case "levels":
            pool = rng.choice(pool[:3], pool.size)
        case "zero":
            pool[:] = rng.choice(np.array([0, 1 << (width - 1)], np.uint64), pool.size)
    pool[rng.random(pool.size) < draw(st.sampled_from([0.0, 0.2, 0.8, 0.99]))] = 0
    bits = torch.from_numpy(pool[:n].astype(f"u{dtype.itemsize}").view(f"i{dtype.itemsize}"))
    tensor = bits.view(dtype)
    return torch.where(torch.isfinite(tensor), tensor, torch.ones_like(tensor)).reshape(shape)


@given(st.dictionaries(st.text(max_size=8), tensors(), max_size=3))
@settings(max_examples=250, deadline=None)
def test_every_bit_comes_back(grads):
    body = wire.encode(grads)
    assert_same(grads, wire.decode(body))
    assert_same(grads, wire.decode(body, like=grads))


@given(tensors(), st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_every_bit_comes_back_inside_a_mask(tensor, seed, share):
    mask = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(seed)) < share
    grads = {"w": torch.where(mask, tensor, torch.zeros_like(tensor))}
    assert_same(grads, wire.decode(wire.encode(grads, within={"w": mask}), like=grads, within={"w": mask}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("share", [0.0002, 0.003, 0.05, 0.2, 0.5, 0.9])
def test_large_tensors_of_every_density_come_back(dtype, share):
    grads = {"w": band(60_000, share, dtype=dtype)}
    assert_same(grads, wire.decode(wire.encode(grads), like=grads))


@pytest.mark.parametrize(
    ("tensor", "form"),
    [
        (torch.zeros(100), (Positions.NONE, Values.PLAIN)),
        (torch.zeros(0, 3), (Positions.NONE, Values.PLAIN)),
        (torch.tensor(2.5), (Positions.ALL, Values.PLAIN)),
        (torch.randn(9000, generator=torch.Generator().manual_seed(0)), (Positions.ALL, Values.BAND)),
        (torch.tensor([1.0, 0.0, -3.0, 7.0]), (Positions.BITMAP, Values.PLAIN)),
        (band(64, 0.2), (Positions.BITMAP, Values.BAND)),
        (band(1000, 0.01), (Positions.INDEX, Values.BAND)),
        (band(200_000, 0.01), (Positions.CODED_GAPS, Values.BAND)),
        (band(3000, 0.2), (Positions.EVEN_NIBBLES, Values.BAND)),
        (band(3000, 0.2).sort().values.roll(1500).reshape(2, -1).T.flatten(), (Positions.CODED_NIBBLES, Values.BAND)),
        (band(20_000, 0.2).reshape(-1, 2).repeat_interleave(8, 0), (Positions.CODED_BYTES, Values.BAND)),
        (band(20_000, 0.2).sign() * 3, (Positions.EVEN_NIBBLES, Values.LEVELS)),
        ((band(20_000, 0.2) * 10).round() / 7, (Positions.EVEN_NIBBLES, Values.LEVELS)),
        (band(20_000, 0.2).double(), (Positions.EVEN_NIBBLES, Values.PLAIN)),
    ],
)
def test_each_tensor_takes_the_form_that_suits_it(tensor, form):
    body = wire.encode({"w": tensor})
    assert forms(body) == [form]
    assert_same({"w": tensor}, wire.decode(body))


def test_positions_of_a_dual_pruned_tensor_are_within_5_percent_of_their_entropy():
    for n in (3_000, 36_864, 589_824):
        grads = {"w": band(n, 0.2)}
        report = wire.size_report(grads, wire.encode(grads))
        assert report.floor_bytes == pytest.approx(0.722 * n / 8, rel=1e-3)
        assert report.positions_bytes <= 1.05 * report.floor_bytes, n


@pytest.mark.parametrize("share", [0.001, 0.005, 0.014, 0.03, 0.08, 0.3, 0.6, 0.97])
def test_positions_of_other_densities_are_within_5_percent_of_their_entropy(share):
    rng = torch.Generator().manual_seed(1)
    grads = {"w": (torch.rand(1_500_000, generator=rng) < share).float()}
    report = wire.size_report(grads, wire.encode(grads))
    assert report.positions_bytes <= 1.05 * report.floor_bytes


def test_positions_that_sit_together_cost_less_than_their_entropy():
    grads = {"w": band(30_000, 0.2).repeat_interleave(8)}
    report = wire.size_report(grads, wire.encode(grads))
    assert report.positions_bytes < 0.3 * report.floor_bytes


def test_a_whole_dual_pruned_upload_is_at_most_0_215_of_dense():
    rng = torch.Generator().manual_seed(2)
    shapes = {"conv.weight": (256, 128, 3, 3), "bn.weight": (256,), "bn.bias": (256,), "fc.weight": (10, 256)}
    # Rows of very different size, as in real gradients: the band is wide and the positions have structure.
    raw = {
        name: torch.randn(s, generator=rng) * torch.rand(s[0], generator=rng).reshape(-1, *[1] * (len(s) - 1)) ** 2
        for name, s in shapes.items()
    }
    grads, _ = DualPrune().apply(raw, {}, Step(rng=rng))
    body = wire.encode(grads)
    report = wire.size_report(grads, body)
    assert report.ratio <= 0.19
    assert report.paper_ratio == pytest.approx(0.225, abs=1e-3)
    assert_same(grads, wire.decode(body, like=grads))


def test_values_of_a_narrow_band_need_no_exponent():
    grads = {"w": torch.empty(100_000).uniform_(1.0, 1.5, generator=torch.Generator().manual_seed(3))}
    report = wire.size_report(grads, wire.encode(grads))
    assert report.values_bytes * 8 / 100_000 == pytest.approx(23, abs=0.1)  # the sign and 22 bits of mantissa


def test_values_that_were_rounded_to_a_shorter_type_cost_no_more_than_in_it():
    short = band(100_000, 0.2, dtype=torch.bfloat16)
    sizes = [wire.size_report({"w": g}, wire.encode({"w": g})).values_bytes for g in (short, short.float())]
    assert sizes[1] <= sizes[0] + 100


@pytest.mark.parametrize(("levels", "bits"), [(1, 1.0), (2, 2.0), (8, 4.0), (128, 8.0)])
def test_values_on_few_levels_cost_the_bits_of_their_levels(levels, bits):
    rng = torch.Generator().manual_seed(4)
    steps = torch.randint(1, levels + 1, (60_000,), generator=rng) * 0.37
    grads = {"w": torch.where(torch.rand(60_000, generator=rng) < 0.5, steps, -steps)}
    body = wire.encode(grads)
    assert wire.size_report(grads, body).values_bytes * 8 / 60_000 <= bits * 1.02 + 0.1
    assert_same(grads, wire.decode(body))


def test_positions_are_counted_inside_the_common_mask():
    rng = torch.Generator().manual_seed(5)
    grads = {"w": torch.randn(100_000, generator=rng), "b": torch.randn(1_000, generator=rng)}
    defense = AlignedDualPrune()
    mask = defense.propose({name: torch.randn(g.shape, generator=rng) for name, g in grads.items()}, {}, Step(rng=rng))
    sent, _ = defense.apply(grads, {}, Step(rng=rng, mask=mask))
    body = wire.encode(sent, within=mask)
    report = wire.size_report(sent, body, within=mask)
    assert report.floor_bytes <= 0.4 * 101_000 / 8  # one flag per entry of the mask, instead of one per entry
    assert report.positions_bytes <= 1.05 * report.floor_bytes
    assert report.paper_ratio == pytest.approx((0.2 * 32 + 0.2) / 32, rel=0.01)
    assert len(body) < len(wire.encode(sent))
    assert_same(sent, wire.decode(body, like=sent, within=mask))


def test_an_entry_outside_the_mask_is_sent_all_the_same():
    mask = {"w": torch.tensor([True, False, True])}
    grads = {"w": torch.tensor([1.0, 2.0, 0.0])}
    assert_same(grads, wire.decode(wire.encode(grads, within=mask), within=mask))


def test_the_wrong_mask_is_refused():
    mask = {"w": torch.tensor([True, False, True, True])}
    other = {"w": torch.tensor([True, True, False, True])}
    body = wire.encode({"w": torch.tensor([1.0, 0.0, 0.0, 2.0])}, within=mask)
    with pytest.raises(WireError, match="another common mask"):
        wire.decode(body, within=other)
    with pytest.raises(WireError, match="within="):
        wire.decode(body)
    with pytest.raises(ValueError, match="one bool mask per tensor"):
        wire.encode({"w": torch.ones(3)}, within=mask)


def test_the_parts_of_a_report_add_up():
    grads = {"w": band(5_000, 0.2), "b": torch.zeros(7), "half": band(500, 0.2, dtype=torch.float16)}
    body = wire.encode(grads)
    report = wire.size_report(grads, body)
    assert report.total_bytes == len(body) == report.header_bytes + report.positions_bytes + report.values_bytes
    assert report.dense_bytes == 4 * 5_007 + 2 * 500
    assert report.ratio == len(body) / report.dense_bytes
    assert report.tensors["b"].form == "none+plain"
    assert report.tensors["w"].sent == 1_000
    assert report.paper_bytes * 8 == wire.paper_bits(grads) == 32 * 1_100 + 4_407


@pytest.mark.parametrize("bad", [torch.tensor([1.0, math.nan]), torch.tensor([-math.inf]), torch.tensor([1, 2])])
def test_what_must_not_be_sent_is_refused(bad):
    with pytest.raises(GradientError, match="w "):
        wire.encode({"w": bad})


def test_tensors_that_are_not_contiguous_come_back():
    grads = {"w": band(5_000, 0.2).reshape(50, 100).T, "b": band(100, 0.5)[::2]}
    assert_same(grads, wire.decode(wire.encode(grads)))


def test_decoded_tensors_may_be_changed():
    for tensor in wire.decode(wire.encode({"w": band(500, 0.2), "d": torch.ones(3).double()})).values():
        tensor.add_(1)


def test_like_sets_the_order_and_must_match_exactly():
    grads = {"a": torch.ones(2), "b": torch.zeros(3)}
    body = wire.encode(grads)
    assert list(wire.decode(body, like={"b": grads["b"], "a": grads["a"]})) == ["b", "a"]
    for like in (
        {"a": grads["a"]},
        {**grads, "c": torch.ones(1)},
        {"a": torch.ones(2, 1), "b": grads["b"]},
        {"a": torch.ones(2).half(), "b": grads["b"]},
    ):
        with pytest.raises(WireError):
            wire.decode(body, like=like)


def test_growing_bins_cover_every_integer_once():
    base, width = GROWING.base[:GROWING_ALPHABET].astype(object), GROWING.width[:GROWING_ALPHABET].astype(object)
    assert base[0] == 0
    assert (base[:-1] + 2 ** width[:-1] == base[1:]).all()
    assert base[-1] + 2 ** width[-1] == 2**32
    assert growing_symbols(np.array([2**32 - 1], np.uint32))[0] == GROWING_ALPHABET - 1


def test_the_bytes_of_a_small_payload_are_as_documented():
    body = wire.encode({"w": torch.tensor([0.0, -3.0, 0.0, 0.5])})
    rest = bytes.fromhex("00 01 01 77 02 01 04 02 01 08 0a 000040c0 0000003f")
    assert body == b"GVW\x01" + struct.pack("<I", zlib.crc32(rest)) + rest


def test_kernels_compile_where_no_folder_can_be_written(monkeypatch):
    real = numba.njit

    def read_only(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return real(**options)

    monkeypatch.setattr(numba, "njit", read_only)
    assert compiled(lambda x: x + 1)(1) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_to_it():
    grads = {"w": band(5_000, 0.2).cuda().reshape(50, 100).T, "b": band(30, 0.5, dtype=torch.bfloat16).cuda()}
    mask = {name: g != 0 for name, g in grads.items()}
    for within in (None, mask):
        back = wire.decode(wire.encode(grads, within=within), like=grads, within=within)
        assert all(tensor.is_cuda for tensor in back.values())
        assert_same(grads, back)
