"""DDP against the single-process reference. Run as a script, this file is one rank."""

import contextlib
import copy
import datetime
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradveil import (
    AlignedDualPrune,
    Batch,
    Chain,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Identity,
    Veil,
    dgp,
    gradient,
    tree,
    wire,
)
from gradveil.core import Defense, Grads, Masks, Step
from gradveil.defenses import ATS, PRECODE, Hardened
from gradveil.engines.ddp import RankVeil, attach
from gradveil.engines.fit import refuse_idle
from gradveil.engines.packing import pack_bits, pack_sparse, unpack_bits, unpack_sparse
from gradveil.errors import EngineError, GradientError, NeedError, StateError
from gradveil.shares import gradient_and_shares
from gradveil.veil import derive_rng

STEPS, SEED, LR = 4, 7, 0.1
GROUP_TIMEOUT = 120  # seconds; on a busy machine ranks may start half a minute apart
DEVICE = os.environ.get("GRADVEIL_TEST_DEVICE", "cpu")  # of the ranks
loss_fn = nn.CrossEntropyLoss()


def build_model(device: str = DEVICE) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)]
    return nn.Sequential(*layers).to(device)


def batch_of(rank: int, step: int, device: str = DEVICE) -> Batch:
    rng = torch.Generator().manual_seed(1000 * rank + step)
    inputs, labels = torch.randn(8, 20, generator=rng), torch.randint(10, (8,), generator=rng)
    return Batch(inputs.to(device), labels.to(device))


def run_steps(model: DistributedDataParallel, rank: int, first: int = 0, last: int = STEPS) -> None:
    for step in range(first, last):
        model.zero_grad()
        batch = batch_of(rank, step)
        loss_fn(model(batch.inputs), batch.labels).backward()
        descend(model)


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p.sub_(LR * p.grad)


# ------------------------------------------------------------------- what each rank does, by scenario


def wrap(**options: object) -> DistributedDataParallel:
    # Buckets of about 8 kB: several of them, and DDP rebuilds them after the first step.
    return DistributedDataParallel(build_model(), bucket_cap_mb=0.008, **options)  # type: ignore[arg-type]


def outcome(model: nn.Module, veil: RankVeil) -> dict[str, Tensor]:
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return {
        **tree.under("param", {n: p.detach().clone() for n, p in inner.named_parameters()}),
        **tree.under("residual", veil.residual or {}),
        "bytes": torch.tensor(veil.bytes_sent),
        "skipped": torch.tensor(veil.skipped),
    }


HARDENED = Hardened(noise=2.0, examples=16)
FOLLOWED = Hardened(noise=2.0, examples=8, balance=1.0)
NOISY = Chain(ErrorFeedback(DualPrune()), GaussianNoise(0.01))


def train_with(
    defense: Defense, num_examples: int | None = None, follow: bool = False, **options: object
) -> Callable[[int], dict[str, Tensor]]:
    def scenario(rank: int) -> dict[str, Tensor]:
        model = wrap(**options)
        veil = attach(model, defense, seed=SEED, num_examples=num_examples, follow=follow)
        run_steps(model, rank)
        return outcome(model, veil)

    return scenario


def accumulate(rank: int) -> dict[str, Tensor]:
    model = wrap()
    veil = attach(model, dgp())
    for step in range(2):
        model.zero_grad()
        first, second = batch_of(rank, 2 * step), batch_of(rank, 2 * step + 1)
        with model.no_sync():
            loss_fn(model(first.inputs), first.labels).backward()
        loss_fn(model(second.inputs), second.labels).backward()
        descend(model)
    return outcome(model, veil)


