"""The hardened release: unbiased over time, bounded, cheap on the wire, and only as informative as it claims."""

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from gradveil import Step, Veil, data, theory, tree, unseal
from gradveil.cli import app
from gradveil.cli import commands as _commands  # noqa: F401
from gradveil.defenses import DEFENSES, Hardened, hardened, strategy_sensitivity
from gradveil.defenses.advice import ADVICE
from gradveil.defenses.hardened import PEAK, extent, on_grid
from gradveil.errors import GradientError, NeedError
from gradveil.gradients import gradient as plain_gradient
from gradveil.models import build as build_model
from gradveil.spec import build, to_text
from gradveil.training import Settings, assemble
from gradveil.training.flat import Layout, Rows
from gradveil.training.protectors import protector_for
from gradveil.training.protectors.hardened import Noisy

N = 20_000
GRID = [2 ** (k / 4) for k in range(-128, 257)]


def just_below(size: float, rng: torch.Generator) -> torch.Tensor:
    """Return a gradient whose RMS is within a hundredth of `size`, so that the grid's next point is known."""
    g = torch.randn(N, generator=rng)
    return g * (0.995 * size / g.square().mean().sqrt())


def gradient(rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(N, generator=rng) ** 3, "b": torch.randn(10, generator=rng)}


@pytest.mark.parametrize("bits", [0, 1, 2, 3])
@pytest.mark.parametrize("noise", [1.0, 16.0])
def test_nothing_is_lost_and_the_residual_stays_bounded(bits: int, noise: float, rng: torch.Generator) -> None:
    veil = Veil(Hardened(noise, 1, bits), gradient(rng), seed=1)
    came, left, norms = torch.zeros(N), torch.zeros(N), []
    for _ in range(40):
        g = gradient(rng)
        came += g["w"]
        left += unseal(veil.seal(g, 1))["w"]
        assert veil.residual is not None
        norms.append(float(veil.residual["w"].norm() / (noise * g["w"].norm())))
    torch.testing.assert_close(left + veil.residual["w"], came, rtol=1e-4, atol=1e-3 * noise)
    assert max(norms[20:]) < 2.0  # about one noise, never more than a few
    assert sum(norms[30:]) / 10 < 1.5 * sum(norms[10:20]) / 10


def test_noise_taken_back_does_not_add_up(rng: torch.Generator) -> None:
    """With memory the error of the running sum is one noise; without, it grows with the square root of time."""
    errors = {}
    for memory in (1.0, 0.0):
        veil = Veil(Hardened(noise=4.0, examples=1, bits=0, memory=memory), gradient(rng), seed=2)
        came, left = torch.zeros(N), torch.zeros(N)
        for _ in range(100):
            g = {"w": just_below(1.0, rng), "b": torch.zeros(10)}
            came += g["w"]
            left += unseal(veil.seal(g, 1))["w"]
        errors[memory] = float((left - came).std())
    assert errors[1.0] == pytest.approx(4.0, rel=0.05)
    assert errors[0.0] == pytest.approx(40.0, rel=0.05)


def test_memory_is_the_share_of_the_last_noise_that_comes_back(rng: torch.Generator) -> None:
    """Uploads are gradients behind fresh noise less `memory` times the last: the strategy of `CorrelatedNoise`.

    So what a whole run says about one batch is the bound of one upload times the squared sensitivity of that strategy.
    """
    g = just_below(1.0, rng)
    veil = Veil(Hardened(noise=4.0, examples=1, bits=0, memory=0.7), {"w": g}, seed=4)
    noise = [(unseal(veil.seal({"w": g}, 1))["w"] - g) / 4.0 for _ in range(5)]
    for before, now in pairwise(noise[1:]):
        assert float(now.var()) == pytest.approx(1 + 0.7**2, rel=0.05)
        assert float((before * now).mean()) == pytest.approx(-0.7, abs=0.05)
    assert strategy_sensitivity(0.7, rounds=500) ** 2 == pytest.approx(1 / (1 - 0.7**2))


