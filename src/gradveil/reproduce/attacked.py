"""Running attack cells: the clients of the audit send, the attacker guesses."""

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import nn

from .. import models
from ..attacks import ATTACKS, GradientMatching
from ..audit import clients
from ..audit.clients import Sent
from ..audit.plan import Plan, Subject
from ..audit.report import Column, ColumnInfo
from ..capture import full_precision
from ..core import Attack, Batch, Masks, Observation, Reconstruction
from ..data import Dataset
from ..defenses import DEFENSES
from ..errors import NeedError
from ..gate import observe
from ..generator import GeneratorSettings, load_generator, train_generator
from ..gradients import local_update, parameters
from ..metrics.perceptual import lpips_weights
from ..spec import build
from ..training.job import own_randomness
from ..veil import Veil, derive_rng
from .cells import AttackCell
from .pictures import load_split, others, victims
from .scales import Scale
from .weights import trained_weights

LOCAL_RATE = 0.01  # of a FedAvg client


@dataclass(frozen=True)
class Place:
    """Where and at which scale a cell is run, and for how long it may train what it attacks."""

    scale: Scale
    root: str | None
    device: torch.device
    minutes: float | None


@dataclass(frozen=True, eq=False)
class Case:
    """A cell whose clients have sent."""

    cell: AttackCell
    data: Dataset
    chosen: list[int]
    public: Dataset
    attack: Attack
    sent: list[Sent]
    seen: list[Observation]
    seconds: float


def joins(one: AttackCell, other: AttackCell) -> bool:
    """Say whether two cells can be attacked in one batch: a search by the same rules from the same weights."""

    def rules(cell: AttackCell) -> tuple[object, ...]:
        where = (cell.model, cell.data, cell.seed, cell.epochs)
        steps = (cell.local_steps, cell.in_turn)
        return (cell.attack_text, cell.adaptive, *where, cell.batch_size, cell.labels, *steps, cell.mode)

    return rules(one) == rules(other) and isinstance(build(ATTACKS, one.attack_text, "attack"), GradientMatching)


def prepare(cell: AttackCell, place: Place) -> Case:
    """Let the clients of a cell send."""
    if place.scale.name == "full":
        lpips_weights()  # raises if there are none: a result without LPIPS would have to be run again
    started = time.monotonic()
    data, chosen = victims(cell, place.root)
    attack = build(ATTACKS, cell.attack_text, "attack")
    if cell.in_turn and isinstance(attack, GradientMatching):
        attack = replace(attack, split=True)
    subject, column = _subject(cell, place, data, chosen, attack)
    defense = subject.defenses[cell.defense]
    attack = attack.fitted(defense if cell.adaptive else None, data.mean, data.std)
    plan = Plan(seed=cell.seed, device=str(place.device))
    if cell.local_steps > 1:
        with full_precision():
            sent = _fedavg(cell, subject)
    else:
        sent = clients.uploads(plan, subject, column, cell.defense, attack)
    if not all(any(bool(g.any()) for g in s.seen.grads.values()) for s in sent):
        # An attack on nothing scores like perfect privacy, whatever the defense is worth once it does send.
        raise NeedError(f"{cell.defense} sent nothing in round {cell.rounds}: attack an upload that carries something")
    seen = [s.seen if cell.adaptive else replace(s.seen, defense=None) for s in sent]
    if "prior" in attack.needs:
        prior = _generator(place.scale, subject.public, cell.seed).to(place.device)
        seen = [replace(one, prior=prior) for one in seen]
    return Case(cell, data, chosen, subject.public, attack, sent, seen, time.monotonic() - started)


def guess(cases: Sequence[Case], place: Place) -> list[list[Reconstruction]]:
    """Attack what was sent in several cells that join, all at once."""
    seeds = [(case.cell, i) for case in cases for i in range(len(case.seen))]
    rngs = [derive_rng(cell.seed, f"{cell.attack} {i}", 0, "attack") for cell, i in seeds]
    first = cases[0]
    with own_randomness(first.cell.seed, place.device):  # an attacker who imitates a random layer draws as it does
        found = iter(first.attack.run_many([one for case in cases for one in case.seen], rngs))
    return [list(islice(found, len(case.seen))) for case in cases]