class Forked(nn.Module):
    """`side` is used on rank 0 in step 0 only, and by nobody afterwards."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main, self.side = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: Tensor, with_side: bool) -> Tensor:
        out: Tensor = self.main(x) + self.side(x) if with_side else self.main(x)
        return out


def unused(rank: int, defense: Defense | None = None) -> dict[str, Tensor]:
    model = DistributedDataParallel(Forked(), find_unused_parameters=True)
    veil = attach(model, defense or dgp())
    for step in range(3):
        model.zero_grad(set_to_none=True)
        batch = batch_of(rank, step)
        loss_fn(model(batch.inputs, rank == 0 and step == 0), batch.labels).backward()
        if step == 0:
            held = {n: r.clone() for n, r in (veil.residual or {}).items()}
        descend(model)
    return {**outcome(model, veil), **tree.under("held", held)}


class Detour(nn.Module):
    """Uses a weight twice on rank 0."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.twice, self.first, self.head = twice, nn.Linear(20, 20), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.head(self.first(x) if self.twice else x)
        return out


def untold(rank: int) -> dict[str, Tensor]:
    """Where one rank cannot follow its examples, none sends."""
    model = DistributedDataParallel(Detour(rank == 0))
    veil = attach(model, FOLLOWED, num_examples=8, follow=True)
    before, batch = veil.bytes_sent, batch_of(rank, 0)
    try:
        loss_fn(model(batch.inputs), batch.labels).backward()
    except (NeedError, RuntimeError) as error:
        refused = "single examples cannot be followed" in str(error)
    return {"refused": torch.tensor(refused), "bytes": torch.tensor(veil.bytes_sent - before)}


def followed_scaled(rank: int) -> dict[str, Tensor]:
    """Micro-batches under a loss scale: what is accumulated is followed in the units of the true gradient."""
    model = wrap()
    veil = attach(model, FOLLOWED, seed=SEED, num_examples=8, scaler=FakeScaler(4.0), follow=True)
    batch = batch_of(rank, 0)
    for half in (slice(0, 4), slice(4, 8)):
        with contextlib.nullcontext() if half.start else model.no_sync():
            (2.0 * loss_fn(model(batch.inputs[half]), batch.labels[half])).backward()  # half the loss, times four
    return {**outcome(model, veil), **grads_of(model)}


