"""Protectors that remember nothing: no defense, changed pictures, noise."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core import Batch, Step
from ...defenses import ATS, GaussianNoise
from ...veil import derive_rng
from ..flat import Rows
from ..job import Job
from .base import Protector


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


class White(Protector):
    """Gaussian noise for all users at once: other numbers than a `Veil` draws on a GPU, of the same distribution."""

    def __init__(self, defense: GaussianNoise, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows)
        self._job, self._std = job, defense.std
        self._drawn = rows.scratch()

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        rng = derive_rng(self._job.settings.seed, "all", round_, "noise", self._job.device.type)
        return self.rows.grads.add_(self._drawn.normal_(generator=rng), alpha=self._std)
