"""The client's shell: conservation, taking back, resuming, and refusing without a trace."""

import copy
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from scipy import stats
from torch import nn
from torch.nn.functional import cross_entropy

from gradveil import (
    AlignedDualPrune,
    Batch,
    Chain,
    Defense,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Payload,
    RandomK,
    TopK,
    Veil,
    adgp,
    dgp,
    gradient,
    tree,
    unseal,
)
from gradveil.core import Grads, Need, State, Step
from gradveil.defenses.noise import normal_like
from gradveil.errors import GradientError, NeedError, StateError
from gradveil.secret import SecretGenerator, system_seed
from gradveil.veil import derive_rng

SHAPES = {"conv": (6, 3, 3, 3), "bias": (6,), "scalar": (), "empty": (0, 4), "fc": (10, 50)}


def grads(rng: torch.Generator, dtype: torch.dtype = torch.float32) -> Grads:
    return {name: torch.randn(shape, generator=rng).to(dtype) for name, shape in SHAPES.items()}


def same(a: Grads, b: Grads) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


FEEDBACK: list[Defense] = [
    dgp(),
    ErrorFeedback(TopK(0.1)),
    ErrorFeedback(RandomK(0.3)),
    ErrorFeedback(DualPrune(excess="clip")),
    Chain(ErrorFeedback(DualPrune())),
]


@pytest.mark.parametrize("defense", FEEDBACK, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_what_is_sent_plus_the_residual_is_what_came_in(
    defense: Defense, dtype: torch.dtype, rng: torch.Generator
) -> None:
    first = grads(rng, dtype)
    veil = Veil(defense, first, seed=1)
    wide = torch.promote_types(dtype, torch.float32)
    came = tree.tmap(lambda t: torch.zeros_like(t, dtype=torch.float64), first)
    left = dict(came)
    for _ in range(12):
        g = grads(rng, dtype)
        payload = veil.seal(g, 4)
        came = {k: came[k] + g[k].double() for k in came}
        left = {k: left[k] + unseal(payload)[k].double() for k in left}
    residual = veil.residual
    assert residual is not None
    for name in came:
        assert residual[name].dtype == wide
        torch.testing.assert_close(left[name] + residual[name].double(), came[name], rtol=1e-5, atol=2e-5)


def test_one_step_is_algorithm_2(rng: torch.Generator) -> None:
    veil = Veil(dgp(), grads(rng))
    held = tree.zeros_like(grads(rng))
    for _ in range(3):
        g = grads(rng)
        sent = unseal(veil.seal(g, 1))
        total = tree.add(g, held)
        expected, _ = DualPrune().apply(total, {}, None)  # type: ignore[arg-type]
        held = tree.sub(total, expected)
        assert same(sent, expected)
        assert same(veil.residual or {}, held)


def test_health_reports_gamma_and_the_residual(rng: torch.Generator) -> None:
    veil = Veil(dgp(), grads(rng))
    g = grads(rng)
    sent = unseal(veil.seal(g, 1))
    assert veil.health is not None
    assert veil.health.residual_norm == pytest.approx(tree.global_norm(tree.sub(g, sent)))
    kept = (tree.global_norm(sent) / tree.global_norm(g)) ** 2
    assert veil.health.gamma == pytest.approx(1 - kept, rel=1e-5)
    assert veil.health.per_layer["fc"] == pytest.approx(0.2)


def test_clipping_the_top_bounds_the_residual(rng: torch.Generator) -> None:
    g = {"w": torch.randn(400, generator=rng)}
    norms = {}
    for excess in ("hold", "clip"):
        veil = Veil(ErrorFeedback(DualPrune(bottom=0.8, excess=excess)), g)
        for _ in range(300):
            veil.seal(g, 1)
        assert veil.health is not None
        norms[excess] = veil.health.residual_norm / tree.global_norm(g)
    assert norms["hold"] > 100  # the top entries never leave
    assert norms["clip"] < 15


@pytest.mark.parametrize("defense", FEEDBACK, ids=repr)
def test_an_upload_that_failed_is_taken_back(defense: Defense, rng: torch.Generator) -> None:
    veil, g = Veil(defense, grads(rng), seed=3), grads(rng)
    payload = veil.seal(g, 2)
    veil.undo(payload)
    assert veil.residual is not None
    for name in g:
        torch.testing.assert_close(veil.residual[name], g[name])
    with pytest.raises(StateError, match="not open"):
        veil.undo(payload)
    with pytest.raises(StateError, match="not open"):
        veil.undo(Payload(b"forged", 1, 0))
    other = veil.seal(g, 2)
    veil.acknowledge(other)
    with pytest.raises(StateError, match="not open"):
        veil.undo(other)


def test_a_round_that_comes_again_has_other_noise(rng: torch.Generator) -> None:
    g = grads(rng)
    veil = Veil(GaussianNoise(1.0), g)
    start = veil.state_dict()
    first = veil.seal(g, 1)
    veil.load_state_dict(start)
    assert veil.seal(g, 1).body != first.body
    seeded = Veil(GaussianNoise(1.0), g, seed=1)
    first = seeded.seal(g, 1)
    seeded.load_state_dict(start)
    assert seeded.seal(g, 1).body == first.body


FORK = """
import os, torch
from gradveil import GaussianNoise, Veil
like = {"w": torch.zeros(9)}
veil = Veil(GaussianNoise(1.0), like)
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, veil.seal(like, 1).body)
    os._exit(0)
assert os.read(read, 1000) != veil.seal(like, 1).body
"""


def test_a_process_forked_off_has_other_noise() -> None:
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=120)