def autocast(rank: int) -> dict[str, Tensor]:
    model = wrap()
    veil = attach(model, dgp())
    for step in range(2):
        model.zero_grad()
        batch = batch_of(rank, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_fn(model(batch.inputs), batch.labels)
        loss.backward()
        descend(model)
    return outcome(model, veil)


def half(rank: int) -> dict[str, Tensor]:
    model = DistributedDataParallel(build_model().to(torch.bfloat16))
    veil = attach(model, dgp())
    batch = batch_of(rank, 0)
    loss_fn(model(batch.inputs.bfloat16()), batch.labels).backward()
    return {"residual": (veil.residual or {})["0.weight"], **grads_of(model)}


def grads_of(model: DistributedDataParallel) -> dict[str, Tensor]:
    return {f"grad.{n}": p.grad.clone() for n, p in model.module.named_parameters() if p.grad is not None}


class FakeScaler:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def get_scale(self) -> float:
        return self.scale


def poisoned(rank: int) -> dict[str, Tensor]:
    """One rank meets NaN in step 1: nobody moves, nobody's residual changes."""
    model, scaler = wrap(), FakeScaler(4.0)
    veil, scaled = attach(model, dgp()), wrap()
    attach(scaled, dgp(), scaler=scaler)
    run_steps(model, rank, 0, 1)
    before = outcome(model, veil)
    batch = batch_of(rank, 1)
    inputs = batch.inputs * (float("nan") if rank == 1 else 1.0)
    model.zero_grad()
    loss_fn(model(inputs), batch.labels).backward()
    silent = all(not p.grad.any() for p in model.parameters() if p.grad is not None)
    same = all(torch.equal(before[f"residual.{n}"], r) for n, r in (veil.residual or {}).items())
    loss_fn(scaled(inputs), batch.labels).backward()
    loud = all(bool(torch.isinf(p.grad).all()) for p in scaled.parameters() if p.grad is not None)
    run_steps(model, rank, 1, 2)
    return {**outcome(model, veil), "checks": torch.tensor([silent, same, loud])}


def rescaled(rank: int) -> dict[str, Tensor]:
    """The loss scale changes between steps; residuals must not care."""
    model, scaler = wrap(), FakeScaler(4.0)
    veil = attach(model, dgp(), scaler=scaler)
    for step, scale in enumerate((4.0, 1024.0, 2.0, 8.0)):
        scaler.scale = scale
        model.zero_grad()
        batch = batch_of(rank, step)
        (loss_fn(model(batch.inputs), batch.labels) * scale).backward()
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad / scale
        descend(model)
    return outcome(model, veil)


def resume(rank: int) -> dict[str, Tensor]:
    model = wrap()
    veil = attach(model, dgp(), seed=SEED)
    run_steps(model, rank, 0, 2)
    saved = {name: t.clone() for name, t in veil.state_dict().items()}
    again = DistributedDataParallel(copy.deepcopy(model.module))
    fresh = attach(again, dgp())
    fresh.load_state_dict(saved)
    foreign = {**saved, "rank": torch.tensor([9, 10])}
    try:
        fresh.load_state_dict(foreign)
        refused = False
    except StateError:
        refused = True
    run_steps(again, rank, 2, STEPS)
    return {**outcome(again, fresh), "refused": torch.tensor(refused)}


def join_uneven(rank: int) -> dict[str, Tensor]:
    """Rank 1 has one batch less; `join` lets rank 0 finish."""
    model = wrap()
    veil = attach(model, dgp())
    with model.join():
        run_steps(model, rank, 0, STEPS - rank)
    return outcome(model, veil)


def different(rank: int) -> dict[str, Tensor]:
    try:
        attach(wrap(), Identity() if rank == 0 else dgp())
    except EngineError as error:
        return {"refused": torch.tensor("different defenses" in str(error))}
    return {"refused": torch.tensor(False)}


SCENARIOS: dict[str, Callable[[int], dict[str, Tensor]]] = {
    "dgp": train_with(dgp()),
    "view": train_with(dgp(), gradient_as_bucket_view=True),
    "static": train_with(dgp(), static_graph=True),
    "dense": train_with(Identity()),
    "noise": train_with(NOISY),
    "aligned": train_with(ErrorFeedback(AlignedDualPrune())),
    "accumulate": accumulate,
    "unused": unused,
    "autocast": autocast,
    "half": half,
    "poisoned": poisoned,
    "rescaled": rescaled,
    "resume": resume,
    "join": join_uneven,
    "hardened": train_with(HARDENED, num_examples=8),
    "followed": train_with(FOLLOWED, num_examples=8, follow=True),
    "followed scaled": followed_scaled,
    "untold": untold,
    "different": different,
    "unused whole": lambda rank: unused(rank, NOISY),
}
ON_FOUR = ("dgp", "dense", "aligned")


def rank_main(rank: int, world: int, folder: Path, what: list[str]) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, datetime.timedelta(seconds=GROUP_TIMEOUT), world_size=world, rank=rank)
    torch.save({name: SCENARIOS[name](rank) for name in what}, folder / f"{rank}.pt")
    model = wrap()
    attach(model, dgp())
    run_steps(model, rank, 0, 2)
    if rank == 1:
        os._exit(9)
    run_steps(model, rank, 2, 4)


# ------------------------------------------------------------------- the tests


def start(world: int, folder: Path, what: tuple[str, ...], device: str = "cpu") -> list["subprocess.Popen[str]"]:
    folder.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "GRADVEIL_TEST_DEVICE": device}
    return [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world), str(folder), *what],
            env=env, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip


def finish(ranks: list["subprocess.Popen[str]"], seconds: float) -> list[tuple[int, str]]:
    deadline = time.monotonic() + seconds
    ends = []
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=max(deadline - time.monotonic(), 0.1))
            ends.append((process.returncode, errors))
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.communicate()
    return ends


