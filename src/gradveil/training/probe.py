"""Measurements of the fast engine on a sample round: one user's bytes, norms and seconds."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import wire
from ..core import Batch, Payload, Tensors
from .compute import Compute
from .flat import Layout
from .protectors import Protector
from .traffic import Traffic, entries_sent, paper_bytes


class Probe:
    """Watches one round; users take turns."""

    def __init__(self, compute: Compute, protector: Protector, turn: int, sends_statistics: bool) -> None:
        self._compute, self._protector = compute, protector
        self._users = compute.rows.users
        self._user = turn % self._users
        self._sends_statistics = sends_statistics
        raw = compute.rows.grads[self._user]
        self._raw_norm = float(torch.linalg.vector_norm(raw))
        self._raw_nonzero = int(torch.count_nonzero(raw))
        self._seconds = 0.0

    def timed_step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        """Let the protector do its step and note how long it took."""
        started = self._now()
        sent = self._protector.step(round_, batches)
        self._seconds = self._now() - started
        return sent

    def measure(self, sent: Tensor, mean: Tensor) -> Callable[[], dict[str, Any]]:
        """Copy what is needed to the CPU; return what works out the fields of a `Round` from it, in any thread."""
        compute, row = self._compute, sent[self._user]
        mask = None if self._protector.mask is None else {name: m.cpu() for name, m in self._protector.mask.items()}
        norms, seconds, total = self._norms(row), self._seconds / self._users, compute.layout.total
        nonzero = int(torch.count_nonzero(row))
        counted = entries_sent(self._raw_nonzero, nonzero, total)
        upload, download = _tensors(compute.layout, row), _tensors(compute.layout, mean)
        buffers = _tensors(compute.buffer_layout, compute.statistics[self._user]) if self._sends_statistics else {}

        def finish() -> dict[str, Any]:
            started = time.perf_counter()
            payload = Payload(wire.encode(upload, within=mask), num_examples=1)
            encoding = time.perf_counter() - started
            up, down = Traffic([payload], download, mask, buffers, {}, participants=self._users).per_user()
            room = None if mask is None else sum(int(m.sum()) for m in mask.values())
            paper_up, paper_down = paper_bytes(counted, total, room)
            return {
                "bytes_up": up,
                "bytes_down": down,
                "paper_up": paper_up,
                "paper_down": paper_down,
                "users_measured": 1,
                "density": nonzero / total,
                "defense_seconds": seconds,
                "encode_seconds": encoding,
                **norms,
            }

        return finish

    def _norms(self, row: Tensor) -> dict[str, float]:
        held = self._protector.residual(self._user)
        if held is None:
            return {"residual_ratio": 0.0, "gamma": 0.0}
        residual = float(torch.linalg.vector_norm(held))
        total = float(torch.linalg.vector_norm(held + row))
        return {
            "residual_ratio": residual / self._raw_norm if self._raw_norm else 0.0,
            "gamma": min((residual / total) ** 2, 1.0) if total else 0.0,
        }

    def _now(self) -> float:
        if self._compute.weights.is_cuda:
            torch.cuda.synchronize(self._compute.weights.device)
        return time.perf_counter()


def _tensors(layout: Layout, row: Tensor) -> Tensors:
    return {name: view.contiguous() for name, view in layout.views(row.to("cpu", copy=True)).items()}
