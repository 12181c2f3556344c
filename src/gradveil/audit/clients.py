"""The client's side of an audit: what a real client would have sent, through the same code and the same bytes."""

import copy
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .. import tree
from ..capture import full_precision
from ..core import Attack, Batch, Grads, Masks, Observation, Payload, Tensors, ThreatModel
from ..errors import NeedError
from ..gate import observe
from ..gradients import gradient, parameters, per_example_gradient
from ..guard import Guard, fingerprint
from ..shares import gradient_and_shares
from ..training.job import own_randomness
from ..veil import Veil, derive_rng
from ..wire import SizeReport, size_report
from ..wire.frame import read_frame
from .plan import Plan, Subject, is_active
from .report import Column, ColumnInfo

PRIOR = 512  # public pictures an attacker with a prior is given, where there is no generator
LONGEST_WAIT = 256  # uploads without content after which a defense counts as never sending
_COMPUTING = Lock()  # layers draw from the process's generator, so one client at a time has it


@dataclass(frozen=True, eq=False)
class Sent:
    """One attacked upload: what the server sees, and beside it what only the audit knows."""

    seen: Observation
    batch: Batch  # the private pictures
    trained_on: Batch  # the same after the defense changed them, if it does
    grads: Grads  # the gradient before the defense
    nbytes: int
    seconds: float
    residual: float | None  # norm of what the client held back before this upload
    waited: int  # uploads without content that went before it, until enough was mixed
    size: SizeReport | None = None  # where the bytes go


class _Work(NamedTuple):
    """What a client computed from one batch."""

    model: nn.Module  # the client's copy
    batch: Batch  # as the defense changed it
    grads: Grads
    shown: Grads  # what the defense takes: the gradient, or one per example
    largest: Tensors | None = None  # shares of the largest example, for a defense that weighs them


def threat(column: Column, subject: Subject) -> ThreatModel:
    """Return what the attacker is granted: everything a server has, and what an attack named by the user needs."""
    needs = {need for attack in subject.attacks.values() for need in attack.needs}
    return ThreatModel(
        labels=column == "diagnostic",
        defense=True,
        statistics=True,
        prior="prior" in needs,
        active="active" in needs,
        rounds=True,
    )


def name_of(column: Column, index: int) -> str:
    """Return the name of a client, from which its chance is derived."""
    return f"{column} {index}"