Results = dict[int, list[dict[str, dict[str, Tensor]]]]
Ends = dict[int, list[tuple[int, str]]]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Ends]:
    """Run all scenarios on two and on four ranks; at the end rank 1 dies in mid-training."""
    folder = tmp_path_factory.mktemp("ddp")
    out: Results = {}
    ends: Ends = {}
    what = {2: tuple(SCENARIOS), 4: ON_FOUR}
    ranks = {world: start(world, folder / str(world), names) for world, names in what.items()}
    for world in what:
        ends[world] = finish(ranks[world], 3 * GROUP_TIMEOUT)
        files = [folder / str(world) / f"{rank}.pt" for rank in range(world)]
        assert all(file.exists() for file in files), ends[world]
        out[world] = [torch.load(file, weights_only=True) for file in files]
    return out, ends


@pytest.fixture
def results(jobs: tuple[Results, Ends]) -> Results:
    return jobs[0]


def reference(
    defense: Defense, world: int, steps: int = STEPS, device: str = "cpu", follow: bool = False
) -> tuple[Grads, list[Grads | None]]:
    """Train in one process: protect each rank's gradient, add in rank order, divide."""
    model = build_model(device)
    states = [defense.init(dict(model.named_parameters())) for _ in range(world)]
    for step in range(steps):
        grads = [gradient(model, loss_fn, batch_of(rank, step, device)) for rank in range(world)]
        mask: Masks | None = None
        if "mask" in defense.needs:
            leader = int(torch.randint(world, (1,), generator=derive_rng(SEED, "leader", step)))
            mask = defense.propose(grads[leader], states[leader], Step(rng=torch.Generator()))
        sent = []
        for rank in range(world):
            rng = derive_rng(SEED, f"rank{rank}", step, device=device)
            seen = gradient_and_shares(model, loss_fn, batch_of(rank, step, device))[1] if follow else None
            known = Step(rng, step, mask=mask, num_examples=8, largest=seen)
            out, states[rank] = defense.apply(grads[rank], states[rank], known)
            sent.append(out)
        with torch.no_grad():
            for name, p in model.named_parameters():
                total = sent[0][name].clone()
                for other in sent[1:]:
                    total += other[name]
                p.sub_(LR * (total / world))
    return dict(model.named_parameters()), [defense.residual(state) for state in states]


DEFENSES: dict[str, Defense] = {
    "dgp": dgp(),
    "view": dgp(),
    "static": dgp(),
    "rescaled": dgp(),
    "dense": Identity(),
    "noise": NOISY,
    "hardened": HARDENED,
    "followed": FOLLOWED,
    "aligned": ErrorFeedback(AlignedDualPrune()),
    "resume": dgp(),
}


@pytest.mark.engine
@pytest.mark.parametrize(("world", "name"), [*((2, name) for name in DEFENSES), *((4, name) for name in ON_FOUR)])
def test_equals_the_single_process_reference(results: Results, world: int, name: str) -> None:
    params, residuals = reference(DEFENSES[name], world, follow=name == "followed")
    # Two addends commute and gathered messages are added in rank order: equal to the bit. A ring of four adds in
    # another order, which costs a rounding.
    exact = world == 2 or name == "dgp"
    for rank in range(world):
        got = results[world][rank][name]
        for key, want in params.items():
            torch.testing.assert_close(got[f"param.{key}"], want.detach(), **(
                {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-5, "atol": 1e-6}
            ))  # fmt: skip
        held = residuals[rank]
        if held is not None and exact:
            assert all(torch.equal(got[f"residual.{key}"], want) for key, want in held.items())


@pytest.mark.engine
def test_following_examples_makes_the_noise_cover_the_largest(results: Results) -> None:
    followed, _ = reference(FOLLOWED, 2, follow=True)
    loose, _ = reference(FOLLOWED, 2)
    got = results[2][0]["followed"]
    assert all(torch.equal(got[f"param.{n}"], p.detach()) for n, p in followed.items())
    assert not any(torch.equal(p, loose[n]) for n, p in followed.items() if n.endswith("weight"))


