"""Training: the protocol, its determinism, its continuation after a kill, and the fast engine against the loop."""

import io
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

from gradveil import Veil, data, tree
from gradveil.cli import app, commands, train
from gradveil.core import Batch, Masks
from gradveil.defenses import GaussianNoise, Identity
from gradveil.defenses.soteria import estimated_scores
from gradveil.errors import ConfigError, GradientError, StateError
from gradveil.gradients import parameters
from gradveil.models.inspect import last_linear
from gradveil.training import Settings, Trainer, assemble, load_checkpoint
from gradveil.training.checkpoint import save_checkpoint
from gradveil.training.compute import Compute
from gradveil.training.fast import FastTrainer
from gradveil.training.feed import Feed
from gradveil.training.log import Log, read_rounds
from gradveil.training.loop import Upload, Work
from gradveil.training.protectors.soteria import HiddenColumns
from gradveil.training.protectors.stateless import White
from gradveil.training.rounds import Round
from gradveil.training.run import run, summary, trainer_for
from gradveil.veil import derive_rng

assert commands  # importing it registers the commands
TINY = Settings(model="mlp(hidden=32)", data="digits", users=4, epochs=1, rounds=6, lr="0.2", eval_every=1000)


@pytest.fixture(scope="module")
def digits() -> data.Dataset:
    return data.load("digits", split="train")


def convolution(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10)]
        return nn.Sequential(*body)


def weights(trainer: Trainer | FastTrainer) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in trainer.model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def trained(settings: Settings, **parts: Any) -> Trainer:
    trainer = Trainer(assemble(settings, **parts))
    list(trainer)
    return trainer


# The feed


def test_every_pass_uses_each_picture_of_the_shard_once(digits: data.Dataset) -> None:
    feed = Feed(digits, replace(TINY, users=10, batch_size=32), torch.device("cpu"))
    shard = feed.shards[3]
    whole = feed.draw(3, 0, len(shard))[:, 0]  # as many batches as pictures: exactly 32 passes
    for start in range(0, len(whole), len(shard)):
        assert torch.equal(whole[start : start + len(shard)].sort().values, shard.sort().values)
    assert torch.equal(feed.draw(3, 7), feed.draw(3, 5, 4)[64:96])  # any place can be asked for directly
    assert not torch.equal(whole[: len(shard)], whole[len(shard) : 2 * len(shard)])


def test_the_feed_shifts_and_mirrors_over_black_and_normalises(digits: data.Dataset) -> None:
    feed = Feed(digits, replace(TINY, augment="crop_flip"), torch.device("cpu"))
    draw = torch.tensor([[5, 2, 0, 1], [5, 1, 1, 0]])  # pad is 1: row 2 is one up, column 0 is one right
    batch = feed.gather(draw)
    picture = digits.images[5, 0]
    padded = nn.functional.pad(picture, (1, 1, 1, 1))
    expected = torch.stack([padded[2:10, 0:8].flip(1), picture])[:, None].float() / 255
    assert torch.allclose(batch.inputs, data.normalise(expected, digits.mean, digits.std), atol=1e-5)
    assert batch.labels.tolist() == [int(digits.labels[5])] * 2


def test_dirichlet_shards_are_skewed_and_small_ones_are_used_whole(digits: data.Dataset) -> None:
    settings = replace(TINY, alpha=0.05, users=10, batch_size=64)
    feed = Feed(digits, settings, torch.device("cpu"))
    shares = [digits.labels[shard].bincount(minlength=10).max() / len(shard) for shard in feed.shards]
    assert torch.tensor(shares).mean() > 0.5
    assert min(feed.sizes) < 64
    assert feed.sizes == [min(64, len(shard)) for shard in feed.shards]
    trainer = Trainer(assemble(settings))
    uploads = [trainer._upload(user, trainer._work(user, 0.1), None) for user in range(2)]
    assert [u.payload.num_examples for u in uploads] == feed.sizes[:2]


# The protocol


def test_same_seed_same_bits_and_the_global_generator_is_left_alone() -> None:
    settings = replace(TINY, defense="chain(dgp, gaussian_noise(sent_only=True))")
    before = torch.random.get_rng_state()
    first, second = trained(settings), trained(settings)
    assert torch.equal(before, torch.random.get_rng_state())
    assert same(weights(first), weights(second))
    assert not same(weights(first), weights(trained(replace(settings, seed=1))))


