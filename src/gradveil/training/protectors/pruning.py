"""The pruning defenses, as one selection over the tensors of all users."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import select
from ...core import Batch, Defense
from ...defenses import AlignedDualPrune, DualPrune, ErrorFeedback, TopK
from ..flat import InPlace, Rows
from ..job import Job
from .base import Feedback


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


def _visible(values: Tensor) -> Tensor:
    """Return the values with zeros made just visible, so that a selected zero can be told from a removed entry."""
    return torch.where(values == 0, torch.finfo(values.dtype).tiny, values)