@pytest.mark.engine
def test_accumulated_passes_are_followed_in_true_units(results: Results) -> None:
    for rank in range(2):
        model, batch = build_model(), batch_of(rank, 0)
        grads, largest = gradient_and_shares(model, loss_fn, batch)
        rng = derive_rng(SEED, f"rank{rank}", 0)
        _, state = FOLLOWED.apply(grads, FOLLOWED.init(grads), Step(rng, num_examples=8, largest=largest))
        held = tree.under("residual", FOLLOWED.residual(state) or {})
        for name, want in held.items():
            torch.testing.assert_close(results[2][rank]["followed scaled"][name], want, rtol=1e-4, atol=1e-6)


@pytest.mark.engine
def test_where_one_rank_cannot_follow_its_examples_none_sends(results: Results) -> None:
    for rank in range(2):
        assert bool(results[2][rank]["untold"]["refused"])
        assert int(results[2][rank]["untold"]["bytes"]) < 64  # the agreement alone


def test_following_for_nothing_is_refused() -> None:
    for defense in (dgp(), Hardened(balance=0)):
        with pytest.raises(NeedError, match="makes no use of single examples"):
            refuse_idle(defense, follow=True)


@pytest.mark.engine
def test_ranks_agree_and_save_bytes(results: Results) -> None:
    dense, sparse, aligned = (int(results[2][0][name]["bytes"]) for name in ("dense", "dgp", "aligned"))
    assert sparse < 0.35 * dense
    assert aligned < 0.55 * dense
    for world, names in ((2, SCENARIOS), (4, ON_FOUR)):
        for name in names:
            one, two = results[world][0][name], results[world][1][name]
            assert all(torch.equal(v, two[k]) for k, v in one.items() if k.startswith("param.") and name != "join")