@pytest.mark.parametrize(("bits", "most"), [(1, 1.05), (2, 1.95), (3, 2.9)])
def test_bits_on_the_wire(bits: int, most: float, rng: torch.Generator) -> None:
    veil = Veil(Hardened(64.0, 1, bits), gradient(rng), seed=3)
    for _ in range(3):
        payload = veil.seal(gradient(rng), 1)
    assert 8 * (payload.nbytes - 100) / N < most
    assert len(unseal(payload)["w"].abs().unique()) == 2 ** (bits - 1)


def test_an_upload_carries_no_more_than_its_bound(rng: torch.Generator) -> None:
    """Which of two opposite gradients was sent: the best test's error must not beat what the information allows."""
    g = torch.randn(400, generator=rng)
    for noise in (20.0, 60.0):
        wins, trials = 0, 2000
        defense = Hardened(noise, 1, bits=2)
        state = defense.init({"w": g})
        signs = torch.randint(0, 2, (trials,), generator=rng) * 2 - 1
        for sign in signs:
            sent, _ = defense.apply({"w": g * sign}, state, Step(rng))
            wins += bool(torch.sign(sent["w"] @ g) == sign)
        nats = theory.release_information(400, noise)
        # Fano for one fair bit: the error is at least what leaves this much information.
        error = 1 - wins / trials
        carried = math.log(2) + error * math.log(max(error, 1e-9)) + (1 - error) * math.log(1 - error)
        assert carried <= nats + 3 / math.sqrt(trials)
        assert wins / trials > 0.5  # and it does carry something: the bound is not met by sending nothing


def test_nothing_leaves_before_enough_examples_are_mixed(rng: torch.Generator) -> None:
    veil = Veil(Hardened(noise=4.0, examples=32, bits=0), {"w": torch.zeros(N)}, seed=1)
    came = torch.zeros(N)
    for i in range(8):
        g = just_below(0.5 if i % 4 == 3 else 1.166, rng)
        came += g
        sent = unseal(veil.seal({"w": g}, 8))["w"]
        assert bool(sent.any()) == (i % 4 == 3)
        if i == 3:  # noise for all four together, however small the last one is
            assert float((sent - came).std()) == pytest.approx(16.0, rel=0.05)
    assert veil.residual is not None
    with pytest.raises(NeedError, match="how many examples"):
        Hardened().apply({"w": torch.zeros(3)}, Hardened().init({"w": torch.zeros(3)}), Step(rng))


def test_zero_gradients_send_zeros(rng: torch.Generator) -> None:
    veil = Veil(Hardened(examples=1), {"w": torch.zeros(50)}, seed=1)
    assert not unseal(veil.seal({"w": torch.zeros(50)}, 1))["w"].any()


def test_the_size_of_the_noise_is_the_next_one_on_the_grid(rng: torch.Generator) -> None:
    sizes = torch.exp2(torch.rand(500, generator=rng, dtype=torch.float64) * 110 - 40)
    for size, found in zip(sizes.tolist(), on_grid(sizes).tolist(), strict=True):
        above = [point for point in GRID if point >= size]
        assert found == (pytest.approx(above[0], rel=1e-9) if above else math.inf)
    known = {*on_grid(torch.tensor([0.0, 1e30])).tolist(), *on_grid(torch.tensor(GRID) * 0.99).tolist()}
    assert len(known) == theory.SCALES == len(GRID) + 2


def test_uploads_of_gradients_of_about_the_same_size_show_the_same_size(rng: torch.Generator) -> None:
    g, shown = torch.randn(N, generator=rng), set()
    for share in (0.90, 0.93, 0.99):
        veil = Veil(Hardened(16.0, 1), {"w": g}, seed=1)
        sent = unseal(veil.seal({"w": g / g.square().mean().sqrt() * share}, 1))["w"]
        shown.add(tuple(sent.abs().unique().tolist()))
    assert len(shown) == 1


def test_a_tensor_without_a_gradient_keeps_its_noise(rng: torch.Generator) -> None:
    """It would send its bare residual otherwise, and with it the last gradient and its noise."""
    veil = Veil(Hardened(4.0, 1, bits=0), {"w": torch.zeros(N)}, seed=1)
    g = just_below(1.0, rng)
    first = unseal(veil.seal({"w": g}, 1))["w"]
    second = unseal(veil.seal({"w": torch.zeros(N)}, 1))["w"]
    assert float((first + second - g).std()) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(("fall", "low", "high"), [(0.0, 0.9, 1.0), (hardened.FASTEST_FALL, 0.0, 0.3)])
