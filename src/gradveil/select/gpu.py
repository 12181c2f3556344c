"""Exact selection on a GPU over all tensors at once, in seventeen launches whatever their number.

A sorted sample of each tensor brackets the two magnitudes at which its band begins and ends. One pass over everything
adds the residual, counts what lies above each bracket and gathers the few entries inside; a radix search over those
settles the boundary. Where a bracket missed, which costs time but never exactness, the radix search goes over the whole
tensor. Where a boundary cuts through equal entries, they are counted block by block, since equal ones rank by their
index; gradients computed in bfloat16 have many. The last pass writes the result.
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
BLOCK = 2048  # entries of one program, at most 63 for each of its threads
WARPS = 4
SAMPLE = 1024  # entries a bracket is guessed from
SIGMAS = 3.0  # standard deviations of the sample's rank on either side: one miss in 400
ROOM = 8  # candidates may fill one in so many entries; rarely needed passes take so many blocks together
DIGIT = 8  # bits of a radix pass
PASSES = 4  # 31 bits, should a guess have missed


@dataclass(frozen=True)
class Plan:
    """Where each program works, and the ranks of each tensor's band; the same in every round."""

    blocks: Tensor  # [programs, 6]: segment, entries, and four times how many bytes into the segment it begins
    groups: Tensor  # [programs, 4]: segment, first block, block after the last, number in the segment
    sizes: Tensor  # [segments]
    first_block: Tensor  # [segments]
    ranks: Tensor  # [segments, 2]: entries above the band, entries above its end
    regions: Tensor  # [segments, 2, 2]: where the candidates of a boundary begin, and how many fit
    room: int  # for all candidates