@pytest.mark.engine
def test_accumulated_gradients_are_protected_once(results: Results) -> None:
    def both(rank: int, step: int) -> Batch:
        one, two = batch_of(rank, 2 * step), batch_of(rank, 2 * step + 1)
        return Batch(torch.cat([one.inputs, two.inputs]), torch.cat([one.labels, two.labels]))

    model, states = build_model(), [dgp().init(dict(build_model().named_parameters())) for _ in range(2)]
    for step in range(2):
        sent = []
        for rank in range(2):
            grads = tree.tmap(lambda g: 2 * g, gradient(model, loss_fn, both(rank, step)))
            out, states[rank] = dgp().apply(grads, states[rank], Step(rng=torch.Generator()))
            sent.append(out)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.sub_(LR * (sent[0][name] + sent[1][name]) / 2)
    for name, want in model.named_parameters():
        torch.testing.assert_close(results[2][0]["accumulate"][f"param.{name}"], want.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.engine
def test_unused_parameters_keep_their_residual(results: Results) -> None:
    for rank in range(2):
        got = results[2][rank]["unused"]
        for name in ("side.weight", "side.bias"):
            assert torch.equal(got[f"held.{name}"], got[f"residual.{name}"])
    assert bool(results[2][0]["unused"]["held.side.weight"].any())
    # With noise the whole gradient is protected at once; what DDP drops goes back all the same, noise included.
    noisy = results[2][0]["unused whole"]
    kept = noisy["residual.side.weight"] - noisy["held.side.weight"]
    assert 0.005 < float(kept.std()) < 0.05


@pytest.mark.engine
def test_nan_on_one_rank_skips_the_step_everywhere(results: Results) -> None:
    params, _ = reference(dgp(), 2, steps=2)
    for rank in range(2):
        got = results[2][rank]["poisoned"]
        assert got["checks"].all()
        assert int(got["skipped"]) == 1
        assert all(torch.equal(got[f"param.{name}"], want) for name, want in params.items())


@pytest.mark.engine
def test_low_precision_keeps_a_float32_residual(results: Results) -> None:
    got = results[2][0]["half"]
    assert got["residual"].dtype == torch.float32
    assert got["grad.0.weight"].dtype == torch.bfloat16
    assert got["residual"].any()
    assert all(t.dtype == torch.float32 for k, t in results[2][0]["autocast"].items() if k.startswith("residual."))


@pytest.mark.engine
def test_state_of_another_rank_is_refused(results: Results) -> None:
    assert bool(results[2][0]["resume"]["refused"])


@pytest.mark.engine
def test_ranks_with_different_defenses_are_refused(results: Results) -> None:
    assert all(bool(results[2][rank]["different"]["refused"]) for rank in range(2))


@pytest.mark.usefixtures("alone")
def test_sparse_gradients_are_refused_in_words() -> None:
    model = DistributedDataParallel(nn.Embedding(9, 4, sparse=True))
    veil = attach(model, dgp())
    sent = veil.bytes_sent
    with pytest.raises(GradientError, match="sparse=False"):
        model(torch.arange(5)).sum().backward()
    assert veil.bytes_sent == sent


@pytest.mark.engine
def test_a_killed_rank_leaves_no_hang(jobs: tuple[Results, Ends]) -> None:
    # `finish` would have raised TimeoutExpired; here every survivor must have stopped by itself and said why.
    for world, ends in jobs[1].items():
        assert ends[1][0] == 9
        for rank in (0, *range(2, world)):
            code, errors = ends[rank]
            assert code == 1
            assert f"rank {rank} of {world} lost its peers in step 2" in errors


@pytest.mark.engine
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_two_ranks_on_a_gpu(tmp_path: Path) -> None:
    """Two gloo ranks share one GPU; the reference runs on the same GPU."""
    names = ("dgp", "dense", "aligned", "noise", "hardened", "poisoned", "resume")
    ends = finish(start(2, tmp_path, names, "cuda"), 3 * GROUP_TIMEOUT)
    assert all((tmp_path / f"{rank}.pt").exists() for rank in range(2)), ends
    got = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for name in names:
        defense, steps = DEFENSES.get(name, dgp()), 2 if name == "poisoned" else STEPS
        params, _ = reference(defense, 2, steps, "cuda")
        for key, want in params.items():
            assert torch.equal(got[0][name][f"param.{key}"], got[1][name][f"param.{key}"])
            torch.testing.assert_close(got[0][name][f"param.{key}"], want.detach(), rtol=1e-4, atol=1e-5)


def test_the_rank_sends_what_the_veil_would_send() -> None:
    model = build_model()
    grads = gradient(model, loss_fn, batch_of(0, 0))
    sent, _ = dgp().apply(grads, dgp().init(grads), Step(rng=torch.Generator()))
    assert wire.encode(sent) == Veil(dgp(), grads).seal(grads, 8).body


def test_attach_refuses_what_it_cannot_protect() -> None:
    class FSDPLinear(nn.Linear):
        pass

    class Peeks(Identity):
        @property
        def needs(self):  # type: ignore[no-untyped-def]
            return frozenset({"batch"})

    with pytest.raises(EngineError, match="in shards"):
        attach(FSDPLinear(2, 2), dgp())  # type: ignore[arg-type]
    with pytest.raises(EngineError, match="got Linear"):
        attach(nn.Linear(2, 2), dgp())  # type: ignore[arg-type]
    bare = DistributedDataParallel.__new__(DistributedDataParallel)
    with pytest.raises(NeedError, match="needs batch"):
        attach(bare, Peeks())
    with pytest.raises(NeedError, match="acts in prepare_batch"):
        attach(bare, ATS())
    with pytest.raises(NeedError, match="acts in prepare_model"):
        attach(bare, Chain(PRECODE(), Identity()))


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A group of this process only."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), world_size=1, rank=0)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_what_sends_raw_gradients_past_the_hook_is_refused() -> None:
    net = build_model("cpu")
    weight = next(net.parameters())
    late = DistributedDataParallel(
        net, delay_all_reduce_named_params=[("0.weight", weight)], param_to_hook_all_reduce=weight
    )
    waits = DistributedDataParallel(build_model("cpu"))
    waits.skip_all_reduce_unused_params = True
    synced = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    synced.module[1] = nn.SyncBatchNorm(2)  # only on a GPU can it be wrapped
    doors = {
        "past the hook": late,
        r"the module itself\), which would send": DistributedDataParallel(DistributedDataParallel(build_model("cpu"))),
        r"\(0\), which would send": DistributedDataParallel(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)))),
        "1 is a SyncBatchNorm": synced,
        "may never end": waits,
    }
    for why, model in doors.items():
        with pytest.raises(EngineError, match=why):
            attach(model, dgp())


