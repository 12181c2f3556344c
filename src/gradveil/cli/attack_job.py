"""What `gradveil attack` does: clients upload, a server attacks, the guesses are scored; resumable part by part."""

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from .. import check, data, metrics, models
from ..attacks import ATTACKS, missing
from ..capture import full_precision
from ..config import option
from ..core import Attack, Batch, Defense, Observation, Reconstruction, ThreatModel
from ..data import Dataset
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..files import write_tensors
from ..gate import observe
from ..generator import load_generator
from ..gradients import gradient, parameters
from ..record import write_json
from ..spec import build, to_spec
from ..training.job import own_randomness, pick_device
from ..veil import Veil, derive_rng


@dataclass(frozen=True)
class AttackSettings:
    """Options of `gradveil attack`."""

    model: str = option("lenet", "lenet, cnn6, vgg11, resnet18, mlp, or package.module:factory.")
    data: str = option("photos", "photos and digits need no download; cifar10, cifar100, or a folder of pictures.")
    root: str = option("", "Where the dataset's files lie; empty: the usual places.")
    defense: str = option("none", "What the client does, such as hardened or dgp; see gradveil list.")
    attack: str = option("inverting_gradients", "What the server does, such as joint(rounds=2); see docs/attacks.md.")
    pictures: int = option(4, "How many private pictures to attack.")
    batch_size: int = option(1, "Pictures in one upload.")
    rounds: int = option(0, "Uploads the client made before the attacked one, with other pictures.")
    freeze: bool = option(False, "The server repeats the weights, and the client its batch, in those rounds.")
    lr: float = option(0.01, "Learning rate of the server between those rounds.")
    train_mode: bool = option(False, "Compute gradients in training mode: BatchNorm uses batch statistics.")
    labels: str = option("known", "known: the attacker is given the labels. inferred: it must find them.")
    steps: int = option(0, "Steps of the attack; 0: as many as it has.")
    generator: str = option("", "Generator file for the attack GGL; empty: the one of gradveil.")
    group: int = option(20, "Uploads attacked together; what is done is kept after each group.")
    device: str = option("auto", "cpu, cuda, cuda:1, or auto.")
    seed: int = option(0, "Settles the model, the pictures, noise and starting points.")

    def __post_init__(self) -> None:
        check.at_least(1, pictures=self.pictures, batch_size=self.batch_size, group=self.group)
        check.at_least(0, rounds=self.rounds, steps=self.steps, seed=self.seed)
        check.non_negative(lr=self.lr)
        check.one_of(("known", "inferred"), labels=self.labels)
        if self.pictures % self.batch_size:
            raise ValueError(f"pictures must be a multiple of batch_size, got {self.pictures} and {self.batch_size}")