class Ledger(Trainer):
    """Adds up what users computed and what arrived."""

    def __init__(self, job: Any) -> None:
        super().__init__(job)
        self.computed: dict[int, dict[str, torch.Tensor]] = {}
        self.arrived: dict[int, dict[str, torch.Tensor]] = {}

    def _upload(self, user: int, work: Work, mask: Masks | None) -> Upload:
        upload = super()._upload(user, work, mask)
        zero = tree.zeros_like(work.grads)
        self.computed[user] = tree.add(self.computed.get(user, zero), work.grads)
        self.arrived[user] = tree.add(self.arrived.get(user, zero), upload.received)
        if mask is not None:
            assert all(bool((g[~mask[name]] == 0).all()) for name, g in upload.received.items())
        return upload


@pytest.mark.parametrize("defense", ["dgp", "topk", "adgp"])
def test_what_a_user_computed_is_what_arrived_plus_what_is_held_back(defense: str) -> None:
    trainer = Ledger(assemble(replace(TINY, defense=defense)))
    list(trainer)
    for user, veil in enumerate(trainer.veils):
        assert veil.residual is not None
        kept = tree.add(trainer.arrived[user], veil.residual)
        for name, total in trainer.computed[user].items():
            assert torch.allclose(kept[name], total, atol=1e-6)
    assert not same(trainer.veils[0].residual or {}, trainer.veils[1].residual or {})


def test_an_undefended_step_is_plain_momentum_sgd_on_all_pictures_together() -> None:
    settings = replace(TINY, defense="none", rounds=3, weight_decay=0.01)
    job = assemble(settings)
    model, trainer = assemble(settings).model, Trainer(job)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    for index in range(3):
        parts = [job.feed.batch(user, index) for user in range(settings.users)]
        whole = Batch(*map(torch.cat, zip(*parts, strict=True)))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(whole.inputs), whole.labels).backward()
        optimizer.step()
        trainer.advance()
    for expected, found in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.allclose(expected, found, atol=1e-6)


def test_fedavg_with_one_local_step_is_fedsgd_and_more_steps_are_not() -> None:
    sgd = trained(replace(TINY, defense="none"))
    one = trained(replace(TINY, defense="none", algorithm="fedavg"))
    three = trained(replace(TINY, defense="none", algorithm="fedavg", local_steps=3))
    close = [torch.allclose(a, b, atol=1e-5) for a, b in zip(weights(sgd).values(), weights(one).values(), strict=True)]
    assert all(close)
    assert not same(weights(one), weights(three))


def test_fedavg_sends_the_update_of_its_local_steps() -> None:
    trainer = Trainer(assemble(replace(TINY, defense="none", algorithm="fedavg", local_steps=3)))
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    work = trainer._work(1, lr=0.1)
    net = assemble(replace(TINY, defense="none")).model
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for batch in trainer.batches(1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(batch.inputs), batch.labels).backward()
        optimizer.step()
    for name, p in net.named_parameters():
        assert torch.allclose(work.grads[name], start[name] - p.detach(), atol=1e-6)


def test_partial_participation_moves_only_those_invited_and_newcomers_download_the_model() -> None:
    settings = replace(TINY, users=8, participants=3, rounds=5)
    trainer = Trainer(assemble(settings))
    rounds = list(trainer)
    invited = [trainer.job.participants(i) for i in range(5)]
    assert {len(people) for people in invited} == {3}
    assert len({tuple(people) for people in invited}) > 1
    assert [veil.round for veil in trainer.veils] == [sum(u in people for people in invited) for u in range(8)]
    full = list(Trainer(assemble(replace(settings, participants=0))))
    assert rounds[1].bytes_down is not None
    assert full[1].bytes_down is not None
    assert rounds[1].bytes_down > full[1].bytes_down  # the model is dense, the mean of sparse uploads is not


def test_an_aligned_round_has_one_proposer_and_a_sparse_download() -> None:
    aligned = list(Trainer(assemble(replace(TINY, defense="adgp", rounds=3))))
    plain = list(Trainer(assemble(replace(TINY, defense="dgp", rounds=3))))
    assert [r.paper_down for r in aligned] < [r.paper_down for r in plain]
    assert 0.15 < (aligned[0].density or 0) < 0.22
    proposers = {assemble(TINY).proposer(i) for i in range(30)}
    assert proposers == set(range(4))