def backward(model: nn.Module, step: int) -> None:
    batch = batch_of(0, step, "cpu")
    loss_fn(model(batch.inputs), batch.labels).backward()


@pytest.mark.parametrize("defense", [dgp(), NOISY], ids=["by bucket", "whole"])
@pytest.mark.usefixtures("alone")
def test_a_step_that_broke_off_is_the_last(defense: Defense, monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(build_model("cpu"), bucket_cap_mb=0.008)
    veil = attach(model, defense)
    backward(model, 0)
    before = {n: r.clone() for n, r in (veil.residual or {}).items()}

    def fail(*_: object) -> None:
        raise EngineError("the first cause")

    with monkeypatch.context() as patch:
        patch.setattr(veil._peers, "start", fail)
        with pytest.raises(EngineError, match="the first cause"):
            backward(model, 1)
    sent = veil.bytes_sent
    for index in range(2):
        with pytest.raises(EngineError, match=r"step 1 broke off on rank 0.*last checkpoint"):
            backward(model, 1)
        with pytest.raises(EngineError, match="step 1 broke off"):  # should DDP ever come as far as the hook
            veil.hook(None, SimpleNamespace(index=lambda index=index: index))
    with pytest.raises(EngineError, match="nothing more is sent or saved"):
        veil.state_dict()
    assert veil.bytes_sent == sent
    assert all(torch.equal(before[n], r) for n, r in (veil.residual or {}).items())


class Trip(torch.autograd.Function):
    """Passes values through, and fails on the way back."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        raise ArithmeticError("between two buckets")


class Tripping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.trip = build_model("cpu"), False

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.inner
        hidden = first(x)
        return nn.Sequential(*rest)(Trip.apply(hidden) if self.trip else hidden)


@pytest.mark.parametrize("defense", [dgp(), NOISY], ids=["by bucket", "whole"])
@pytest.mark.usefixtures("alone")
def test_a_backward_that_failed_elsewhere_is_the_last_too(defense: Defense) -> None:
    module = Tripping()
    model = DistributedDataParallel(module, bucket_cap_mb=0.008)
    veil = attach(model, defense)
    backward(model, 0)
    module.trip = True
    with pytest.raises(ArithmeticError, match="between two buckets"):
        backward(model, 1)
    assert veil._waiting or veil._flying
    module.trip = False
    with pytest.raises(EngineError, match="step 1 broke off"):
        backward(model, 2)


@pytest.mark.usefixtures("alone")
def test_a_step_that_comes_again_has_other_noise() -> None:
    for seed in (None, SEED):
        veil = attach(DistributedDataParallel(build_model("cpu")), NOISY, seed=seed)
        before = torch.rand(9, generator=veil._step(None).rng)
        veil.load_state_dict(veil.state_dict())
        assert torch.equal(before, torch.rand(9, generator=veil._step(None).rng)) == (seed is not None)


def test_packing_round_trips(rng: torch.Generator) -> None:
    for size in (1, 7, 8, 9, 1000):
        flags = torch.rand(size, generator=rng) < 0.3
        assert torch.equal(unpack_bits(pack_bits(flags), size), flags)
        values = torch.randn(size, generator=rng) * flags
        assert torch.equal(unpack_sparse(pack_sparse(values, int(flags.sum()) + 3), size, int(flags.sum()) + 3), values)


if __name__ == "__main__":
    rank_main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
