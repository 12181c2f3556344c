"""Measurements of the fast engine on a sample round: one user's bytes, norms and seconds."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import wire
from ..core import Batch, Payload, Tensors
from .compute import Compute
from .guards import Guard
from .traffic import Traffic, entries_sent, paper_bytes


class Probe:
    """Watches one round; users take turns."""

    def __init__(self, compute: Compute, guard: Guard, turn: int, sends_statistics: bool) -> None:
        self._compute, self._guard = compute, guard
        self._users = compute.rows.users
        self._user = turn % self._users
        self._sends_statistics = sends_statistics
        raw = compute.rows.grads[self._user]
        self._raw_norm = float(torch.linalg.vector_norm(raw))
        self._raw_nonzero = int(torch.count_nonzero(raw))
        self._seconds = 0.0

    def timed_step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        """Let the guard do its step and note how long it took."""
        started = self._now()
        sent = self._guard.step(round_, batches)
        self._seconds = self._now() - started
        return sent

    def measure(self, sent: Tensor, mean: Tensor) -> dict[str, Any]:
        """Return the fields of a `Round` that this user's upload and the common download settle."""
        layout, row = self._compute.layout, sent[self._user]
        mask = None if self._guard.mask is None else {name: m.cpu() for name, m in self._guard.mask.items()}
        upload = _on_cpu(layout.views(row))
        started = time.perf_counter()
        payload = Payload(wire.encode(upload, within=mask), num_examples=len(sent))
        encoding = time.perf_counter() - started
        buffers = self._compute.buffer_layout.views(self._compute.statistics[self._user])
        traffic = Traffic(
            payloads=[payload],
            mean=_on_cpu(layout.views(mean)),
            mask=mask,
            statistics=_on_cpu(buffers) if self._sends_statistics else {},
            model={},
            participants=self._users,
        )
        up, down = traffic.per_user()
        nonzero = int(torch.count_nonzero(row))
        room = None if mask is None else sum(int(m.sum()) for m in mask.values())
        counted = entries_sent(self._raw_nonzero, nonzero, layout.total)
        paper_up, paper_down = paper_bytes(counted, layout.total, room)
        return {
            "bytes_up": up,
            "bytes_down": down,
            "paper_up": paper_up,
            "paper_down": paper_down,
            "users_measured": 1,
            "density": nonzero / layout.total,
            "defense_seconds": self._seconds / self._users,
            "encode_seconds": encoding,
            **self._norms(row),
        }

    def _norms(self, row: Tensor) -> dict[str, float]:
        held = self._guard.residual(self._user)
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


def _on_cpu(tensors: Tensors) -> Tensors:
    return {name: t.to("cpu", memory_format=torch.contiguous_format) for name, t in tensors.items()}