@dataclass(frozen=True)
class AttackJob:
    """The parts that the settings name, and what they do together."""

    settings: AttackSettings

    @cached_property
    def device(self) -> torch.device:
        """Where everything runs."""
        return pick_device(self.settings.device)

    @cached_property
    def attack(self) -> Attack:
        """The attack, with its number of steps if one was asked for."""
        found = build(ATTACKS, self.settings.attack, "attack")
        return with_steps(found, self.settings.steps) if self.settings.steps else found

    @cached_property
    def defense(self) -> Defense:
        """The defense, told how pixels are normalised if it changes pictures."""
        return build(DEFENSES, self.settings.defense, "defense").fitted(self.victims.mean, self.victims.std)

    @cached_property
    def victims(self) -> Dataset:
        """Test pictures in the order of attack: bundled photos as listed, others in an order the seed settles."""
        s = self.settings
        found = data.load(s.data, split="test", root=s.root or None)
        wanted = s.pictures * (1 if s.freeze else s.rounds + 1)
        if len(found) < wanted:
            raise ConfigError(f"{wanted} pictures are needed but {s.data} has {len(found)}: ask for fewer")
        order = torch.randperm(len(found), generator=torch.Generator().manual_seed(s.seed))
        return found if s.data == "photos" else found.subset(order)

    @cached_property
    def public(self) -> Dataset:
        """Pictures everybody has: blind guesses and line-ups come from them."""
        s = self.settings
        return data.load(s.data, split="train", root=s.root or None)

    @cached_property
    def threat(self) -> ThreatModel:
        """What the attacker is granted: what it needs, the earlier rounds if there are any, the labels if known."""
        s, needs = self.settings, self.attack.needs
        return ThreatModel(
            labels=s.labels == "known", rounds=s.rounds > 0, active="active" in needs, prior="prior" in needs
        )

    @cached_property
    def model(self) -> nn.Module:
        """What the server sends in the first round: prepared by the defense, planted in by an active attack."""
        s, shape = self.settings, self.victims.input_shape
        lacking = missing(self.attack, self.threat)
        if lacking:
            raise ConfigError(f"{self.attack.key()} needs {', '.join(lacking)}: give --rounds 1 or more")
        net = models.build(s.model, num_classes=self.victims.num_classes, input_shape=shape, seed=s.seed)
        net = self.defense.prepare_model(net)
        if "active" in self.attack.needs:
            fitted = self.attack.fitted(self.defense, self.victims.mean, self.victims.std)
            net = fitted.plant(net, shape, derive_rng(s.seed, "server", 0, "plant"))
        return net.to(self.device).train(s.train_mode)

    @cached_property
    def prior(self) -> nn.Module | None:
        """The generator, if the attack searches one."""
        s = self.settings
        return load_generator(Path(s.generator) if s.generator else None) if self.threat.prior else None

    @cached_property
    def digest(self) -> str:
        """What tells this job from others, its data included; device and grouping change no result that matters."""
        told = {k: v for k, v in asdict(self.settings).items() if k not in ("device", "group", "root")}
        text = json.dumps([told, self.victims.digest, self.public.digest], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def parts(self) -> Iterator[list[int]]:
        """Return the uploads group by group."""
        count = self.settings.pictures // self.settings.batch_size
        for first in range(0, count, self.settings.group):
            yield list(range(first, min(first + self.settings.group, count)))

    def indices(self, upload: int, round_: int) -> list[int]:
        """Return which pictures are in an upload; the attacked round is the last, and has the first pictures."""
        s = self.settings
        back = 0 if s.freeze else s.rounds - round_
        first = back * s.pictures + upload * s.batch_size
        return list(range(first, first + s.batch_size))

    def observe(self, upload: int) -> Observation:
        """Return what the server sees of one client, its earlier rounds included."""
        s = self.settings
        model = copy.deepcopy(self.model)
        veil = Veil(self.defense, parameters(model), seed=s.seed, client=str(upload))
        earlier: list[Observation] = []
        for round_ in range(s.rounds + 1):
            seen = self._upload(veil, model, self.victims.batch(self.indices(upload, round_), self.device), earlier)
            earlier.append(replace(seen, earlier=()))
            if not s.freeze:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.sub_(seen.grads[name], alpha=s.lr)
        return seen

    def _upload(self, veil: Veil, model: nn.Module, batch: Batch, earlier: list[Observation]) -> Observation:
        s, d, loss_fn = self.settings, self.victims, nn.functional.cross_entropy
        mask = None
        if "mask" in self.defense.needs:
            other = self.public.batch(range(s.batch_size), self.device)
            helper = Veil(self.defense, parameters(model), seed=s.seed, client="proposer")
            mask = helper.propose(gradient(copy.deepcopy(model), loss_fn, other))
        noise = derive_rng(s.seed, veil.client, veil.round, "layers").initial_seed()
        with own_randomness(noise, self.device), full_precision():
            payload = veil.protect(copy.deepcopy(model), loss_fn, batch, mask=mask)
        return observe(
            payload,
            model,
            loss_fn,
            batch,
            self.threat,
            num_classes=d.num_classes,
            mean=d.mean,
            std=d.std,
            defense=self.defense,
            prior=self.prior,
            mask=mask,
            earlier=earlier,
        )

    def run(self, uploads: list[int]) -> list[Reconstruction]:
        """Attack some uploads together."""
        attack = self.attack.fitted(self.defense, self.victims.mean, self.victims.std)
        return self._guess(attack, uploads, "attack")

    def run_blind(self, uploads: list[int]) -> list[Reconstruction]:
        """Return what the same attacker guesses without the gradient; nothing if it has no guess then."""
        attack = self.attack.blind()
        return [] if attack is None else self._guess(attack, uploads, "blind")

    def _guess(self, attack: Attack, uploads: list[int], purpose: str) -> list[Reconstruction]:
        rngs = [derive_rng(self.settings.seed, str(i), 0, purpose) for i in uploads]
        return attack.run_many([self.observe(i) for i in uploads], rngs)

    def truth(self, upload: int) -> Batch:
        """Return pixels and labels of the pictures under attack."""
        index = self.indices(upload, self.settings.rounds)
        return Batch(self.victims.pixels(index), self.victims.labels[index])

    def score(self, upload: int, found: Reconstruction) -> tuple[Tensor, dict[str, list[float]]]:
        """Return the guesses as pixels in the order of the truths, and their scores."""
        truth, d = self.truth(upload), self.victims
        guess = data.to_pixels(found.inputs.cpu(), d.mean, d.std)
        labels = None if found.labels is None else found.labels.cpu()
        paired = metrics.aligned(guess, metrics.pair(guess, truth.inputs))
        return paired, metrics.score(guess, truth.inputs, guess_labels=labels, truth_labels=truth.labels)


def with_steps(attack: Attack, steps: int) -> Attack:
    """Return the attack with this many steps, also where it wraps another."""
    if hasattr(attack, "steps"):
        return replace(attack, steps=steps)  # type: ignore[type-var]
    if hasattr(attack, "inner"):
        return replace(attack, inner=with_steps(attack.inner, steps))  # type: ignore[type-var]
    raise ConfigError(f"{attack.key()} has no steps: leave --steps out")


def save_part(folder: Path, job: AttackJob, uploads: list[int], found: list[Reconstruction], seconds: float) -> None:
    """Keep what was found for some uploads; the JSON comes last and says that the part is whole."""
    pixels, rows = [], []
    for upload, guess in zip(uploads, found, strict=True):
        paired, scores = job.score(upload, guess)
        pixels.append(paired)
        told = None if guess.labels is None else guess.labels.tolist()
        rows.append({"upload": upload, "loss": guess.loss, "labels": told, "scores": scores})
    name = f"part-{uploads[0]:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / f"{name}.safetensors", {"guesses": torch.cat(pixels)})
    write_json(folder / f"{name}.json", {"digest": job.digest, "rows": rows, "seconds": seconds})


def load_part(folder: Path, job: AttackJob, uploads: list[int]) -> tuple[dict[str, Any], Tensor] | None:
    """Return a part kept by an earlier run with the same settings and data; None if there is none, or it is damaged."""
    name = f"part-{uploads[0]:04d}"
    try:
        part = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        digest, kept, _ = part["digest"], [row["upload"] for row in part["rows"]], part["seconds"]
        guesses = load_file(folder / f"{name}.safetensors")["guesses"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, SafetensorError):
        return None
    if digest != job.digest or kept != uploads:
        raise ConfigError(f"{folder} holds an attack with other settings or data: choose another --out or delete it")
    return part, guesses


def describe(job: AttackJob) -> dict[str, Any]:
    """Return every setting of a run as plain data."""
    s = job.settings
    pictures = [i for upload in range(s.pictures // s.batch_size) for i in job.indices(upload, s.rounds)]
    return {
        "settings": asdict(s),
        "attack": to_spec(job.attack),
        "defense": to_spec(job.defense),
        "threat": asdict(job.threat),
        "pictures": pictures,
    }