@lru_cache(maxsize=8)
def plan_for(sizes: tuple[int, ...], bands: tuple[tuple[int, int], ...], device: torch.device) -> Plan:
    """Return the plan of these tensors; kept, because it holds for every round."""
    per_segment = torch.tensor([-(-n // BLOCK) for n in sizes])
    segment = torch.repeat_interleave(torch.arange(len(sizes)), per_segment)
    first = per_segment.cumsum(0) - per_segment
    start = (torch.arange(len(segment)) - first[segment]) * BLOCK
    ranks = torch.tensor([(top, top + kept) for top, kept in bands], dtype=torch.int32)
    room = torch.tensor([0 if n <= SAMPLE else n // ROOM for n in sizes]).repeat_interleave(2)
    entries = (torch.tensor(sizes)[segment] - start).clamp_max(BLOCK)
    per_segment_groups = -(-per_segment // ROOM)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), per_segment_groups)
    number = torch.arange(len(owner)) - (per_segment_groups.cumsum(0) - per_segment_groups)[owner]
    begin = first[owner] + ROOM * number
    stop = torch.minimum(begin + ROOM, (first + per_segment)[owner])
    return Plan(
        torch.stack([segment, entries, *[4 * start] * 4], 1).to(device),
        torch.stack([owner, begin, stop, number], 1).to(device),
        torch.tensor(sizes).to(device),
        first.to(device),
        ranks.to(device),
        torch.stack([room.cumsum(0) - room, room], 1).to(device),
        int(room.sum()),
    )


class Selector:
    """Selection on fixed buffers: no allocation, no synchronisation, so a CUDA graph can hold it.

    Gradients and residuals are lists of float32 tensors on one GPU whose addresses do not change. `run` overwrites
    the gradients with what is sent and the residuals with what is held back, and clears `finite` if a sum was not
    finite (the buffers are then of no use; the caller must stop).

    With `mean`, the tensors are those of several clients, one after the other and laid out alike, and `run_mean` writes
    the average of what they send there, as one row, instead of what each sends.
    """

    def __init__(
        self,
        values: Sequence[Tensor],
        residuals: Sequence[Tensor] | None,
        sent: Sequence[Tensor],
        held: Sequence[Tensor],
        bands: Bands,
        mean: Tensor | None = None,
        clients: int = 1,
    ) -> None:
        device = values[0].device
        self._keep = (list(values), list(residuals or ()), list(sent), list(held))
        self._feedback = residuals is not None
        self._plan = plan_for(tuple(v.numel() for v in values), tuple(bands), device)
        rows = (values, residuals or values, sent, held)
        self._pointers = torch.tensor([[t.data_ptr() for t in row] for row in rows], device=device)
        self._segments = s = len(values)
        programs = len(self._plan.blocks)
        self._blocks = self._plan.blocks.clone()
        self._blocks[:, 2:] = self._pointers.T[self._plan.blocks[:, 0]] + self._plan.blocks[:, 2:]
        # A block that is full and begins at a multiple of 16 bytes is read and written four entries at a time.
        whole = (self._blocks[:, 1] == BLOCK) & (self._blocks[:, 2:] % 16 == 0).all(1)
        numbers = torch.arange(programs, device=device)
        self._parts = [(self._blocks[which], numbers[which], how) for which, how in ((whole, True), (~whole, False))]
        self._clients, self._mean = clients, mean
        if mean is not None:
            each = programs // clients
            self._targets = mean.data_ptr() + self._blocks[:each, 4] - sent[0].data_ptr()
            # One program serves a block of every client, so all of them must suit wide words.
            wide = whole.view(clients, each).all(0) & (self._targets % 16 == 0)
            self._first = [(numbers[:each][which], how) for which, how in ((wide, True), (~wide, False))]
        # One buffer, cleared by one launch: the counts of each pass, what lies above and inside the brackets, and ties.
        lengths = [(2 * s) << DIGIT] * PASSES + [4 * s, 2 * programs]
        self._scratch = torch.empty(sum(lengths), dtype=torch.int32, device=device)
        *self._counts, self._tallies, self._ties = torch.split(self._scratch, lengths)
        self._edges, self._before = (torch.empty(n, dtype=torch.int32, device=device) for n in (4 * s, 2 * programs))
        self._states, self._widths, *found = torch.zeros(5, 2 * s, dtype=torch.int32, device=device)
        self._found = found  # of each boundary: its magnitude, how many equals rank above it, and how many there are
        self._cuts = (*found, self._ties, self._before)
        self._each: dict[str, Any] = {"FEEDBACK": self._feedback, "BLOCK": BLOCK, "num_warps": WARPS}
        self._candidates = torch.empty(max(self._plan.room, 1), dtype=torch.int64, device=device)
        self.finite = torch.ones((), dtype=torch.int32, device=device)

    def run(self) -> None:
        """Launch the kernels."""
        if not len(self._blocks):
            return
        from . import kernels

        self._find()
        for part, numbers, whole in self._parts:
            if len(part):
                kernels.write[(len(part),)](part, numbers, *self._cuts, WHOLE=whole, **self._each)

    def run_mean(self) -> None:
        """Launch the kernels; of what is sent only the mean is written."""
        from . import kernels

        self._find()
        where = (self._targets, self._clients, len(self._targets))
        for numbers, whole in self._first:
            if len(numbers):
                kernels.write_mean[(len(numbers),)](
                    self._blocks, numbers, *where, *self._cuts, WHOLE=whole, **self._each
                )

    def _find(self) -> None:
        """Find the boundaries."""
        from . import kernels

        plan, blocks, found, s = self._plan, self._blocks, self._found, self._segments
        groups, boundaries, fed = (len(plan.groups),), (s, 2), self._each
        sample: dict[str, Any] = {"FEEDBACK": self._feedback, "SAMPLE": SAMPLE, "SIGMAS": SIGMAS, "num_warps": 8}
        inside = (plan.regions, self._candidates, self._tallies)
        bounds = (plan.ranks, self._edges, plan.regions, self._tallies, self._states, self._widths)
        self._scratch.zero_()
        kernels.guess[(s,)](plan.sizes, self._pointers, s, plan.ranks, self._edges, **sample)
        for part, numbers, whole in self._parts:
            if len(part):
                kernels.collect[(len(part),)](
                    part, numbers, self._edges, *inside, self.finite, WHOLE=whole, THREADS=32 * WARPS, **fed
                )
        kernels.settle[boundaries](*bounds, *found)
        for i, counts in enumerate(self._counts):
            digit: dict[str, Any] = {"DONE": i * DIGIT, "DIGIT": DIGIT}
            search = (plan.groups, *inside, self._states, self._widths, found[0], counts)
            kernels.count_digits[groups](blocks, *search, **digit, **fed)
            kernels.pick[boundaries](counts, self._widths, *found, **digit)
        kernels.count_ties[groups](blocks, plan.groups, *inside, self._states, *found, self._ties, **fed)
        kernels.add_ties[boundaries](plan.sizes, plan.first_block, *self._cuts, BLOCK=BLOCK, num_warps=WARPS)

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