@pytest.mark.parametrize("how", ["average", "first", "local"])
def test_batchnorm_statistics_end_a_round_as_stated(how: str, digits: data.Dataset) -> None:
    settings = replace(TINY, batchnorm=how, defense="none")
    trainer = Trainer(assemble(settings, train=digits, model=convolution()))
    works = [trainer._work(user, 0.1).buffers["1.running_mean"] for user in range(4)]
    trainer.advance()
    common = trainer.model.state_dict()["1.running_mean"]
    expected = works[0] if how == "first" else torch.stack(works).mean(0)
    assert torch.allclose(common, expected, atol=1e-6)
    assert not torch.equal(works[0], works[1])
    trainer.advance()
    if how == "local":
        assert not torch.equal(trainer._local[0]["1.running_mean"], trainer._local[1]["1.running_mean"])


@pytest.mark.parametrize("defense", ["soteria", "ats", "precode", "outpost", "dp", "dp_noise"])
def test_the_rivals_run(defense: str) -> None:
    rounds = list(Trainer(assemble(replace(TINY, defense=defense, rounds=2, users=2))))
    assert all(r.loss > 0 and r.bytes_up for r in rounds)


def test_accuracy_on_digits_rises_far_above_chance_under_dgp() -> None:
    rounds = list(Trainer(assemble(Settings(model="mlp(hidden=64)", data="digits", epochs=6, lr="0.1", eval_every=6))))
    assert rounds[-1].accuracy is not None
    assert rounds[-1].accuracy > 0.85
    assert rounds[-1].residual_ratio is not None
    assert rounds[-1].residual_ratio > 1  # the top entries pile up
    assert rounds[-1].paper_up is not None
    assert rounds[-1].bytes_up is not None
    assert rounds[-1].bytes_up < 1.1 * rounds[-1].paper_up


# The fast engine


def test_soteria_for_all_users_hides_what_it_hides_from_each() -> None:
    job = assemble(replace(TINY, defense="soteria(probes=3)", users=3))
    compute = Compute(job)
    batches = [job.feed.gather(job.feed.draw(user, 0)) for user in range(3)]
    compute.run(batches, 0)
    before = compute.rows.grads.clone()
    sent = HiddenColumns(job.defense, compute.rows, job).step(5, batches)
    rng = derive_rng(job.settings.seed, "all", 5, "probes")
    name, layer = last_linear(job.model, tuple(batches[0].inputs.shape[1:]))
    for user, batch in enumerate(batches):
        raw, got = (compute.layout.views(rows[user]) for rows in (before, sent))
        directions = torch.randn(3, *batch.inputs.shape, generator=rng)
        scores = estimated_scores(job.model, layer, batch.inputs, directions)
        hidden = scores.argsort(stable=True)[: math.floor(0.8 * len(scores))]
        expected = raw[f"{name}.weight"].index_fill(1, hidden, 0.0)
        assert torch.equal(got[f"{name}.weight"], expected)
        assert all(torch.equal(got[other], raw[other]) for other in raw.keys() - {f"{name}.weight"})


@pytest.mark.parametrize(
    "changes",
    [
        {"defense": "none", "weight_decay": 0.01},
        {"defense": "dgp"},
        {"defense": "topk", "batchnorm": "local"},
        {"defense": "dual_prune(rounding='ceil')", "batchnorm": "first"},
        {"defense": "adgp"},
        {"defense": "dgp", "alpha": 0.1, "augment": "crop"},
        {"defense": "chain(dgp, gaussian_noise(sent_only=True))"},
        {"defense": "ats"},
        {"defense": "outpost"},
        {"defense": "precode"},
        {"defense": "dgp", "algorithm": "fedavg", "local_steps": 3},
        {"defense": "ats", "algorithm": "fedavg", "local_steps": 2, "momentum": 0.5},
        {"defense": "none", "algorithm": "fedavg", "local_steps": 2, "alpha": 0.1, "batchnorm": "local"},
    ],
    ids=str,
)
def test_fast_and_reference_agree(changes: dict[str, Any], digits: data.Dataset) -> None:
    settings = replace(TINY, wire_every=1, eval_every=1, epochs=1, **changes)
    slow = Trainer(assemble(settings, train=digits, model=convolution()))
    fast = FastTrainer(assemble(settings, train=digits, model=convolution()))
    expected, found = list(slow), list(fast)
    fast.evaluate()
    for name, value in weights(slow).items():
        assert torch.allclose(value.float(), weights(fast)[name].float(), atol=1e-5), name
    assert [r.loss for r in found] == pytest.approx([r.loss for r in expected], abs=1e-5)
    assert [r.paper_down for r in found] == [r.paper_down for r in expected]
    assert [r.index for r in found] == list(range(settings.rounds))
    one_user = slow.veils[(settings.rounds - 1) % 4].health  # users take turns to be measured
    assert one_user is not None
    assert found[-1].gamma == pytest.approx(one_user.gamma, abs=1e-3)
    assert found[-1].density == pytest.approx(one_user.density, abs=1e-3)