def test_two_threads_do_not_send_the_same_round_twice(rng: torch.Generator) -> None:
    class Slow(GaussianNoise):
        def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
            together.wait(timeout=30)  # both have read state and round
            return super().apply(grads, state, step)

    together, g = threading.Barrier(2), grads(rng)
    veil = Veil(Slow(1.0), g)
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(veil.seal, g, 1).exception for _ in range(2)]
        errors = [end() for end in ends]
    assert sorted(type(error).__name__ for error in errors) == ["NoneType", "StateError"]
    assert veil.round == 1


def test_no_residual_no_taking_back(rng: torch.Generator) -> None:
    veil = Veil(DualPrune(), grads(rng))
    payload = veil.seal(grads(rng), 1)
    with pytest.raises(NeedError, match="ErrorFeedback"):
        veil.undo(payload)


@pytest.mark.parametrize("defense", [*FEEDBACK, Chain(dgp(), GaussianNoise(0.1, sent_only=True))], ids=repr)
def test_resumed_is_bit_identical(defense: Defense, rng: torch.Generator, tmp_path: Path) -> None:
    rounds = [grads(rng) for _ in range(6)]
    straight = Veil(defense, rounds[0], seed=7, client="a")
    bodies = [straight.seal(g, 1).body for g in rounds]

    first = Veil(defense, rounds[0], seed=7, client="a")
    early = [first.seal(g, 1) for g in rounds[:3]]
    first.save(tmp_path / "client.safetensors")
    second = Veil(defense, rounds[0], seed=7, client="a")
    second.load(tmp_path / "client.safetensors")
    assert bodies == [p.body for p in early] + [second.seal(g, 1).body for g in rounds[3:]]
    assert not list(tmp_path.glob("*.tmp"))
    if second.residual is not None and not defense.noisy:
        second.undo(early[2])  # open uploads survive the restart too


