"""What `gradveil attack` does: clients upload, a server attacks, the guesses are scored; resumable part by part."""

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

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
from ..errors import ConfigError, GuardError
from ..files import write_tensors
from ..gate import observe
from ..generator import load_generator
from ..gradients import gradient, parameters
from ..record import write_json
from ..reproduce.scored import LINE_UP
from ..spec import build, to_spec
from ..training.job import own_randomness, pick_device
from ..veil import DEFAULT_GUARD, Veil, derive_rng


@dataclass(frozen=True)
class AttackSettings:
    """Options of `gradveil attack`."""

    model: str = option("lenet", "lenet, cnn6, vgg11, resnet18, mlp, or package.module:factory.")
    data: str = option("photos", "photos and digits need no download; cifar10, cifar100, or a folder of pictures.")
    root: str = option("", "Where the dataset's files lie; empty: the usual places.")
    defense: str = option("none", "What the client does, such as dgp or hardened(examples=1); see gradveil list.")
    attack: str = option("inverting_gradients", "What the server does, such as joint(rounds=2); see docs/attacks.md.")
    pictures: int = option(4, "How many private pictures to attack.")
    batch_size: int = option(1, "Pictures in one upload.")
    rounds: int = option(0, "Uploads the client made before the attacked one, with other pictures.")
    freeze: bool = option(False, "The server repeats the weights, and the client its batch, in those rounds.")
    lr: float = option(0.01, "Learning rate of the server between those rounds.")
    guard: bool = option(True, "The client refuses a model that looks manipulated: active attacks need --no-guard.")
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


