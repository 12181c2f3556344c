"""The hardened release for all users at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import tree
from ...core import Batch, State
from ...defenses import Hardened
from ...defenses.hardened import FASTEST_FALL, extent, has_peaks, peak, rms
from ...select import gpu
from ...veil import derive_rng
from ..flat import Rows
from ..job import Job
from .base import Feedback


class Noisy(Feedback):
    """What `Hardened` does, for users with batches of any size: who has mixed too few examples waits."""

    def __init__(self, defense: Hardened, rows: Rows, job: Job) -> None:
        super().__init__(defense, rows, feedback=True)
        assert self.held is not None
        self._defense, self._job = defense, job
        self._noise = defense.strength(sum(rows.layout.sizes))
        # Of each user and tensor: the least that its next noise is measured by, and the size of what waits.
        self._least, self._waiting = torch.zeros(
            2, rows.users, len(rows.layout.sizes), device=rows.grads.device
        ).unbind()
        self._peaked = [i for i, shape in enumerate(rows.layout.shapes.values()) if has_peaks(shape)]
        self._mixed = [0] * rows.users  # examples since the last upload
        self._kernels: dict[tuple[int, ...], Any] = {}  # by who sends

    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        senders = self._mix()
        if not senders:
            return self.rows.grads
        rng = derive_rng(self._job.settings.seed, "all", round_, "noise", self._job.device.type)
        where = slice(None) if len(senders) == self.rows.users else torch.tensor(senders, device=self._least.device)
        waiting = self._waiting[where]
        least = torch.maximum(self._least[where], waiting + self._peaks(senders))
        if self.rows.grads.is_cuda and gpu.AVAILABLE:
            sizes = self._kernel(senders).run(rng.initial_seed(), least.flatten(), waiting.flatten())
        else:
            sizes = self._release(senders, rng, least.flatten(), waiting.flatten())
        self._least[where] = FASTEST_FALL * sizes.view_as(least)
        self._waiting[where] = 0.0
        return self.rows.grads

    def states(self) -> list[State]:
        names = list(self.rows.layout.shapes)
        found = []
        for user, state in enumerate(super().states()):
            own = {"size": self._least[user], "waiting": self._waiting[user]}
            sizes = [tree.under(part, dict(zip(names, row.split(1), strict=True))) for part, row in own.items()]
            begin = self._defense.init(tree.only("residual", state))
            mixed = torch.full_like(begin["mixed"], self._mixed[user])
            found.append({**begin, **state, **sizes[0], **sizes[1], "mixed": mixed})
        return found

    def load(self, states: Sequence[State]) -> None:
        super().load(states)
        self._mixed = [int(state["mixed"]) for state in states]
        for part, rows in {"size": self._least, "waiting": self._waiting}.items():
            for row, state in zip(rows, states, strict=True):
                row.copy_(torch.cat([tree.only(part, state)[name] for name in self.rows.layout.shapes]))

    def _mix(self) -> list[int]:
        """Let users wait who have mixed too few examples, and return the others."""
        assert self.held is not None
        senders = []
        for user, count in enumerate(self._job.examples):
            self._mixed[user] += count
            if self._mixed[user] >= self._defense.examples:
                self._mixed[user] = 0
                senders.append(user)
                continue
            row = self.rows.grads[user]
            # Sizes add up: the extent of a sum of gradients cannot exceed the sum of theirs.
            self._waiting[user] += torch.cat([extent(part[None]) for part in self.rows.layout.views(row).values()])
            self.held[user].add_(row)
            row.zero_()
        return senders

    def _peaks(self, senders: Sequence[int]) -> Tensor:
        """Return `[senders, tensors]` what the noise is measured by at least because of the largest row of a tensor."""
        found = self._least.new_zeros(len(senders), self._least.shape[1])
        if self._peaked:
            for row, user in zip(found, senders, strict=True):
                tensors = list(self.rows.layout.views(self.rows.grads[user]).values())
                for i in self._peaked:
                    row[i] = peak(tensors[i][None])[0]
        return found

    def _segments(self, senders: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
        assert self.held is not None
        split = self.rows.layout.segments
        grads, held = ([p for user in senders for p in split(rows[user])] for rows in (self.rows.grads, self.held))
        return grads, held

    def _kernel(self, senders: Sequence[int]) -> Any:
        from .release import Release  # importing it needs Triton

        if tuple(senders) not in self._kernels:
            self._kernels[tuple(senders)] = Release(self._defense, self._noise, *self._segments(senders))
        return self._kernels[tuple(senders)]

    def _release(self, senders: Sequence[int], rng: torch.Generator, least: Tensor, waiting: Tensor) -> Tensor:
        sizes = torch.zeros_like(least)
        for i, (grads, held) in enumerate(zip(*self._segments(senders), strict=True)):
            normal = torch.randn(1, grads.numel(), generator=rng, device=grads.device)
            sizes[i] = torch.maximum(rms(grads[None])[0] + waiting[i], least[i])
            sent, rest = self._defense.release(grads[None], held[None], normal, self._noise, sizes[i : i + 1])
            grads.copy_(sent[0])
            held.copy_(rest[0])
        return sizes
