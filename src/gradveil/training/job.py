"""Everything a run starts from, the same for the reference and the fast engine."""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import data as datasets
from .. import models
from ..core import Defense, LossFn
from ..data import Dataset
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build
from ..veil import derive_rng
from .feed import Feed
from .settings import Settings


@dataclass(frozen=True, eq=False)
class Job:
    """The parts of a run, on their device, before the first round."""

    settings: Settings
    defense: Defense
    model: nn.Module
    feed: Feed
    test: Dataset | None
    device: torch.device
    rounds_per_epoch: int
    digests: dict[str, str]  # of the splits
    loss_fn: LossFn = nn.functional.cross_entropy

    @property
    def rounds(self) -> int:
        """How many rounds the run has."""
        return self.settings.rounds or self.settings.epochs * self.rounds_per_epoch

    def rate(self, round_: int) -> float:
        """Return the learning rate of a round."""
        return self.settings.rate(round_ // self.rounds_per_epoch)

    def server_rate(self, round_: int) -> float:
        """Return by how much the server scales its step: a FedAvg update is in units of the weights already."""
        return self.rate(round_) if self.settings.algorithm == "fedsgd" else 1.0

    @property
    def examples(self) -> list[int]:
        """How many pictures each user works on in a round."""
        return [size * self.settings.local_steps for size in self.feed.sizes]

    def participants(self, round_: int) -> list[int]:
        """Return the users of a round, in rising order."""
        users = self.settings.users
        if self.settings.invited == users:
            return list(range(users))
        rng = derive_rng(self.settings.seed, "server", round_, "participants")
        drawn = torch.randperm(users, generator=rng)[: self.settings.invited]
        return sorted(drawn.tolist())

    def proposer(self, round_: int) -> int:
        """Return the participant that proposes the common mask of an aligned round."""
        people = self.participants(round_)
        rng = derive_rng(self.settings.seed, "server", round_, "proposer")
        return people[int(torch.randint(len(people), (1,), generator=rng))]

    def evaluate_after(self, round_: int) -> bool:
        """Say whether the model is evaluated after this round."""
        epochs_done, rest = divmod(round_ + 1, self.rounds_per_epoch)
        return round_ + 1 == self.rounds or (rest == 0 and epochs_done % self.settings.eval_every == 0)


def assemble(
    settings: Settings,
    *,
    train: Dataset | None = None,
    test: Dataset | None = None,
    model: nn.Module | None = None,
    defense: Defense | None = None,
) -> Job:
    """Return the job the settings describe; parts that are passed take the place of those the settings name."""
    device = pick_device(settings.device)
    if settings.precision == "tf32" and device.type != "cuda":
        raise ConfigError(f"precision tf32 is arithmetic of NVIDIA GPUs, but the device is {device}: use float32")
    if train is None:
        root, size = settings.root or None, settings.size or None
        train = datasets.load(settings.data, split="train", root=root, size=size)
        test = datasets.load(settings.data, split="test", root=root, size=size) if test is None else test
    if defense is None:
        defense = build(DEFENSES, settings.defense, "defense").fitted(train.mean, train.std)
    if settings.algorithm == "fedavg" and "per_example" in defense.needs:
        raise ConfigError(f"{defense.key()} takes per-example gradients, which fedavg has not: use fedsgd")
    if settings.weigh_examples and not defense.weighs_examples:
        raise ConfigError(f"weigh_examples changes nothing under {defense.key()}, whose noise follows no one example")
    with own_randomness(settings.seed, torch.device("cpu")):
        if model is None:
            model = models.build(
                settings.model, num_classes=train.num_classes, input_shape=train.input_shape, seed=settings.seed
            )
        model = defense.prepare_model(model).to(device).train()
    if "per_example" in defense.needs and models.has_batchnorm(model):
        raise ConfigError(
            f"{defense.key()} takes per-example gradients, which BatchNorm has not while it trains: "
            "take a model without it (lenet, cnn6 and mlp have none)"
        )
    return Job(
        settings=settings,
        defense=defense,
        model=model,
        feed=Feed(train, settings, device),
        test=None if test is None else test.to(device),
        device=device,
        rounds_per_epoch=math.ceil(len(train) / (settings.invited * settings.batch_size * settings.local_steps)),
        digests={"train": train.digest} | ({} if test is None else {"test": test.digest}),
    )


def pick_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known: use cpu, cuda or cuda:1") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but PyTorch finds no GPU")
    return device


@contextmanager
def own_randomness(seed: int, device: torch.device) -> Iterator[None]:
    """Give layers that draw from the global generator (dropout, PRECODE) a state of their own, then restore it."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed)
        if cuda:
            torch.cuda.manual_seed(seed)
        yield


@contextmanager
def kernels(settings: Settings, device: torch.device) -> Iterator[None]:
    """Choose the arithmetic of the run for what runs inside, and put the global switches back afterwards."""
    tf32, exact = settings.precision == "tf32", settings.deterministic
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    wanted: list[tuple[Any, str, bool]] = [(cudnn, "benchmark", not exact), (cudnn, "deterministic", exact)]
    wanted += [(cudnn, "allow_tf32", tf32), (matmul, "allow_tf32", tf32)]
    if device.type != "cuda":
        wanted = []
    before = [(where, name, getattr(where, name)) for where, name, _ in wanted]
    try:
        for where, name, value in wanted:
            setattr(where, name, value)
        with torch.cuda.device(device) if wanted else nullcontext(), autocast(settings, device):
            yield
    finally:
        for where, name, value in before:
            setattr(where, name, value)


def autocast(settings: Settings, device: torch.device) -> "torch.autocast | nullcontext[None]":
    """Return the bf16 context if the settings ask for it."""
    if settings.precision != "bf16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False)


@torch.no_grad()
def evaluate(model: nn.Module, data: Dataset, job: Job, batch_size: int = 1000) -> float:
    """Return the share of `data` the model classifies correctly; training flags are left as they were."""
    correct: Tensor | int = 0
    with models.evaluating(model), kernels(job.settings, job.device), own_randomness(job.settings.seed, job.device):
        for start in range(0, len(data), batch_size):
            batch = data.batch(range(start, min(start + batch_size, len(data))))
            correct = correct + (model(batch.inputs).argmax(1) == batch.labels).sum()
    return int(correct) / len(data)