class Watched(nn.Module):
    """Passes on what it gets, and adds a term to the loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x
        return x

    def auxiliary_loss(self) -> torch.Tensor:
        return self.seen.square().mean()


def test_both_engines_add_the_terms_of_inner_layers(digits: data.Dataset) -> None:
    def net(*more: nn.Module) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *more, nn.ReLU(), nn.Linear(16, 10))

    settings = replace(TINY, defense="none")
    plain = trained(settings, train=digits, model=net(nn.Identity()))
    slow = trained(settings, train=digits, model=net(Watched()))
    fast = FastTrainer(assemble(settings, train=digits, model=net(Watched())))
    list(fast)
    assert not torch.allclose(weights(plain)["1.weight"], weights(slow)["1.weight"], atol=1e-3)
    assert torch.allclose(weights(fast)["1.weight"], weights(slow)["1.weight"], atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{"model": "lenet"}, {"alpha": 0.05, "users": 10}, {"model": "mlp(hidden=8)"}], ids=str
)
def test_the_vectorised_pass_agrees_with_the_loop(changes: dict[str, Any]) -> None:
    settings = replace(TINY, defense="dgp", **changes)
    slow, fast = Trainer(assemble(settings)), FastTrainer(assemble(settings))
    assert fast._compute._vectorised is ("alpha" not in changes)  # equal batches only
    assert [r.loss for r in fast] == pytest.approx([r.loss for r in slow], abs=1e-5)
    for name, value in weights(slow).items():
        assert torch.allclose(value, weights(fast)[name], atol=1e-5), name


def test_half_precision_agrees_between_the_engines(digits: data.Dataset) -> None:
    settings = replace(TINY, precision="bf16", defense="none", rounds=4)
    slow = Trainer(assemble(settings, train=digits, model=convolution()))
    fast = FastTrainer(assemble(settings, train=digits, model=convolution()))
    assert [r.loss for r in fast] == pytest.approx([r.loss for r in slow], rel=2e-3)
    exact = trained(replace(settings, precision="float32"), train=digits, model=convolution())
    assert not torch.equal(weights(slow)["4.weight"], weights(exact)["4.weight"])


@pytest.mark.parametrize("defense", ["none", "hardened"])
def test_weights_that_diverged_in_the_last_round_of_a_chunk_are_noticed(defense: str) -> None:
    # The loss of that round is still finite: only the weights tell, and a checkpoint must not hold them.
    fast = FastTrainer(assemble(Settings(users=2, defense=defense, rounds=1, device="cpu")))
    fast._momentum.fill_(torch.inf)
    with pytest.raises(GradientError, match="weights after round 0 are not finite"):
        fast.advance()


def test_the_fast_engine_says_what_it_cannot_run() -> None:
    counting = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.Flatten(), nn.Linear(144, 10))
    with pytest.raises(ConfigError, match="counts its batches"):
        trainer_for(assemble(replace(TINY, engine="fast"), model=counting))
    for changes in ({"participants": 2}, {"defense": "dp_noise"}, {"defense": "hardened", "weigh_examples": True}):
        with pytest.raises(ConfigError, match="set engine to reference"):
            trainer_for(assemble(replace(TINY, engine="fast", **changes)))
    assert isinstance(trainer_for(assemble(TINY)), Trainer)


def test_a_run_that_weighs_examples_sends_what_a_client_would(digits: data.Dataset) -> None:
    settings = replace(TINY, defense="hardened(examples=32, balance=1)", weigh_examples=True)
    trainer = Trainer(assemble(settings, train=digits))
    veil = Veil(trainer.job.defense, parameters(trainer.model), seed=settings.seed, client="0", guard=None)
    sent = veil.protect(trainer.model, nn.functional.cross_entropy, trainer.job.feed.batch(0, 0))
    assert trainer._upload(0, trainer._work(0, 0.1), None).payload.body == sent.body
    loose = Trainer(assemble(replace(settings, weigh_examples=False), train=digits))
    assert loose._upload(0, loose._work(0, 0.1), None).payload.body != sent.body


def test_weighing_examples_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="changes nothing under"):
        assemble(replace(TINY, weigh_examples=True))
    with pytest.raises(ValueError, match="single gradients, which fedavg has not"):
        Settings(algorithm="fedavg", weigh_examples=True)


@pytest.mark.parametrize("first", [Trainer, FastTrainer])
@pytest.mark.parametrize("then", [Trainer, FastTrainer])
@pytest.mark.parametrize("how", ["average", "local"])
def test_checkpoints_fit_both_engines(first: Any, then: Any, how: str, digits: data.Dataset, tmp_path: Path) -> None:
    settings = replace(TINY, batchnorm=how, checkpoint_every=3)

    def start(engine: Any) -> Any:
        return engine(assemble(settings, train=digits, model=convolution()))

    whole, half = start(then), start(first)
    list(whole)
    while half.round < 3:
        half.advance()
    half.save(tmp_path / "c")
    rest = start(then)
    rest.load(tmp_path / "c")
    assert rest.round == 3
    list(rest)
    whole.evaluate(), rest.evaluate()
    for name, value in weights(whole).items():
        if first is then:
            assert torch.equal(value, weights(rest)[name]), name
        else:
            assert torch.allclose(value.float(), weights(rest)[name].float(), atol=1e-5), name


def test_noise_for_all_users_at_once_is_as_large_as_asked_for_and_new_every_round(digits: data.Dataset) -> None:
    job = assemble(replace(TINY, defense="gaussian_noise(std=0.5)"), train=digits, model=convolution())
    rows = Compute(job).rows
    protector = White(GaussianNoise(0.5), rows, job)
    rounds = []
    for round_ in (0, 1, 0):
        rows.grads.fill_(3.0)
        rounds.append(protector.step(round_, []) - 3.0)
    assert torch.equal(rounds[0], rounds[2])
    drawn = torch.cat([rounds[0], rounds[1]])  # every user's in two rounds
    chance = 5 / drawn.shape[1] ** 0.5  # five standard errors of a mean, or of a correlation
    assert drawn.std(1).sub(0.5).abs().max() < 0.5 * chance
    assert drawn.mean(1).abs().max() < 0.5 * chance
    assert (torch.corrcoef(drawn) - torch.eye(len(drawn))).abs().max() < chance


# On a GPU

ESTIMATED = "soteria(probes=8)"
needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize(
    "defense", [pytest.param(d, marks=needs_gpu) for d in ("none", "dgp", "topk", "adgp", "dp", ESTIMATED)]
)
def test_the_graph_trains_as_the_cpu_does(defense: str, digits: data.Dataset) -> None:
    settings = replace(TINY, defense=defense, rounds=12, wire_every=3, checkpoint_every=5)
    slow = Trainer(assemble(replace(settings, device="cpu"), train=digits, model=convolution()))
    fast = FastTrainer(assemble(replace(settings, device="cuda"), train=digits, model=convolution()))
    noise = 0.05 if defense in ("dp", ESTIMATED) else 1e-3  # a GPU draws other noise
    assert [r.loss for r in fast] == pytest.approx([r.loss for r in slow], abs=noise)
    fast.evaluate()
    for name, value in weights(slow).items():
        assert torch.allclose(value.float(), weights(fast)[name].cpu().float(), atol=10 * noise), name


@pytest.mark.parametrize("precision", [pytest.param(p, marks=needs_gpu) for p in ("float32", "bf16")])
def test_local_steps_agree_with_the_reference_on_a_gpu(precision: str, digits: data.Dataset) -> None:
    changes = {"defense": "dgp", "algorithm": "fedavg", "local_steps": 3, "precision": precision}
    settings = replace(TINY, device="cuda", **changes)
    slow = Trainer(assemble(settings, train=digits, model=convolution()))
    fast = FastTrainer(assemble(settings, train=digits, model=convolution()))
    close = 1e-4 if precision == "float32" else 3e-2
    assert [r.loss for r in fast] == pytest.approx([r.loss for r in slow], rel=close)


@pytest.mark.parametrize("precision", [pytest.param(p, marks=needs_gpu) for p in ("tf32", "bf16")])
def test_less_precision_trains_as_well_on_a_gpu(precision: str, digits: data.Dataset) -> None:
    settings = replace(TINY, device="cuda", precision=precision, rounds=30, defense="dgp")
    losses = [r.loss for r in FastTrainer(assemble(settings, train=digits, model=convolution()))]
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("defense", [pytest.param(d, marks=needs_gpu) for d in ("dgp", "adgp")])
def test_a_gpu_run_continues_to_the_same_bits(defense: str, digits: data.Dataset, tmp_path: Path) -> None:
    settings = replace(TINY, device="cuda", defense=defense, deterministic=True, checkpoint_every=3)

    def start() -> FastTrainer:
        return FastTrainer(assemble(settings, train=digits, model=convolution()))

    whole, half, rest = start(), start(), start()
    list(whole)
    half.advance()
    half.save(tmp_path / "c")
    rest.load(tmp_path / "c")
    assert rest.round == 3
    list(rest)
    assert same(weights(whole), weights(rest))


# Checkpoints, kills, folders


def test_a_checkpoint_gives_an_audit_the_model_and_a_users_real_residual(tmp_path: Path) -> None:
    trainer = trained(TINY)
    trainer.save(tmp_path / "c")
    saved = load_checkpoint(tmp_path / "c")
    assert (saved.round, saved.settings) == (6, TINY)
    job = assemble(saved.settings)
    job.model.load_state_dict(saved.model)
    veil = Veil(job.defense, parameters(job.model), client="2")
    veil.load_state_dict(saved.users[2])
    assert veil.round == 6
    assert same(veil.residual or {}, trainer.veils[2].residual or {})
    assert same(saved.model, weights(trainer))


def test_bad_checkpoints_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    path.write_bytes(b"nonsense")
    with pytest.raises(StateError, match="cannot read the checkpoint"):
        load_checkpoint(path)
    trainer = Trainer(assemble(TINY))
    trainer.save(path)
    with pytest.raises(ConfigError, match="users = 4, not 5"):
        Trainer(assemble(replace(TINY, users=5))).load(path)
    saved = load_checkpoint(path)
    save_checkpoint(path, replace(saved, momentum={}))
    with pytest.raises(StateError, match="another model"):
        trainer.load(path)


def test_a_killed_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    settings = replace(TINY, rounds=400, checkpoint_every=7)
    flags = [f"--{k.replace('_', '-')}={getattr(settings, k)}" for k in ("model", "users", "rounds", "lr")]
    flags += [
        "--eval-every=1000",
        "--epochs=1",
        "--checkpoint-every=7",
        "--no-progress",
        f"--out={tmp_path / 'killed'}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "2"}
    process = subprocess.Popen([sys.executable, "-m", "gradveil", "train", *flags], env=environment)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 120
        while not metrics.exists() or metrics.read_bytes().count(b"\n") < 20:
            assert process.poll() is None, "the run ended before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    reached = load_checkpoint(tmp_path / "killed" / "checkpoint.safetensors").round
    assert 14 <= reached < 400
    assert reached % 7 == 0
    shorter = replace(settings, rounds=reached + 10)
    run(shorter, tmp_path / "killed", resume=True)
    run(shorter, tmp_path / "whole")
    ends = [load_file(tmp_path / name / "checkpoint.safetensors") for name in ("killed", "whole")]
    assert same(*ends)
    lines = [read_rounds(tmp_path / name / "metrics.jsonl") for name in ("killed", "whole")]
    timeless = [[{k: v for k, v in line.items() if "seconds" not in k} for line in part] for part in lines]
    assert timeless[0] == timeless[1]
    assert len(lines[0]) == reached + 10


def test_a_run_stops_in_time_and_is_not_overwritten(tmp_path: Path) -> None:
    stopped = run(TINY, tmp_path, minutes=0.0)
    assert (stopped["status"], stopped["rounds_done"]) == ("stopped", 0)
    with pytest.raises(ConfigError, match="--resume"):
        run(TINY, tmp_path)
    with pytest.raises(ConfigError, match=r"momentum = 0\.9, not 0\.5"):
        run(replace(TINY, momentum=0.5), tmp_path, resume=True)
    finished = run(replace(TINY, epochs=2), tmp_path, resume=True)
    assert (finished["status"], finished["rounds_done"]) == ("finished", 6)
    assert finished["accuracy"] == finished["curve"][-1]["accuracy"]
    assert json.loads((tmp_path / "result.json").read_text())["accuracy"] == finished["accuracy"]


def test_tensorboard_gets_the_curves_if_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points: list[tuple[str, float, int]] = []

    class Board:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            points.append((name, value, step))

        def close(self) -> None: ...

    monkeypatch.setattr("gradveil.training.log._tensorboard", lambda *_: Board())
    result = run(replace(TINY, rounds=2), tmp_path)
    assert [step for name, _, step in points if name == "loss"] == [0, 1]
    assert ("accuracy", result["accuracy"], 1) in points


def test_tensorboard_forgets_the_rounds_that_a_kill_undid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    purged: list[int | None] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            purged.append(purge_step)

        def close(self) -> None: ...

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    for next_round in (0, 5):
        Log(tmp_path, next_round).close()
    assert purged == [None, 5]


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"index": 0}\n{"index": 1}\n{"ind')
    assert [line["index"] for line in read_rounds(path)] == [0, 1]
    path.write_text('{"index": 0}\nnonsense\n')
    with pytest.raises(StateError, match=r"metrics\.jsonl is damaged"):
        read_rounds(path)


def test_a_refused_continuation_leaves_the_settings_of_the_run(tmp_path: Path) -> None:
    run(TINY, tmp_path, minutes=0.0)
    before = (tmp_path / "settings.toml").read_text()
    line = ["train", str(tmp_path / "settings.toml"), "--resume", f"--out={tmp_path}", "--no-progress"]
    refused = CliRunner().invoke(app, [*line, "--defense=none"])
    assert isinstance(refused.exception, ConfigError)
    assert (tmp_path / "settings.toml").read_text() == before


def test_a_run_that_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    line = ["train", "--data", str(tmp_path / "nowhere"), "--out", str(tmp_path / "run")]
    assert isinstance(CliRunner().invoke(app, line).exception, ConfigError)
    assert not (tmp_path / "run").exists()


def test_tf32_is_refused_where_it_would_do_nothing() -> None:
    with pytest.raises(ConfigError, match="use float32"):
        assemble(replace(TINY, precision="tf32", device="cpu"))


def test_pictures_have_the_size_that_was_asked_for() -> None:
    test = assemble(replace(TINY, size=12)).test
    assert test is not None
    assert test.input_shape == (1, 12, 12)


def test_seconds_of_the_defense_do_not_count_the_first_round_which_compiles() -> None:
    trainer = trained(replace(TINY, rounds=1))
    rounds = [{"seconds": 1.0, "loss": 1.0, "users_measured": 4, "defense_seconds": s} for s in (9.0, 0.1, 0.2)]
    rounds = [{**r, "index": i, "residual_ratio": 1.0, "gamma": 0.5} for i, r in enumerate(rounds)]
    assert summary(trainer, "finished", rounds)["per_user_and_round"]["defense_seconds"] == 0.2


# The command


def test_the_command_reads_a_file_takes_flags_and_writes_what_it_resolved(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('model = "mlp(hidden=16)"\nusers = 2\nrounds = 3\nlr = 0.1\n')
    line = ["train", str(config), "--users", "3", "--out", str(tmp_path / "run"), "--no-progress"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 0, done.output
    assert "test accuracy" in done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["settings"]["users"], result["rounds_done"]) == (3, 3)
    assert '# resolved: augment = "none"\n' in (tmp_path / "run" / "settings.toml").read_text()
    again = CliRunner().invoke(app, ["train", str(tmp_path / "run" / "settings.toml"), "--out", str(tmp_path / "two")])
    assert again.exit_code == 0, again.output
    second = json.loads((tmp_path / "two" / "result.json").read_text())
    assert (second["settings"], second["accuracy"]) == (result["settings"], result["accuracy"])


def test_the_command_refuses_unknown_keys_and_reports_divergence(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text("batchsize = 4\n")
    done = CliRunner().invoke(app, ["train", str(config)])
    assert isinstance(done.exception, ConfigError)
    assert "unknown key 'batchsize'; did you mean batch_size?" in str(done.exception)
    line = ["train", "--model=mlp(hidden=16)", "--lr=1e30", "--rounds=9", "--users=2", f"--out={tmp_path / 'run'}"]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 1
    assert json.loads((tmp_path / "run" / "result.json").read_text())["status"] == "diverged"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr": "fast"}, "lr must look like"),
        ({"lr": "0.1, 9:0.2, 5:0.1"}, "must rise"),
        ({"participants": 5}, "at most users"),
        ({"local_steps": 2}, "set algorithm to fedavg"),
        ({"batchnorm": "mean"}, "one of average, first, local"),
        ({"users": 0}, "users must be a whole number of at least 1"),
        ({"momentum": 2.0}, r"momentum must be a share in \[0, 1\]"),
        ({"seed": 2**63}, "seed must be below"),
        ({"size": -1}, "size must be a whole number"),
    ],
)
def test_settings_refuse_what_makes_no_sense(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_the_papers_learning_rates() -> None:
    lenet, other = Settings(model="lenet(init='default')"), Settings(model="vgg11")
    assert [lenet.rate(epoch) for epoch in (0, 49, 50, 69, 70, 99)] == [0.1, 0.1, 0.01, 0.01, 0.005, 0.005]
    assert [other.rate(epoch) for epoch in (0, 69, 70)] == [0.01, 0.01, 0.005]
    assert replace(TINY, lr="0.5, 3:0.1").rate(3) == 0.1


class Silent(Identity):
    """What a user might write: an Identity that sends nothing."""

    def apply(self, grads: Any, state: Any, step: Any) -> Any:
        return tree.zeros_like(grads), state


def test_a_subclass_of_a_known_defense_is_not_taken_for_it(digits: data.Dataset) -> None:
    job = assemble(replace(TINY, rounds=2), train=digits, model=convolution(), defense=Silent())
    before = {name: p.clone() for name, p in job.model.named_parameters()}
    list(FastTrainer(job))
    assert all(torch.equal(p, before[name]) for name, p in job.model.named_parameters())


def test_a_run_on_another_copy_of_the_data_is_not_continued(digits: data.Dataset, tmp_path: Path) -> None:
    for engine in (Trainer, FastTrainer):
        first = engine(assemble(replace(TINY, rounds=4), train=digits, model=convolution()))
        first.advance() if isinstance(first, FastTrainer) else next(iter(first))
        first.save(tmp_path / "c")
        changed = replace(digits, images=digits.images.flip(0))
        other = engine(assemble(replace(TINY, rounds=4), train=changed, model=convolution()))
        with pytest.raises(ConfigError, match="another copy"):
            other.load(tmp_path / "c")


def test_continuing_a_fast_run_with_ten_users_keeps_every_bit(digits: data.Dataset, tmp_path: Path) -> None:
    settings = replace(TINY, users=10, rounds=4, checkpoint_every=2)

    def start() -> FastTrainer:
        return FastTrainer(assemble(settings, train=digits, model=convolution()))

    whole, half, rest = start(), start(), start()
    list(whole)
    while half.round < 2:
        half.advance()
    half.save(tmp_path / "c")
    rest.load(tmp_path / "c")
    list(rest)
    whole.evaluate(), rest.evaluate()
    assert all(torch.equal(t, rest.model.state_dict()[name]) for name, t in whole.model.state_dict().items())


def test_the_progress_bar_fits_into_80_columns() -> None:
    one = Round(15699, 99, 0.01, 1.258, 10, accuracy=0.9294, bytes_up=7.4e6, bytes_down=1.3e7)
    page = io.StringIO()
    with Progress(*train._columns(), console=Console(file=page, width=80, force_terminal=True)) as bar:
        news = " ".join(train._latest([one]).values())
        bar.add_task("chain(soteria, dgp)", total=15700, completed=15699, news=news)
    last = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", page.getvalue()).strip().splitlines()[-1]
    for text in ("chain(s…", "15699/15700", "loss 1.258", "acc 92.9%", "up 7.06 MiB", "down 12.40 MiB", "--:--"):
        assert text in last, last