def _subject(
    cell: AttackCell, place: Place, data: Dataset, chosen: list[int], attack: Attack
) -> tuple[Subject, ColumnInfo]:
    private, public = others(cell, place.root)
    train = load_split(cell.data, "train", place.root)
    model = models.build(cell.model, num_classes=data.num_classes, input_shape=data.input_shape, seed=cell.seed)
    if cell.epochs:
        model.load_state_dict(trained_weights(cell, place.scale, place.root, place.device, place.minutes))
    subject = Subject(
        model=model.to(place.device),
        loss_fn=nn.functional.cross_entropy,
        victims=data.subset(chosen),
        private=train.subset(private),
        public=train.subset(public),
        defenses={cell.defense: build(DEFENSES, cell.defense_text, "defense").fitted(data.mean, data.std)},
        attacks={cell.attack: attack},
        device=place.device,
    )
    places = list(range(cell.pictures))
    return subject, ColumnInfo(_column(cell), cell.mode, cell.batch_size, cell.rounds, places, {})


def _column(cell: AttackCell) -> Column:
    """Return the audit's column that grants what the cell says: labels are given in its diagnostic one only."""
    return "diagnostic" if cell.labels == "given" else "realistic"


def client_name(cell: AttackCell, index: int) -> str:
    """Return the name from which a client's chance is derived."""
    return str(index) if cell.local_steps > 1 else clients.name_of(_column(cell), index)


def _fedavg(cell: AttackCell, subject: Subject) -> list[Sent]:
    """Return first-round uploads of clients that take several local steps on one batch, or on its parts in turn."""
    defense, data = subject.defenses[cell.defense], subject.victims
    model = defense.prepare_model(copy.deepcopy(subject.model)).to(subject.device).train(cell.mode == "train")
    sent = []
    for i, group in enumerate(torch.arange(cell.pictures).split(cell.batch_size)):
        batch = data.batch(group, subject.device)
        veil = Veil(defense, parameters(model), seed=cell.seed, client=client_name(cell, i))
        own = copy.deepcopy(model)
        used = veil.prepare(own, batch)
        update = local_update(own, subject.loss_fn, _shares(cell, used), LOCAL_RATE)
        mask = _proposed(cell, subject, model, i) if "mask" in defense.needs else None
        payload = veil.seal(update, len(group), model=own, batch=used, mask=mask)
        seen = observe(
            payload,
            model,
            subject.loss_fn,
            batch,
            clients.threat(_column(cell), subject),
            num_classes=data.num_classes,
            mean=data.mean,
            std=data.std,
            defense=defense,
            mask=mask,
            local_steps=cell.local_steps,
            local_lr=LOCAL_RATE,
        )
        sent.append(Sent(seen, batch, used, update, payload.nbytes, sum(veil.seconds), None, 0))
    return sent


def _shares(cell: AttackCell, batch: Batch) -> list[Batch]:
    """Return what each local step of a client trains on."""
    if not cell.in_turn:
        return [batch] * cell.local_steps
    parts = zip(batch.inputs.chunk(cell.local_steps), batch.labels.chunk(cell.local_steps), strict=True)
    return [Batch(*part) for part in parts]


def _proposed(cell: AttackCell, subject: Subject, model: nn.Module, index: int) -> Masks:
    """Return the mask of an aligned round, proposed by another client from as many steps on a batch of its own."""
    rng = derive_rng(cell.seed, f"proposer {index}", 0, "private")
    chosen = torch.randint(len(subject.private), (cell.batch_size,), generator=rng)
    batch = subject.private.batch(chosen, subject.device)
    update = local_update(copy.deepcopy(model), subject.loss_fn, _shares(cell, batch), LOCAL_RATE)
    return Veil(subject.defenses[cell.defense], parameters(model), seed=cell.seed, client="proposer").propose(update)


def _generator(scale: Scale, public: Dataset, seed: int) -> nn.Module:
    """Return the prior GGL searches: the project's own, or one trained for a moment on public pictures."""
    if scale.generator is None:
        return load_generator()
    return train_generator(public, GeneratorSettings(**scale.generator, seed=seed))
