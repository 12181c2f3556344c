"""Running one attack cell: the clients of the audit send, the attacker guesses, every picture is scored."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import metrics, models, tree
from ..attacks import ATTACKS
from ..audit import clients
from ..audit.clients import Sent
from ..audit.plan import Plan, Subject
from ..audit.report import Column, ColumnInfo
from ..capture import full_precision
from ..core import Attack, Reconstruction
from ..data import Dataset, to_pixels
from ..defenses import DEFENSES
from ..errors import NeedError
from ..gate import observe
from ..generator import GeneratorSettings, load_generator, train_generator
from ..gradients import local_update, parameters
from ..metrics.perceptual import lpips_weights
from ..spec import build, to_text
from ..training.job import fitted, own_randomness
from ..veil import Veil, derive_rng
from .cells import AttackCell, definition
from .pictures import groups, load_split, others, victims
from .scales import Scale
from .store import save_strip
from .weights import trained_weights

LOCAL_RATE = 0.01  # of a FedAvg client
LINE_UP = 100  # pictures among which a reconstruction must be nearest to its original
COPY = 1e-4  # mean squared error (40 dB) below which a reconstruction is the picture itself
GREEN = (0.2, 0.7, 0.3)


@dataclass(frozen=True)
class Place:
    """Where and at which scale a cell is run, and for how long it may train what it attacks."""

    scale: Scale
    root: str | None
    device: torch.device
    minutes: float | None


def perform(cell: AttackCell, place: Place, strip: Path) -> dict[str, Any]:
    """Run the cell and return its result; the strip of reconstructions is written to `strip`."""
    if place.scale.name == "full":
        lpips_weights()  # raises if there are none: a result without LPIPS would have to be run again
    root, device = place.root, place.device
    data, chosen = victims(cell, root)
    attack = build(ATTACKS, cell.attack_text, "attack")
    subject, column = _subject(cell, place, data, chosen, attack)
    defense = subject.defenses[cell.defense]
    attack = attack.fitted(defense if cell.adaptive else None, data.mean, data.std)
    plan = Plan(seed=cell.seed, device=str(device))
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
        prior = _generator(place.scale, subject.public, cell.seed).to(device)
        seen = [replace(one, prior=prior) for one in seen]
    rngs = [derive_rng(cell.seed, f"{cell.attack} {i}", 0, "attack") for i in range(len(sent))]
    with own_randomness(cell.seed, device):  # an attacker who imitates a random layer draws as it does
        found = attack.run_many(seen, rngs)
    line_up = _pixels(subject.public, LINE_UP - 1, device)
    save_strip(strip, torch.cat([_tiles(s, f, data) for s, f in zip(sent, found, strict=True)]))
    return {
        "definition": definition(cell),
        "digests": {"test": data.digest} | ({"train": _train_digest(cell, root)} if cell.epochs else {}),
        "attack_used": to_text(attack),
        "n": cell.pictures,
        "victims": chosen,
        "strip_order": "trained_on",  # older strips are in the order of the originals
        "scores": scores_of(sent, found, data, line_up, transformed=False),
        "transformed_scores": scores_of(sent, found, data, line_up, transformed=True) if _transforms(sent) else None,
        "floor": _floor(cell.data, root, groups(cell, chosen), others(cell, root)[1], cell.seed, str(device)),
        "loss": [f.loss for f in found],
        "distance": [_distance(s) for s in sent],
        "waited": [s.waited for s in sent],
        "bytes_up": sum(s.nbytes for s in sent) / len(sent),
        "bytes_dense": sum(g.numel() * g.element_size() for g in sent[0].grads.values()),
    }


def _train_digest(cell: AttackCell, root: str | None) -> str:
    return load_split(cell.data, "train", root).digest


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
        defenses={cell.defense: fitted(build(DEFENSES, cell.defense_text, "defense"), data)},
        attacks={cell.attack: attack},
        device=place.device,
    )
    places = list(range(cell.pictures))
    return subject, ColumnInfo(_column(cell), "eval", cell.batch_size, cell.rounds, places, {})


def _column(cell: AttackCell) -> Column:
    """Return the audit's column that grants what the cell says: labels are given in its diagnostic one only."""
    return "diagnostic" if cell.labels == "given" else "realistic"


def client_name(cell: AttackCell, index: int) -> str:
    """Return the name from which a client's chance is derived."""
    return str(index) if cell.local_steps > 1 else clients.name_of(_column(cell), index)