def test_a_model_that_shrinks_does_not_bring_the_first_gradient_out(
    fall: float, low: float, high: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that scales its weights down makes gradients, and with them the noise, as small as it likes.

    The sum of the uploads is then the sum of the gradients behind the newest noise: next to none, if it could follow.
    """
    monkeypatch.setattr(hardened, "FASTEST_FALL", fall)
    photos = data.load("photos")
    model = build_model("mlp(hidden=64)", num_classes=len(photos.classes), input_shape=photos.input_shape)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    veil = Veil(Hardened(), start, seed=1)  # with the default guard, which lets all these models pass
    came, left = tree.zeros_like(start), tree.zeros_like(start)
    for t in range(16):
        batch = photos.batch(range(32 * (t % 3), 32 * (t % 3) + 32))
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(start[name] * 0.7**t)
        came = tree.add(came, plain_gradient(model, cross_entropy, batch))
        left = tree.add(left, unseal(veil.protect(model, cross_entropy, batch)))
    name = next(name for name in start if start[name].ndim == 2)
    cosine = float(torch.cosine_similarity(came[name].flatten(), left[name].flatten(), dim=0))
    assert low <= cosine <= high


def test_half_gradients_get_their_noise_and_huge_ones_are_refused(rng: torch.Generator) -> None:
    small = {"w": (1e-5 * torch.randn(N, generator=rng)).half()}  # its squares are zero in this type
    sent, _ = Hardened(16.0, 1, 0).apply(small, Hardened().init(small), Step(rng))
    assert sent["w"].dtype is torch.float16
    assert 16e-5 < float(sent["w"].float().std()) < 20e-5
    with pytest.raises(GradientError, match="infinity"):
        Veil(Hardened(64.0, 1), small, seed=0).seal({"w": torch.full((N,), 1e25)}, 1)


@pytest.mark.parametrize(
    ("shape", "follows"), [((256, 64), True), ((64, 4, 8, 8), True), ((10, 640), False), ((256, 8, 3, 3), False)]
)
def test_one_unit_that_stands_out_takes_the_noise_along(
    shape: tuple[int, ...], follows: bool, rng: torch.Generator
) -> None:
    """Else a server silences the others, and the RMS of the tensor says nothing about the one that is left."""
    g = 1e-3 * torch.randn(shape, generator=rng)
    g[3] = torch.randn(shape[1:], generator=rng)
    row, whole = (float(t.square().mean().sqrt()) for t in (g[3], g))
    wanted = row / PEAK if follows else whole
    assert float(extent(g[None])) == pytest.approx(wanted, rel=1e-4)
    sent = unseal(Veil(Hardened(16.0, 1, 0), {"w": g}, seed=0).seal({"w": g}, 1))["w"]
    noise = float((sent - g).square().mean().sqrt())
    assert noise == pytest.approx(float(on_grid(torch.tensor(16 * wanted))), rel=0.05)


@pytest.mark.parametrize(
    ("text", "noise"), [("hardened", 64.0), ("hardened(noise=7.5)", 7.5), ("hardened(nats=500)", 105.7)]
)
def test_the_noise_follows_the_size_of_the_model(text: str, noise: float) -> None:
    defense = build(DEFENSES, text, "defense")
    assert isinstance(defense, Hardened)
    assert to_text(defense) == text
    resnet = sum(p.numel() for p in build_model("resnet18", num_classes=10, input_shape=(3, 32, 32)).parameters())
    assert defense.strength(resnet) == pytest.approx(noise, rel=5e-3)
    assert defense.strength(8_000) == (noise if defense.noise else 16.0)


def test_the_fast_engine_does_the_same(rng: torch.Generator) -> None:
    job = assemble(Settings("lenet", "digits", defense="hardened", users=2, rounds=2))
    params = dict(job.model.named_parameters())
    layout = Layout(params)
    rows = Rows(torch.randn(2, layout.total, generator=rng), layout)
    came = [{name: g.clone() for name, g in layout.views(row).items()} for row in rows.grads]
    protector = protector_for(job.defense, rows, job)
    assert isinstance(protector, Noisy)
    sent = protector.step(0, [])
    for user, grads in enumerate(came):
        state = protector.states()[user]
        assert state.keys() == job.defense.init(params).keys()
        for name, g in grads.items():
            out = layout.views(sent[user])[name]
            torch.testing.assert_close(out + state[f"residual.{name}"], g, rtol=1e-4, atol=1e-4)
            scale = on_grid(16.0 * g.square().mean().sqrt())
            possible = scale * torch.tensor(Hardened().levels(16.0))
            assert all(float((possible / size - 1).abs().min()) < 1e-3 for size in out.abs().unique())


@pytest.mark.parametrize("model", ["lenet", "mlp"])
@pytest.mark.parametrize("sizes", [[32, 12, 20], [12, 12, 20], [16, 16, 16]])
def test_users_with_small_batches_wait_in_the_fast_engine_too(
    sizes: list[int], model: str, rng: torch.Generator
) -> None:
    """Against the defense itself, user by user, also after a restart; the noise is other noise, its size is not."""
    defense = Hardened(noise=1.0, examples=32, bits=0)
    settings = Settings(model, "digits", users=3, rounds=2)
    job = replace(assemble(settings, defense=defense), feed=SimpleNamespace(sizes=sizes))
    layout = Layout(dict(job.model.named_parameters()))
    rows = Rows(torch.zeros(3, layout.total), layout)
    protector, states = protector_for(defense, rows, job), [defense.init(layout.views(row)) for row in rows.grads]
    assert isinstance(protector, Noisy)
    for round_ in range(5):
        rows.grads.copy_(torch.randn(3, layout.total, generator=rng))
        for row in rows.grads:
            next(iter(layout.views(row).values()))[0] *= 30  # one unit stands out
        came = [tree.tmap(torch.clone, layout.views(row)) for row in rows.grads]
        before = [tree.tmap(torch.clone, layout.views(protector.residual(user))) for user in range(3)]  # type: ignore[arg-type]
        sent = [layout.views(row) for row in protector.step(round_, [])]
        for user, (mine, state) in enumerate(zip(sent, protector.states(), strict=True)):
            step = Step(torch.Generator().manual_seed(10 * round_ + user), round_, num_examples=job.examples[user])
            theirs, states[user] = defense.apply(came[user], states[user], step)
            assert tree.global_norm(mine) == pytest.approx(tree.global_norm(theirs), rel=0.2)
            kept = tree.add(mine, tree.only("residual", state))
            for name, total in tree.add(before[user], came[user]).items():
                torch.testing.assert_close(kept[name], total, rtol=1e-4, atol=1e-4)
            assert state.keys() == states[user].keys()
            for part in ("size", "waiting"):
                for name, size in tree.only(part, states[user]).items():
                    torch.testing.assert_close(tree.only(part, state)[name], size, rtol=1e-4, atol=1e-5)
            assert state["mixed"] == states[user]["mixed"]
        again = protector_for(defense, rows, job)
        again.load(protector.states())
        protector = again


def test_the_noise_of_the_fast_engine_falls_as_slowly_also_after_a_restart(rng: torch.Generator) -> None:
    job = assemble(Settings("lenet", "digits", defense="hardened", users=2, rounds=2))
    layout = Layout(dict(job.model.named_parameters()))
    first = Rows(torch.randn(2, layout.total, generator=rng), layout)
    came = [tree.tmap(torch.clone, layout.views(row)) for row in first.grads]
    before = protector_for(job.defense, first, job)
    before.step(0, [])
    after = protector_for(job.defense, Rows(1e-3 * torch.randn(2, layout.total, generator=rng), layout), job)
    after.load(before.states())
    for grads, row in zip(came, after.step(1, []), strict=True):
        for name, out in layout.views(row).items():
            least = on_grid(16.0 * 0.99 * grads[name].square().mean().sqrt()) * min(Hardened().levels(16.0))
            assert float(out.abs().min()) > 0.999 * float(least)


def test_the_advice_is_what_the_page_says_and_can_be_built() -> None:
    page = (Path(__file__).parents[1] / "docs" / "hardened.md").read_text(encoding="utf-8")
    table = page.partition("## Presets per threat model")[2].partition("\n\nFor an example")[0].strip().splitlines()[4:]
    for row, line in zip(ADVICE, table, strict=True):
        threat, release, beside, _ = (cell.strip().replace("`", "") for cell in line.strip("|").split(" | "))
        assert (row.threat, row.defense) == (threat, release.partition(", or")[0])
        assert beside.startswith(row.beside)
        assert to_text(build(DEFENSES, row.defense, "defense"))
    shown = CliRunner().invoke(app, ["list"])
    assert shown.exit_code == 0
    assert all(row.threat.split()[0] in shown.output for row in ADVICE)


def test_undo_puts_everything_back(rng: torch.Generator) -> None:
    veil = Veil(Hardened(examples=1), gradient(rng), seed=1)
    g = gradient(rng)
    veil.undo(veil.seal(g, 1))
    assert veil.residual is not None
    assert tree.global_norm(tree.sub(veil.residual, g)) < 1e-3 * tree.global_norm(g)


@pytest.mark.parametrize("wrong", [{"noise": 0.0}, {"noise": -1.0}, {"bits": 5}, {"memory": 1.5}, {"nats": 0.0}])
def test_arguments(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Hardened(**wrong)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("bits", [0, 1, 2, 3])
def test_gpu_kernel_does_the_same(bits: int, rng: torch.Generator) -> None:
    from gradveil.training.protectors.release import Release

    sizes = [1, 10, 5000, 100_001]
    grads, held = ([torch.randn(n, generator=rng).cuda() for n in sizes] for _ in range(2))
    totals = [g + h for g, h in zip(grads, held, strict=True)]
    scales = [float(on_grid(8.0 * g.square().mean().sqrt())) for g in grads]
    defense = Hardened(8.0, 1, bits)
    least = torch.zeros(len(sizes), device="cuda")
    least[1] = 5.0  # the last upload's noise was larger
    scales[1] = float(on_grid(torch.tensor(8.0 * 5.0)))
    waiting = torch.zeros_like(least)
    waiting[2] = 3.0  # of a batch that did not leave yet
    scales[2] = float(on_grid(8.0 * (3.0 + grads[2].square().mean().sqrt())))
    rows = zip(grads, waiting.tolist(), least.tolist(), strict=True)
    expected = [max(float(g.square().mean().sqrt()) + more, at_least) for g, more, at_least in rows]
    used = Release(defense, 8.0, grads, held).run(5, least, waiting)
    torch.testing.assert_close(used.cpu(), torch.tensor(expected))
    for sent, rest, total, scale in zip(grads, held, totals, scales, strict=True):
        torch.testing.assert_close(sent + rest, total, rtol=1e-4, atol=1e-3)
        for level in sent.abs().unique().tolist() if bits else ():
            assert min(abs(level / scale / known - 1) for known in defense.levels(8.0)) < 1e-3
    error = (grads[3] - totals[3]).std() / scales[3]
    assert 0.9 < float(error) < 1.6


@pytest.mark.parametrize("bits", [0, 2])
def test_uploads_that_come_back_do_not_leave_under_the_noise_of_one(bits: int) -> None:
    grads = {"w": torch.randn(20_000, generator=torch.Generator().manual_seed(0))}
    for at_once in (True, False):
        veil = Veil(Hardened(bits=bits), tree.zeros_like(grads), seed=1, guard=None)
        pending = [veil.seal(grads, 32) for _ in range(1 if at_once else 16)]
        for _ in range(15 if at_once else 0):
            veil.undo(pending.pop())
            pending.append(veil.seal(grads, 32))
        for payload in pending:
            veil.undo(payload)
        sent = unseal(veil.seal(grads, 32))["w"]
        assert torch.cosine_similarity(sent, grads["w"], dim=0) < 0.15  # it is 0.05 for one, and was 0.6 after sixteen
        sizes = veil.state_dict()["state.size.w"] / grads["w"].square().mean().sqrt()
        assert 0.98 * 17 < float(sizes) < (18 if at_once else 120)  # no more than needed where it can be known


def test_an_empty_upload_comes_back_without_a_trace() -> None:
    grads = {"w": torch.ones(50)}
    veil = Veil(Hardened(), tree.zeros_like(grads), guard=None)
    payload = veil.seal(grads, 1)  # one of 32 examples: nothing is sent yet
    before = veil.state_dict()
    veil.undo(payload)
    after = veil.state_dict()
    assert all(torch.equal(after[name], t) for name, t in before.items() if not name.startswith("open"))
