"""One protector for each family of defenses. What the pruning defenses do to one user they do here to all."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from .. import select, tree
from ..core import Batch, Defense, State, Step
from ..defenses import (
    ATS,
    AlignedDualPrune,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Hardened,
    Identity,
    Soteria,
    TopK,
)
from ..errors import GradientError
from ..veil import derive_rng
from .flat import InPlace, Rows
from .hardened import Noisy
from .job import Job
from .protector import Feedback, Protector
from .soteria import HiddenColumns


class Open(Protector):
    """No defense."""

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        return self.rows.grads


class Transformed(Open):
    """ATS on the pictures of all users at once: other draws than a `Veil`'s on a GPU, of the same distribution."""

    def __init__(self, defense: ATS, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows)
        self._job = job

    def prepare(self, round_: int, batches: Sequence[Batch]) -> Sequence[Batch]:
        rng = derive_rng(self._job.settings.seed, "all", round_, "pictures", self._job.device.type)
        whole = Batch(torch.cat([b.inputs for b in batches]), torch.cat([b.labels for b in batches]))
        step = Step(rng, round_, self._job.model, whole, num_examples=len(whole.labels))
        inputs = self.defense.prepare_batch(whole, step).inputs.split([len(b.labels) for b in batches])
        return [Batch(part, batch.labels) for part, batch in zip(inputs, batches, strict=True)]


class Band(Feedback):
    """Dual pruning or Top-k, with or without error feedback."""

    def __init__(self, defense: Defense, operator: DualPrune | TopK, rows: Rows) -> None:
        super().__init__(defense, rows, feedback=isinstance(defense, ErrorFeedback))
        bands = [operator.band(n) for n in rows.layout.sizes] * rows.users
        held = None if self.held is None else rows.segments(self.held)
        self._mean = torch.zeros_like(rows.grads[0])
        self._prune = InPlace(rows.segments(rows.grads), bands, held, self._mean, rows.users)

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        self._prune()
        return self.rows.grads

    def average(self, round_: int, batches: Sequence[Batch], shares: Tensor | None) -> Tensor:
        if shares is not None or not self._prune.averages:
            return super().average(round_, batches, shares)
        self._prune.average()
        return self._mean

    def require_finite(self) -> None:
        self._prune.require_finite()


class Aligned(Feedback):
    """ADGP: positions from one user's gradient, values from everybody's."""

    def __init__(self, defense: Defense, operator: AlignedDualPrune, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows, feedback=isinstance(defense, ErrorFeedback))
        sizes, every = rows.layout.sizes, rows.users
        self._job = job
        self._sent = rows.scratch()
        self._proposal = torch.zeros_like(rows.grads[0])
        self._propose = InPlace(rows.layout.segments(self._proposal), [(0, operator.mask_count(n)) for n in sizes])
        tops = [(0, select.band(n, operator.top, 0.0)[0]) for n in sizes]
        kept = [(0, select.band(n, 0.0, 1.0 - operator.keep)[1]) for n in sizes]
        self._top = InPlace(rows.segments(self._sent), tops * every)
        self._keep = InPlace(rows.segments(self._sent), kept * every)

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        total = self.rows.grads
        if self.held is not None:
            total.add_(self.held)
        self._proposal.copy_(_visible(total[self._job.proposer(round_)]))
        self._propose()
        common = self._proposal != 0
        self.mask = self.rows.layout.views(common)
        self._sent.copy_(_visible(total))
        self._top()
        # Inside the mask and not among the user's own largest; zeros elsewhere are never sent.
        self._sent.copy_(torch.where(common & (self._sent == 0), total, 0.0))
        self._keep()
        if self.held is not None:
            torch.sub(total, self._sent, out=self.held)
        return self._sent

    def require_finite(self) -> None:
        self._top.require_finite()


class White(Protector):
    """Gaussian noise for all users at once: other numbers than a `Veil` draws on a GPU, of the same distribution."""

    def __init__(self, defense: GaussianNoise, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows)
        self._job, self._std = job, defense.std
        self._drawn = rows.scratch()

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        rng = derive_rng(self._job.settings.seed, "all", round_, "noise", self._job.device.type)
        return self.rows.grads.add_(self._drawn.normal_(generator=rng), alpha=self._std)


class Each(Protector):
    """Any other defense, user by user, exactly as a `Veil` would apply it."""

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


def protector_for(defense: Defense, rows: Rows, job: Job) -> Protector:
    """Return the fastest protector that does what `defense` does."""
    # Exact types: a subclass may do more than its parent.
    operator = defense.inner if type(defense) is ErrorFeedback else defense
    if type(operator) is Identity:
        return Open(defense, rows)
    if type(operator) is TopK or (type(operator) is DualPrune and operator.excess == "hold"):
        return Band(defense, operator, rows)
    if type(operator) is AlignedDualPrune:
        return Aligned(defense, operator, rows, job)
    if type(defense) is GaussianNoise and not defense.sent_only and rows.grads.is_cuda:
        return White(defense, rows, job)
    if type(defense) is ATS and rows.grads.is_cuda:
        return Transformed(defense, rows, job)
    if type(defense) is Soteria and defense.probes and rows.grads.is_cuda:
        return HiddenColumns(defense, rows, job)
    if type(defense) is Hardened:
        return Noisy(defense, rows, job)
    return Each(defense, rows, job)


def _visible(values: Tensor) -> Tensor:
    """Return the values with zeros made just visible, so that a selected zero can be told from a removed entry."""
    return torch.where(values == 0, torch.finfo(values.dtype).tiny, values)