def _fedavg(cell: AttackCell, subject: Subject) -> list[Sent]:
    """Return first-round uploads of clients that take several local steps on one batch."""
    defense, data = subject.defenses[cell.defense], subject.victims
    model = defense.prepare_model(copy.deepcopy(subject.model)).to(subject.device).eval()
    sent = []
    for i, group in enumerate(torch.arange(cell.pictures).split(cell.batch_size)):
        batch = data.batch(group, subject.device)
        veil = Veil(defense, parameters(model), seed=cell.seed, client=client_name(cell, i))
        own = copy.deepcopy(model)
        used = veil.prepare(own, batch)
        update = local_update(own, subject.loss_fn, [used] * cell.local_steps, LOCAL_RATE)
        payload = veil.seal(update, len(group), model=own, batch=used)
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
            local_steps=cell.local_steps,
            local_lr=LOCAL_RATE,
        )
        sent.append(Sent(seen, batch, used, update, payload.nbytes, sum(veil.seconds), None, 0))
    return sent


def _generator(scale: Scale, public: Dataset, seed: int) -> nn.Module:
    """Return the prior GGL searches: the project's own, or one trained for a moment on public pictures."""
    if scale.generator is None:
        return load_generator()
    return train_generator(public, GeneratorSettings(**scale.generator, seed=seed))


def scores_of(
    sent: Sequence[Sent],
    found: Sequence[Reconstruction],
    data: Dataset,
    line_up: Tensor | None = None,
    *,
    transformed: bool = False,
) -> dict[str, list[float]]:
    """Return every score of every picture, with a line-up also whether it was identified.

    `transformed` compares with the pictures as the defense changed them.
    """
    cards = []
    for s, f in zip(sent, found, strict=True):
        batch = s.trained_on if transformed else s.batch
        guess = to_pixels(f.inputs.to(batch.inputs), data.mean, data.std)
        truth = to_pixels(batch.inputs, data.mean, data.std)
        labels = {"guess_labels": f.labels, "truth_labels": s.batch.labels}
        cards.append(metrics.score(guess, truth, **labels, gallery=line_up))
    return {name: [v for card in cards for v in card[name]] for name in cards[0]}


@lru_cache(maxsize=16)
def _floor(
    name: str,
    root: str | None,
    uploads: tuple[tuple[int, ...], ...],
    known: tuple[int, ...],
    seed: int,
    where: str,
) -> dict[str, dict[str, float]]:
    """Return the mean scores of guesses that never look at the gradient, upload by upload like the attack's.

    They depend on no attack, defense or model, so that cells in a row share them.
    """
    public = load_split(name, "train", root).pixels(known).to(where)
    columns: dict[str, dict[str, list[float]]] = {}
    for i, group in enumerate(uploads):
        truth = load_split(name, "test", root).pixels(group).to(where)
        blind = metrics.score_floor(truth, public, derive_rng(seed, "floor", i), gallery=public[: LINE_UP - 1])
        for guess, card in blind.items():
            for metric, values in card.items():
                columns.setdefault(guess, {}).setdefault(metric, []).extend(values)
    return {guess: {metric: sum(v) / len(v) for metric, v in card.items()} for guess, card in columns.items()}


def _pixels(data: Dataset, count: int, device: torch.device) -> Tensor:
    return data.pixels(range(min(count, len(data)))).to(device)


def _tiles(sent: Sent, found: Reconstruction, data: Dataset) -> Tensor:
    """Return the guesses in the order of the pictures trained on, for showing: it is these that a gradient knows.
    Copies are left out as green tiles: a result file must not hold pictures of a dataset."""
    guess = to_pixels(found.inputs.to(sent.batch.inputs), data.mean, data.std).nan_to_num(nan=0.5)
    true, used = (to_pixels(batch.inputs, data.mean, data.std) for batch in (sent.batch, sent.trained_on))
    tiles = metrics.aligned(guess, metrics.pair(guess, used))
    copied = torch.minimum(metrics.mse(tiles, true), metrics.mse(tiles, used)) < COPY
    return torch.where(copied.view(-1, 1, 1, 1), tiles.new_tensor(GREEN)[: tiles.shape[1]].view(-1, 1, 1), tiles)


def _transforms(sent: Sequence[Sent]) -> bool:
    return any(not torch.equal(s.trained_on.inputs, s.batch.inputs) for s in sent)


def _distance(sent: Sent) -> float:
    """Return how far what was sent lies from the gradient, in gradient lengths."""
    size = tree.global_norm(sent.grads)
    return tree.global_norm(tree.sub(sent.seen.grads, sent.grads)) / size if size else 0.0