def test_state_of_something_else_is_refused(rng: torch.Generator, tmp_path: Path) -> None:
    veil = Veil(dgp(), grads(rng))
    before = veil.state_dict()
    for wrong in (
        Veil(DualPrune(), grads(rng)).state_dict(),
        Veil(dgp(), {"other": torch.zeros(3)}).state_dict(),
        Veil(dgp(), {**grads(rng), "fc": torch.zeros(2, 2)}).state_dict(),
    ):
        with pytest.raises(StateError):
            veil.load_state_dict(wrong)
    (tmp_path / "bad").write_bytes(b"\x80\x04garbage")
    with pytest.raises(StateError, match="cannot read"):
        veil.load(tmp_path / "bad")
    assert same(veil.state_dict(), before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_changes_nothing(bad: float, rng: torch.Generator) -> None:
    veil = Veil(dgp(), grads(rng), seed=1)
    veil.seal(grads(rng), 1)
    before = copy.deepcopy(veil.state_dict())
    wrong = grads(rng)
    wrong["fc"][3, 4] = bad
    with pytest.raises(GradientError, match="fc holds NaN or infinity"):
        veil.seal(wrong, 1)
    with pytest.raises(NeedError, match="extra"):
        veil.seal({**grads(rng), "extra": torch.ones(1)}, 1)
    with pytest.raises(NeedError, match="shape"):
        veil.seal({**grads(rng), "fc": torch.ones(1)}, 1)
    with pytest.raises(GradientError, match="int64"):
        veil.seal({**grads(rng), "bias": torch.ones(6, dtype=torch.int64)}, 1)
    with pytest.raises(GradientError, match="fc is sparse"):
        veil.seal({**grads(rng), "fc": torch.ones(10, 50).to_sparse()}, 1)
    with pytest.raises(ValueError, match="num_examples"):
        veil.seal(grads(rng), 0)
    assert same(veil.state_dict(), before)


def test_a_huge_but_finite_gradient_is_not_called_infinite(rng: torch.Generator) -> None:
    veil = Veil(DualPrune(), {"w": torch.zeros(8)})
    veil.seal({"w": torch.full((8,), 3e38)}, 1)


def test_clients_and_rounds_draw_different_noise(rng: torch.Generator) -> None:
    g = grads(rng)
    a, b = (Veil(GaussianNoise(1.0), g, seed=5, client=c) for c in "ab")
    bodies = {v.seal(g, 1).body for v in (a, b) for _ in range(2)}
    assert len(bodies) == 4
    assert Veil(GaussianNoise(1.0), g, seed=5, client="a").seal(g, 1).body in bodies
    assert Veil(GaussianNoise(1.0), g).seal(g, 1).body != Veil(GaussianNoise(1.0), g).seal(g, 1).body


def test_noise_of_a_secret_seed_cannot_be_searched_for() -> None:
    """torch's CPU generator takes 32 bits of a seed, and its numbers are linear: both would let noise be subtracted."""
    like = {"w": torch.zeros(20_000)}
    veil = Veil(GaussianNoise(1.0), like)
    rng = veil._step(None, None, None).rng
    assert isinstance(rng, SecretGenerator)
    sent = unseal(veil.seal(like, 1))["w"]
    assert torch.equal(rng.normal((20_000,)), sent)
    assert not torch.equal(rng.normal((20_000,)), sent)
    assert stats.kstest(sent.numpy(), "norm").pvalue > 1e-4
    assert abs(float((sent[:-1] * sent[1:]).mean())) < 0.05
    searched = torch.Generator().manual_seed(rng.initial_seed())
    assert not torch.equal(torch.rand(50, generator=rng), torch.rand(50, generator=searched))


def test_a_secret_generator_repeats_itself_and_an_experiment_keeps_its_numbers() -> None:
    seed = system_seed()
    for draw in (lambda rng: torch.rand(50, generator=rng), lambda rng: normal_like(torch.zeros(3, 5), rng)):
        first, same, other = (draw(derive_rng(seed, "a", round_)) for round_ in (0, 0, 1))
        assert torch.equal(first, same)
        assert not torch.equal(first, other)
    assert normal_like(torch.zeros(()), derive_rng(seed, "a", 0)).shape == ()
    assert normal_like(torch.zeros(0, 4), derive_rng(seed, "a", 0)).shape == (0, 4)
    assert type(derive_rng(7, "a", 0)) is torch.Generator


def test_copy_is_a_free_probe(rng: torch.Generator) -> None:
    veil = Veil(dgp(), grads(rng))
    veil.seal(grads(rng), 1)
    before = veil.residual
    copy.copy(veil).seal(grads(rng), 1)
    assert same(veil.residual or {}, before or {})


def test_what_a_probe_sealed_cannot_be_taken_back(rng: torch.Generator) -> None:
    veil = Veil(dgp(), grads(rng), seed=1)
    probe = copy.copy(veil)
    sealed = probe.seal(grads(rng), 1)
    with pytest.raises(StateError, match="not sealed here"):
        veil.undo(sealed)
    probe.undo(sealed)


def test_a_defense_that_forgets_to_add_up_its_examples_sends_nothing(rng: torch.Generator) -> None:
    class Forgetful(Defense):
        @property
        def needs(self) -> frozenset[Need]:
            return frozenset({"per_example"})

        def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
            return grads, state

    veil = Veil(Forgetful(), {"w": torch.zeros(3)}, seed=1)
    with pytest.raises(GradientError, match="nothing is sent"):
        veil.seal({"w": torch.randn(8, 3, generator=rng)}, 8)
    assert veil.round == 0


def test_the_state_file_is_for_its_owner_only(rng: torch.Generator, tmp_path: Path) -> None:
    Veil(dgp(), grads(rng), seed=1).save(tmp_path / "state.safetensors")
    assert (tmp_path / "state.safetensors").stat().st_mode & 0o077 == 0


class TestAligned:
    def test_round(self, rng: torch.Generator) -> None:
        g = {"w": torch.randn(40, 50, generator=rng), "b": torch.randn(10, generator=rng)}
        users = [Veil(adgp(), g, seed=i) for i in range(4)]
        for _ in range(3):
            local = [{k: torch.randn(v.shape, generator=rng) for k, v in g.items()} for _ in users]
            mask = users[2].propose(local[2])
            assert int(mask["w"].sum()) == 800
            for veil, mine in zip(users, local, strict=True):
                total = tree.add(mine, veil.residual or {})
                sent = unseal(veil.seal(mine, 1, mask=mask), within=mask)
                assert not (sent["w"].ne(0) & ~mask["w"]).any()
                assert sent["w"].count_nonzero() <= 400
                largest = total["w"].abs().flatten().topk(100).indices
                assert not sent["w"].flatten()[largest].any()  # its own top 5 % stay home
                outside = total["w"].abs().masked_fill(~mask["w"], 0).flatten()
                outside[largest] = 0
                assert set(sent["w"].flatten().nonzero().flatten().tolist()) == set(outside.topk(400).indices.tolist())
        assert users[2].health is not None

    @pytest.mark.parametrize("harm", ["population", "zeros", "shape", "dtype", "names"])
    def test_bad_masks_are_refused(self, harm: str, rng: torch.Generator) -> None:
        g = {"w": torch.randn(40, 50, generator=rng)}
        veil = Veil(adgp(), g)
        mask = veil.propose(g)
        bad = {
            "population": {"w": mask["w"] | (torch.rand(40, 50, generator=rng) < 0.1)},
            "zeros": {"w": torch.zeros_like(mask["w"])},
            "shape": {"w": mask["w"].flatten()},
            "dtype": {"w": mask["w"].float()},
            "names": {"v": mask["w"]},
        }[harm]
        before = veil.state_dict()
        with pytest.raises(NeedError, match="common mask"):
            veil.seal(g, 1, mask=bad)
        with pytest.raises(NeedError, match="mask"):
            veil.seal(g, 1)
        assert same(veil.state_dict(), before)

    def test_arguments(self) -> None:
        with pytest.raises(ValueError, match="top must be below keep"):
            AlignedDualPrune(keep=0.05, top=0.05)


def test_protect_is_gradient_then_seal(rng: torch.Generator) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    batch = Batch(torch.randn(5, 3, 2, 2, generator=rng), torch.tensor([0, 1, 2, 0, 1]))
    params = {n: p.detach() for n, p in model.named_parameters()}
    payload = Veil(dgp(), params).protect(model, cross_entropy, batch)
    assert payload.num_examples == 5
    by_hand = Veil(dgp(), params).seal(gradient(model, cross_entropy, batch), 5)
    assert payload.body == by_hand.body


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DualPrune(top=0.5, bottom=0.5), "top \\+ bottom must be below 1"),
        (lambda: DualPrune(top=-0.1), "top must be a share"),
        (lambda: DualPrune(rounding="up"), "rounding must be one of"),
        (lambda: TopK(0.0), "keep must be"),
        (lambda: ErrorFeedback(GaussianNoise(0.1)), "put the noise outside"),
        (lambda: Chain(), "at least one"),
        (lambda: GaussianNoise(float("nan")), "std must be"),
    ],
)
def test_arguments_are_named_in_errors(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("open.x", torch.zeros(32, dtype=torch.uint8), "damaged"),
        ("round", torch.tensor([1, 2]), "damaged"),
        ("state.residual.w", torch.full((4,), float("nan")), "NaN"),
        ("state.residual.w", torch.zeros(4, dtype=torch.float16), r"float16 \(4,\), expected float32"),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name: str, value: torch.Tensor, complaint: str) -> None:
    params = {"w": torch.zeros(4)}
    saved = Veil(dgp(), params, guard=None)
    saved.seal({"w": torch.arange(4.0)}, 1)
    veil = Veil(dgp(), params, guard=None)
    before = veil.state_dict()
    with pytest.raises(StateError, match=complaint):
        veil.load_state_dict({**saved.state_dict(), name: value})
    after = veil.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key], t) for key, t in before.items())