def column_info(column: Column, plan: Plan, subject: Subject) -> ColumnInfo:
    """Return the setting of a column as the report tells it."""
    diagnostic = column == "diagnostic"
    size = 1 if diagnostic else plan.batch_size
    count = plan.pictures if diagnostic else -(-plan.pictures // size) * size
    rounds = subject.run_round if subject.run_round is not None else 0 if diagnostic else plan.round
    grants = {name: bool(value) for name, value in vars(threat(column, subject)).items()}
    return ColumnInfo(column, "eval" if diagnostic else "train", size, rounds, list(range(count)), grants)


def uploads(
    plan: Plan,
    subject: Subject,
    column: ColumnInfo,
    name: str,
    attack: Attack | None = None,
    *,
    guarded: bool = False,
) -> list[Sent]:
    """Return what the clients send under a defense, one upload for each group of pictures.

    Every upload comes from a client of its own with other private pictures in its residual. The model stays as it is
    while the residual ages, so that all defenses are attacked on the same weights; audit a checkpoint to see a
    residual that grew while the model learnt. An active `attack` plants its model first; `guarded` clients look at
    it and raise `GuardError` if they refuse it. On a GPU they compute in full precision, the worst case: the rounding
    of TF32 is noise that stops R-GAP, and would pass for the defense's merit.
    """
    model = _model(plan, subject, column, name, attack, guarded)
    groups = torch.tensor(column.pictures).split(column.batch_size)

    def send(index: int) -> Sent:
        batch = subject.victims.batch(groups[index], subject.device)
        return _Client((plan, subject, column), name, model, index).upload(batch)

    at_once = _at_once(subject.device)
    with full_precision():
        if at_once == 1:
            return [send(index) for index in range(len(groups))]
        with ThreadPoolExecutor(at_once) as threads:
            return list(threads.map(send, range(len(groups))))


def _at_once(device: torch.device) -> int:
    """Return how many clients work at a time: while a GPU computes for one, CPU cores encode for others."""
    return min(8, os.cpu_count() or 1) if device.type == "cuda" else 1


def _model(
    plan: Plan, subject: Subject, column: ColumnInfo, name: str, attack: Attack | None, guarded: bool
) -> nn.Module:
    """Return the model the server sends out, in the mode the client uses it."""
    with own_randomness(plan.seed, subject.device):
        model = subject.defenses[name].prepare_model(copy.deepcopy(subject.model)).to(subject.device)
        if attack is not None and is_active(attack):
            honest = fingerprint(model)
            rng = derive_rng(plan.seed, "server", 0, "plant")
            model = attack.plant(model, subject.victims.input_shape, rng).to(subject.device)
            if guarded:
                Guard(pinned=honest).admit(model, input_shape=subject.victims.input_shape)
    return model.train(column.mode == "train")


class _Client:
    """One client up to the upload that is attacked."""

    def __init__(self, audit: tuple[Plan, Subject, ColumnInfo], name: str, model: nn.Module, index: int) -> None:
        self.plan, self.subject, self.column = plan, subject, column = audit
        self.model, self.index = model, index
        self.defense = subject.defenses[name]
        self.earlier: list[Observation] = []
        self.last: tuple[Payload, Batch, Masks | None] | None = None
        # Planted models are refused above, if at all: here the attack itself is studied.
        self.veil = Veil(
            self.defense, parameters(model), seed=plan.seed, client=name_of(column.name, index), guard=None
        )
        state = subject.residuals.get(name)
        if state is not None:
            self.veil.load_state_dict(state)
        else:
            # Another defense than that of the run has no residual in the checkpoint: it ages on the trained model.
            aged = column.rounds if subject.run_round is None else plan.round * (column.name == "realistic")
            for round_ in range(aged):
                self._pass_by(f"{index} {round_}")

    def upload(self, batch: Batch) -> Sent:
        """Return the first upload that carries `batch` and is not empty; the model stays as the server sent it.

        A defense may hold gradients back until enough are mixed. Attacking an empty upload would flatter it, so other
        private batches go first until this one completes a mix.
        """
        for waited in range(LONGEST_WAIT):
            held = self.veil.residual
            probe = copy.copy(self.veil)
            work = self._compute(probe, batch)
            payload, mask = self._seal(probe, work)
            if any(entry.sent for entry in read_frame(payload.body).entries):
                if self.last is not None and not self.earlier:  # which entries begin afresh, any attacker may look up
                    self.earlier.append(self._observe(*self.last))
                seen = self._observe(payload, batch, mask)
                return Sent(
                    seen=seen,
                    batch=batch,
                    trained_on=work.batch,
                    grads=work.grads,
                    nbytes=payload.nbytes,
                    seconds=sum(probe.seconds),
                    residual=None if held is None else tree.global_norm(held),
                    waited=waited,
                    size=size_report(seen.grads, payload.body, within=mask),
                )
            self._pass_by(f"{self.index} waiting {waited}")
        raise NeedError(f"{self.defense.key()} sent nothing in {LONGEST_WAIT} uploads: there is nothing to attack")

    def _pass_by(self, who: str) -> None:
        """Send another private batch."""
        batch = self._private_batch(who)
        payload, mask = self._seal(self.veil, self._compute(self.veil, batch))
        # Every observation holds a model: all are kept only for an attacker who follows the client from round to round.
        if any("rounds" in attack.needs for attack in self.subject.attacks.values()):
            self.earlier.append(self._observe(payload, batch, mask))
        self.last = payload, batch, mask

    def _compute(self, veil: Veil, batch: Batch) -> _Work:
        model = copy.deepcopy(self.model)
        with self._randomness(veil.round, "layers"):
            batch = veil.prepare(model, batch)
            if "per_example" in self.defense.needs:
                each = per_example_gradient(model, self.subject.loss_fn, batch)
                return _Work(model, batch, tree.tmap(lambda g: g.mean(0), each), each)
            if self.defense.weighs_examples:
                grads, largest = gradient_and_shares(model, self.subject.loss_fn, batch)
                return _Work(model, batch, grads, grads, largest)
            grads = gradient(model, self.subject.loss_fn, batch)
        return _Work(model, batch, grads, grads)

    def _seal(self, veil: Veil, work: _Work) -> tuple[Payload, Masks | None]:
        mask = self._common_mask(veil.round) if "mask" in self.defense.needs else None
        count = len(work.batch.labels)
        runs_model = "model" in self.defense.needs
        with self._randomness(veil.round, "defense") if runs_model else nullcontext():
            sealed = veil.seal(work.shown, count, model=work.model, batch=work.batch, mask=mask, largest=work.largest)
        return sealed, mask

    def _observe(self, payload: Payload, batch: Batch, mask: Masks | None) -> Observation:
        public, data = self.subject.public, self.subject.victims
        return observe(
            payload,
            self.model,
            self.subject.loss_fn,
            batch,
            threat(self.column.name, self.subject),
            num_classes=data.num_classes,
            mean=data.mean,
            std=data.std,
            defense=self.defense,
            prior=self.subject.prior or public.pixels(range(min(len(public), PRIOR))),
            mask=mask,
            earlier=self.earlier,
        )

    def _private_batch(self, who: str) -> Batch:
        rng = derive_rng(self.plan.seed, who, 0, "private")
        chosen: Tensor = torch.randint(len(self.subject.private), (self.column.batch_size,), generator=rng)
        return self.subject.private.batch(chosen, self.subject.device)

    def _common_mask(self, round_: int) -> Masks:
        """Return the mask of an aligned round, proposed by another client from a batch of its own."""
        other = Veil(self.defense, parameters(self.model), seed=self.plan.seed, client="proposer")
        batch = self._private_batch(f"proposer {self.index} {round_}")
        with self._randomness(round_, "proposer"):
            grads = gradient(copy.deepcopy(self.model), self.subject.loss_fn, batch)
        return other.propose(grads)

    @contextmanager
    def _randomness(self, round_: int, purpose: str) -> Iterator[None]:
        """Give the layers their own randomness, which depends on nothing but client, round and purpose."""
        seed = derive_rng(self.plan.seed, str(self.index), round_, purpose).initial_seed()
        with _COMPUTING, own_randomness(seed, self.subject.device):
            yield