class Upload(NamedTuple):
    """One attacked upload: what the server sees of it, and what it weighed."""

    seen: Observation
    nbytes: int


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
    def tested(self) -> Dataset:
        """Test pictures as the dataset lists them."""
        s = self.settings
        return data.load(s.data, split="test", root=s.root or None)

    @cached_property
    def order(self) -> Tensor:
        """Which test pictures the victims are: bundled photos as listed, others in an order the seed settles."""
        s, count = self.settings, len(self.tested)
        drawn = torch.randperm(count, generator=torch.Generator().manual_seed(s.seed))
        return torch.arange(count) if s.data == "photos" else drawn

    @cached_property
    def victims(self) -> Dataset:
        """Test pictures in the order of attack."""
        s = self.settings
        wanted = s.pictures * (1 if s.freeze else s.rounds + 1)
        if len(self.tested) < wanted:
            raise ConfigError(f"{wanted} pictures are needed but {s.data} has {len(self.tested)}: ask for fewer")
        return self.tested.subset(self.order)

    @cached_property
    def public(self) -> Dataset:
        """Pictures everybody has: blind guesses and line-ups come from them."""
        s = self.settings
        return data.load(s.data, split="train", root=s.root or None)

    @cached_property
    def line_up(self) -> Tensor:
        """Public pictures among which a private one must be nearest to its reconstruction, as for the cards."""
        return self.public.pixels(range(min(len(self.public), LINE_UP - 1)))

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
        return self.upload(upload).seen

    def upload(self, upload: int) -> Upload:
        """Return the attacked upload of one client, its earlier rounds included; it must not be empty."""
        s = self.settings
        model = copy.deepcopy(self.model)
        guard = DEFAULT_GUARD if s.guard else None
        veil = Veil(self.defense, parameters(model), seed=s.seed, client=str(upload), guard=guard)
        earlier: list[Observation] = []
        for round_ in range(s.rounds + 1):
            sent = self._upload(veil, model, self.victims.batch(self.indices(upload, round_), self.device), earlier)
            earlier.append(replace(sent.seen, earlier=()))
            if not s.freeze:
                with torch.no_grad():
                    for name, p in model.named_parameters():
                        p.sub_(sent.seen.grads[name], alpha=s.lr)
        if not any(bool(g.any()) for g in sent.seen.grads.values()):  # an attack on nothing would flatter the defense
            raise ConfigError(
                f"{s.defense} sends nothing in round {s.rounds}, so there is nothing to attack: if it mixes pictures "
                "first, attack it on one, such as hardened(examples=1), or give more --rounds or a larger --batch-size"
            )
        return sent

    def _upload(self, veil: Veil, model: nn.Module, batch: Batch, earlier: list[Observation]) -> Upload:
        s, d, loss_fn = self.settings, self.victims, nn.functional.cross_entropy
        mask = None
        if "mask" in self.defense.needs:
            other = self.public.batch(range(s.batch_size), self.device)
            helper = Veil(self.defense, parameters(model), seed=s.seed, client="proposer")
            mask = helper.propose(gradient(copy.deepcopy(model), loss_fn, other))
        noise = derive_rng(s.seed, veil.client, veil.round, "layers").initial_seed()
        with own_randomness(noise, self.device), full_precision():
            try:
                payload = veil.protect(copy.deepcopy(model), loss_fn, batch, mask=mask)
            except GuardError as error:
                raise GuardError(f"{error}; gradveil attack does with --no-guard") from error
        seen = observe(
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
        return Upload(seen, payload.nbytes)

    def run(self, uploads: list[int]) -> tuple[list[Reconstruction], list[int]]:
        """Attack some uploads together; return the guesses, and the bytes of each upload."""
        attack = self.attack.fitted(self.defense, self.victims.mean, self.victims.std)
        sent = [self.upload(i) for i in uploads]
        return self._guess(attack, [s.seen for s in sent], uploads, "attack"), [s.nbytes for s in sent]

    def run_blind(self, uploads: list[int]) -> list[Reconstruction]:
        """Return what the same attacker guesses without the gradient; nothing if it has no guess then."""
        attack = self.attack.blind()
        return [] if attack is None else self._guess(attack, [self.observe(i) for i in uploads], uploads, "blind")

    def _guess(self, attack: Attack, seen: list[Observation], uploads: list[int], purpose: str) -> list[Reconstruction]:
        return attack.run_many(seen, [derive_rng(self.settings.seed, str(i), 0, purpose) for i in uploads])

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
        known = {"guess_labels": labels, "truth_labels": truth.labels}
        return paired, metrics.score(guess, truth.inputs, **known, gallery=self.line_up)


def with_steps(attack: Attack, steps: int) -> Attack:
    """Return the attack with this many steps, also where it wraps another."""
    if hasattr(attack, "steps"):
        return replace(attack, steps=steps)  # type: ignore[type-var]
    if hasattr(attack, "inner"):
        return replace(attack, inner=with_steps(attack.inner, steps))  # type: ignore[type-var]
    raise ConfigError(f"{attack.key()} has no steps: leave --steps out")


def save_part(
    folder: Path, job: AttackJob, uploads: list[int], found: tuple[list[Reconstruction], list[int]], seconds: float
) -> None:
    """Keep what was found for some uploads; the JSON comes last and says that the part is whole."""
    pixels, rows = [], []
    for upload, guess, nbytes in zip(uploads, *found, strict=True):
        paired, scores = job.score(upload, guess)
        pixels.append(paired)
        told = None if guess.labels is None else guess.labels.tolist()
        row = {"upload": upload, "loss": guess.loss, "labels": told, "bytes_up": nbytes, "scores": scores}
        rows.append(row)
    name = f"part-{uploads[0]:04d}"
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / f"{name}.safetensors", {"guesses": torch.cat(pixels)})
    write_json(folder / f"{name}.json", {"digest": job.digest, "rows": rows, "seconds": seconds})


def load_part(folder: Path, job: AttackJob, uploads: list[int]) -> tuple[dict[str, Any], Tensor] | None:
    """Return a part kept by an earlier run with the same settings and data; None if there is none, or it is damaged."""
    name = f"part-{uploads[0]:04d}"
    try:
        part = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        digest, _ = part["digest"], part["seconds"]
        kept = list({row["upload"]: row["bytes_up"] for row in part["rows"]})  # parts of older versions lack the bytes
        guesses = load_file(folder / f"{name}.safetensors")["guesses"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, SafetensorError):
        return None
    if digest != job.digest or kept != uploads:
        raise ConfigError(f"{folder} holds an attack with other settings or data: choose another --out or delete it")
    return part, guesses


def describe(job: AttackJob) -> dict[str, Any]:
    """Return every setting of a run as plain data."""
    s = job.settings
    places = [i for upload in range(s.pictures // s.batch_size) for i in job.indices(upload, s.rounds)]
    return {
        "settings": asdict(s),
        "attack": to_spec(job.attack),
        "defense": to_spec(job.defense),
        "threat": asdict(job.threat),
        "pictures": job.order[places].tolist(),  # of the test split, as the dataset lists it
        "line_up": len(job.line_up) + s.batch_size,
        "bytes_dense": sum(p.numel() * p.element_size() for p in parameters(job.model).values()),
    }
