"""Exact selection on a GPU: a radix search over all tensors at once, in eleven launches whatever their number.

The bits of a magnitude are settled in four passes of 8. Each pass counts, per tensor, how many entries have each
digit; a tiny kernel then finds the digits at which the band begins and ends. The last pass writes the result; where a
tie is cut in two, it counts equal magnitudes in index order, as the plain rule asks.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..errors import GradientError

AVAILABLE = importlib.util.find_spec("triton") is not None  # torch builds without Triton use the plain path

Bands = Sequence[tuple[int, int]]
CHUNK = 16384  # entries of one program
BLOCK = 2048  # entries in flight
WARPS = 8
BINS = 256
SHIFTS = (24, 16, 8, 0)


@dataclass(frozen=True)
class Plan:
    """Where each program works, and the ranks of each tensor's band; the same in every round."""

    chunks: Tensor  # [programs, 2]: segment, first index
    sizes: Tensor  # [segments]
    first_chunk: Tensor  # [segments]
    ranks: Tensor  # [segments, 2]: entries above the band, entries above its end


@lru_cache(maxsize=8)
def plan_for(sizes: tuple[int, ...], bands: tuple[tuple[int, int], ...], device: torch.device) -> Plan:
    """Return the plan of these tensors; kept, because it holds for every round."""
    counts = [-(-n // CHUNK) for n in sizes]
    per_segment = torch.tensor(counts)
    segment = torch.repeat_interleave(torch.arange(len(sizes)), per_segment)
    first = per_segment.cumsum(0) - per_segment
    start = (torch.arange(len(segment)) - first[segment]) * CHUNK
    ranks = torch.tensor([(top, top + kept) for top, kept in bands], dtype=torch.int32)
    return Plan(
        torch.stack([segment, start], 1).to(device),
        torch.tensor(sizes).to(device),
        first.to(device),
        ranks.to(device),
    )


class Selector:
    """Selection on fixed buffers: no allocation, no synchronisation, so a CUDA graph can hold it.

    Gradients and residuals are lists of float32 tensors on one GPU whose addresses do not change. `run` overwrites
    the gradients with what is sent and the residuals with what is held back, and clears `finite` if a sum was not
    finite (the buffers are then of no use; the caller must stop).
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        residuals: Sequence[Tensor] | None,
        sent: Sequence[Tensor],
        held: Sequence[Tensor],
        bands: Bands,
    ) -> None:
        device = values[0].device
        self._keep = (list(values), list(residuals or ()), list(sent), list(held))
        self._feedback = residuals is not None
        self._plan = plan_for(tuple(v.numel() for v in values), tuple(bands), device)
        rows = (values, residuals or values, sent, held)
        self._pointers = torch.tensor([[t.data_ptr() for t in row] for row in rows], device=device)
        self._segments = s = len(values)
        programs = len(self._plan.chunks)
        # One buffer, cleared by one launch: the counts of each pass, then the ties.
        lengths = [2 * s * BINS] * len(SHIFTS) + [2 * programs]
        self._scratch = torch.empty(sum(lengths), dtype=torch.int32, device=device)
        *self._counts, self._ties = torch.split(self._scratch, lengths)
        self._prefixes, self._wanted, self._equal = torch.zeros(3, 2 * s, dtype=torch.int32, device=device)
        self.finite = torch.ones((), dtype=torch.int32, device=device)

    def run(self) -> None:
        """Launch the kernels."""
        from . import kernels

        plan, s = self._plan, self._segments
        programs = (len(plan.chunks),)
        if not programs[0]:
            return
        where = (plan.chunks, plan.sizes, self._pointers, s)
        fixed: dict[str, Any] = {"FEEDBACK": self._feedback, "CHUNK": CHUNK, "BLOCK": BLOCK, "num_warps": WARPS}
        found = (self._prefixes, self._wanted, self._equal)
        self._scratch.zero_()
        for counts, shift in zip(self._counts, SHIFTS, strict=True):
            first = shift == SHIFTS[0]
            if first:
                kernels.count_exponents[programs](*where, counts, BINS=BINS, **fixed)
            else:
                kernels.count_digits[programs](*where, self._prefixes, counts, SHIFT=shift, BINS=BINS, **fixed)
            kernels.pick[(s, 2)](counts, plan.ranks, *found, self.finite, FIRST=first, BINS=BINS)
        kernels.count_ties[programs](*where, *found, self._ties, **fixed)
        kernels.write[programs](*where, *found, self._ties, plan.first_chunk, **fixed)

    def require_finite(self) -> None:
        """Wait for the GPU and raise `GradientError` if any run so far met NaN or infinity."""
        if not int(self.finite):
            raise GradientError("a gradient, or its sum with the residual, holds NaN or infinity: nothing was sent")


def _outputs(values: Sequence[Tensor]) -> list[Tensor]:
    """Return uninitialised tensors of the same shapes inside one allocation."""
    sizes = [v.numel() for v in values]
    flat = torch.empty(sum(sizes), dtype=torch.float32, device=values[0].device)
    return [part.view(v.shape) for part, v in zip(torch.split(flat, sizes), values, strict=True)]


def prune(values: Sequence[Tensor], bands: Bands) -> list[Tensor]:
    """Return each tensor with everything outside its band set to zero."""
    values = [v.detach().contiguous() for v in values]
    sent = _outputs(values)
    selector = Selector(values, None, sent, sent, bands)
    selector.run()
    selector.require_finite()
    return sent


def prune_with_feedback(
    values: Sequence[Tensor], residuals: Sequence[Tensor], bands: Bands
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (sent, next residual) of value + residual."""
    values, residuals = ([t.detach().contiguous() for t in tensors] for tensors in (values, residuals))
    sent, held = _outputs(values), _outputs(values)
    selector = Selector(values, residuals, sent, held, bands)
    selector.run()
    selector.require_finite()
    return sent, held
