"""Any defense, user by user: for those that no other protector knows."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from ... import tree
from ...core import Batch, Defense, State, Step
from ...errors import GradientError
from ...veil import derive_rng
from ..flat import Rows
from ..job import Job
from .base import Protector


class Each(Protector):
    """A defense applied to every user exactly as a `Veil` would."""

    def __init__(self, defense: Defense, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows)
        self._job = job
        self._views = [rows.layout.views(row) for row in rows.grads]
        self._states = [defense.init(views) for views in self._views]
        self._finite = torch.ones((), dtype=torch.bool, device=rows.grads.device)
        changes_batches = type(defense).prepare_batch is not Defense.prepare_batch
        # What changes pictures on the CPU, one by one, lets other threads run.
        self._threads = ThreadPoolExecutor(min(rows.users, os.cpu_count() or 1)) if changes_batches else None

    def prepare(self, round_: int, batches: Sequence[Batch]) -> Sequence[Batch]:
        if self._threads is None:
            return batches
        steps = [self._step_of(user, round_, batch) for user, batch in enumerate(batches)]
        return list(self._threads.map(self.defense.prepare_batch, batches, steps))

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        steps = [self._step_of(user, round_, batch) for user, batch in enumerate(batches)]
        if "mask" in self.defense.needs:
            chosen = self._job.proposer(round_)
            self.mask = self.defense.propose(self._views[chosen], self._states[chosen], steps[chosen])
        for user, (views, step) in enumerate(zip(self._views, steps, strict=True)):
            masked = replace(step, mask=self.mask)
            sent, self._states[user] = self.defense.apply(views, self._states[user], masked)
            if not self._finite.is_cuda:
                tree.require_finite(sent)
            for name, view in views.items():
                if sent[name] is not view:
                    view.copy_(sent[name])
        if self._finite.is_cuda:  # looked at later: each look waits for the GPU
            self._finite &= torch.isfinite(self.rows.grads).all()
        return self.rows.grads

    def require_finite(self) -> None:
        if not bool(self._finite):
            raise GradientError("what was to be sent holds NaN or infinity")

    def _step_of(self, user: int, round_: int, batch: Batch) -> Step:
        rng = derive_rng(self._job.settings.seed, str(user), round_, device=self._job.device.type)
        return Step(rng, round_, self._job.model, batch, num_examples=len(batch.labels))

    def states(self) -> list[State]:
        return self._states

    def load(self, states: Sequence[State]) -> None:
        for user, state in enumerate(states):
            self._states[user] = {name: state[name].to(t.device) for name, t in self._states[user].items()}

    def residual(self, user: int) -> Tensor | None:
        held = self.defense.residual(self._states[user])
        if held is None:
            return None
        row = torch.zeros_like(self.rows.grads[0])
        self.rows.layout.write(row, held)
        return row
