"""Soteria with estimated scores for all users at once: user by user it would take a GPU ten times as long."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import select
from ...capture import captured
from ...core import Batch
from ...defenses import Soteria
from ...defenses.soteria import classifier_of, estimated_scores
from ...veil import derive_rng
from ..flat import Rows
from ..job import Job
from .base import Protector


class HiddenColumns(Protector):
    """Zero the same share of every user's classifier columns; other directions than a `Veil`'s, as many.

    On a GPU the users are parallel branches of one CUDA graph.
    """

    def __init__(self, defense: Soteria, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows)
        self._job, self._share, self._probes = job, defense.prune, defense.probes
        self._inputs: list[Tensor] = []  # what the graph reads

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        if not self._inputs:
            self._begin([b.inputs for b in batches])
        torch._foreach_copy_(self._inputs, [b.inputs for b in batches])
        rng = derive_rng(self._job.settings.seed, "all", round_, "probes", self._job.device.type)
        for direction in self._directions:
            direction.normal_(generator=rng)
        self._launch()
        kept = select.band(self._scores.shape[1], 0.0, self._share)[1]
        # Stable: equal scores rank by their place, as in every selection here.
        best = self._scores.sort(dim=1, descending=True, stable=True).indices[:, :kept]
        self._columns.mul_(torch.zeros_like(self._scores).scatter_(1, best, 1.0)[:, None])
        return self.rows.grads

    def _begin(self, inputs: Sequence[Tensor]) -> None:
        """Find the classifier, and make room for batches of this size."""
        layout, rows = self.rows.layout, self.rows.grads
        weight, self._layer = classifier_of(self._job.model, tuple(inputs[0].shape[1:]), layout.shapes)
        parts = dict(zip(layout.shapes, torch.split(rows[:, : layout.total], layout.sizes, dim=1), strict=True))
        self._columns = parts[weight].unflatten(1, layout.shapes[weight])  # [users, classes, features]
        self._scores = rows.new_zeros(len(rows), self._columns.shape[2])
        self._inputs = [one.clone() for one in inputs]
        self._directions = [one.new_zeros(self._probes, *one.shape) for one in inputs]
        self._lanes = [torch.cuda.Stream(rows.device) for _ in inputs] if rows.is_cuda else []
        self._launch = captured(self._all_users, [self._scores]) if rows.is_cuda else self._one_by_one

    def _score(self, user: int) -> None:
        # TF32 will do: an estimate from a few directions is off by far more.
        exact = torch.backends.cudnn.deterministic
        with torch.backends.cudnn.flags(enabled=True, benchmark=not exact, deterministic=exact, allow_tf32=True):
            found = estimated_scores(self._job.model, self._layer, self._inputs[user], self._directions[user])
        self._scores[user].copy_(found)

    def _one_by_one(self) -> None:
        for user in range(self.rows.users):
            self._score(user)

    def _all_users(self) -> None:
        main = torch.cuda.current_stream()
        for user, lane in enumerate(self._lanes):
            lane.wait_stream(main)
            with torch.cuda.stream(lane):
                self._score(user)
        for lane in self._lanes:
            main.wait_stream(lane)
