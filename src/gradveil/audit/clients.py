"""The client's side of an audit: what a real client would have sent, through the same code and the same bytes."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .. import tree
from ..core import Attack, Batch, Grads, Masks, Observation, ThreatModel
from ..gate import observe
from ..gradients import gradient, parameters
from ..guard import Guard, fingerprint
from ..training.job import own_randomness
from ..veil import Veil, derive_rng
from .plan import Plan, Subject
from .report import Column, ColumnInfo
from .verdict import BASELINE

PRIOR = 512  # public pictures an attacker with a prior is given


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


def column_info(column: Column, plan: Plan, subject: Subject) -> ColumnInfo:
    """Return the setting of a column as the report tells it."""
    diagnostic = column == "diagnostic"
    size = 1 if diagnostic else plan.batch_size
    count = plan.pictures if diagnostic else -(-plan.pictures // size) * size
    rounds = subject.run_round if subject.run_round is not None else 0 if diagnostic else plan.round
    grants = {name: bool(value) for name, value in vars(threat(column, subject)).items()}
    return ColumnInfo(column, "eval" if diagnostic else "train", size, rounds, list(range(count)), grants)


def uploads(plan: Plan, subject: Subject, column: ColumnInfo, name: str, attack: Attack | None = None) -> list[Sent]:
    """Return what the clients send under a defense, one upload for each group of pictures.

    Every upload comes from a client of its own with other private pictures in its residual. The model stays as it is
    while the residual ages, so that all defenses are attacked on the same weights; audit a checkpoint to see a
    residual that grew while the model learnt. An active `attack` plants its model first.
    """
    model = _model(plan, subject, column, name, attack)
    groups = torch.tensor(column.pictures).split(column.batch_size)
    return [
        _Client((plan, subject, column), name, model, i).upload(subject.victims.batch(group, subject.device))
        for i, group in enumerate(groups)
    ]


def _model(plan: Plan, subject: Subject, column: ColumnInfo, name: str, attack: Attack | None) -> nn.Module:
    """Return the model the server sends out, in the mode the client uses it; a guarded client may refuse it."""
    with own_randomness(plan.seed, subject.device):
        model = subject.defenses[name].prepare_model(copy.deepcopy(subject.model)).to(subject.device)
        if attack is not None and "active" in attack.needs:
            honest = fingerprint(model)
            rng = derive_rng(plan.seed, "server", 0, "plant")
            model = attack.plant(model, subject.victims.input_shape, rng).to(subject.device)
            # The bare client is the control that shows what the attack can do: it has no guard either.
            if plan.guard and name != BASELINE:
                Guard(pinned=honest).admit(model, input_shape=subject.victims.input_shape)
    return model.train(column.mode == "train")


class _Client:
    """One client up to the upload that is attacked."""

    def __init__(self, audit: tuple[Plan, Subject, ColumnInfo], name: str, model: nn.Module, index: int) -> None:
        self.plan, self.subject, self.column = plan, subject, column = audit
        self.model, self.index = model, index
        self.defense = subject.defenses[name]
        self.earlier: list[Observation] = []
        client = f"{column.name} {index}"
        # Planted models are refused above, if at all: here the attack itself is studied.
        self.veil = Veil(self.defense, parameters(model), seed=plan.seed, client=client, guard=None)
        state = subject.residuals.get(name)
        if state is not None:
            self.veil.load_state_dict(state)
        elif subject.run_round is None:
            self._age()

    def upload(self, batch: Batch) -> Sent:
        """Compute, protect and send one batch; the model and its statistics stay as the server sent them."""
        held = self.veil.residual
        own = copy.deepcopy(self.model)
        seed = derive_rng(self.plan.seed, str(self.index), self.veil.round, "layers").initial_seed()
        with own_randomness(seed, self.subject.device):
            trained_on = self.veil.prepare(own, batch)
            grads = gradient(copy.deepcopy(own), self.subject.loss_fn, trained_on)
        mask = self._common_mask() if "mask" in self.defense.needs else None
        with own_randomness(seed, self.subject.device):
            payload = self.veil.protect(own, self.subject.loss_fn, batch, mask=mask)
        data = self.subject.victims
        seen = observe(
            payload,
            self.model,
            self.subject.loss_fn,
            batch,
            threat(self.column.name, self.subject),
            num_classes=data.num_classes,
            mean=data.mean,
            std=data.std,
            defense=self.defense,
            prior=self.subject.public.pixels(range(min(len(self.subject.public), PRIOR))),
            mask=mask,
            earlier=self.earlier,
        )
        return Sent(
            seen=seen,
            batch=batch,
            trained_on=trained_on,
            grads=grads,
            nbytes=payload.nbytes,
            seconds=sum(self.veil.seconds),
            residual=None if held is None else tree.global_norm(held),
        )

    def _age(self) -> None:
        # Every observation holds a model: keep them only for an attacker who asks for them.
        wanted = any("rounds" in attack.needs for attack in self.subject.attacks.values())
        for round_ in range(self.column.rounds):
            sent = self.upload(self._private_batch(f"{self.index} {round_}"))
            self.earlier += [sent.seen] if wanted else []

    def _private_batch(self, who: str) -> Batch:
        rng = derive_rng(self.plan.seed, who, 0, "private")
        chosen: Tensor = torch.randint(len(self.subject.private), (self.column.batch_size,), generator=rng)
        return self.subject.private.batch(chosen, self.subject.device)

    def _common_mask(self) -> Masks:
        """Return the mask of an aligned round, proposed by another client from a batch of its own."""
        other = Veil(self.defense, parameters(self.model), seed=self.plan.seed, client="proposer")
        batch = self._private_batch(f"proposer {self.index} {self.veil.round}")
        grads = gradient(copy.deepcopy(self.model), self.subject.loss_fn, batch)
        return other.propose(grads)
