"""The hardened release of all users' tensors on a GPU in a few launches; the noise is drawn inside the kernel."""
# mypy: ignore-errors

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...defenses import Hardened
from ...select.gpu import BLOCK, WARPS, plan_for
from ...theory import HIGHEST, LOWEST, PER_OCTAVE

_PER_OCTAVE = tl.constexpr(float(PER_OCTAVE))
_FIRST, _LAST = tl.constexpr(float(PER_OCTAVE * LOWEST)), tl.constexpr(float(PER_OCTAVE * HIGHEST))


@triton.jit
def _locate(blocks, pointers, segments):
    pid = tl.program_id(0)
    segment = tl.load(blocks + 6 * pid)
    left = tl.load(blocks + 6 * pid + 1).to(tl.int32)
    start = tl.load(blocks + 6 * pid + 2)  # in bytes
    grads = (tl.load(pointers + segment) + start).to(tl.pointer_type(tl.float32))
    held = (tl.load(pointers + segments + segment) + start).to(tl.pointer_type(tl.float32))
    return segment, left, grads, held


@triton.jit
def _squares(blocks, pointers, segments, parts, widest, BLOCK: tl.constexpr):
    segment, left, grads, _ = _locate(blocks, pointers, segments)
    i = tl.arange(0, BLOCK)
    v = tl.load(grads + i, mask=i < left, other=0.0)
    number = tl.load(blocks + 6 * tl.program_id(0) + 2) // (4 * BLOCK)  # of this block in its segment
    tl.store(parts + segment * widest + number, tl.sum(v * v))  # not added up here: atomics have no order


@triton.jit
def _release(
    blocks,
    pointers,
    segments,
    sizes,
    seed,
    noise,
    levels,
    forget,
    LEVELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    segment, left, grads, held = _locate(blocks, pointers, segments)
    least = noise * tl.load(sizes + segment)
    exponent = tl.ceil(tl.log2(least) * _PER_OCTAVE)  # as `hardened.on_grid`
    exponent = tl.maximum(exponent, _FIRST, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.where(exponent > _LAST, float("inf"), tl.exp2(exponent / _PER_OCTAVE))
    scale = tl.where(least == 0, 0.0, scale)
    i = tl.arange(0, BLOCK)
    inside = i < left
    total = tl.load(grads + i, mask=inside, other=0.0) + tl.load(held + i, mask=inside, other=0.0)
    drawn = tl.randn(seed, tl.program_id(0) * BLOCK + i) * scale
    sent = tl.where(scale == 0, 0.0, total + drawn)
    if LEVELS > 0:
        size = tl.full([BLOCK], 0.0, tl.float32) + tl.load(levels) * scale
        for k in tl.static_range(1, LEVELS):
            low, high = tl.load(levels + k - 1) * scale, tl.load(levels + k) * scale
            size = tl.where(tl.abs(sent) > (low + high) / 2, high, size)
        sent = tl.where(sent < 0, -size, size)
    tl.store(grads + i, sent, mask=inside)
    tl.store(held + i, total - sent + drawn * forget, mask=inside)


class Release:
    """Overwrites gradients with what is sent and residuals with what is held back; addresses must not change."""

    def __init__(self, defense: Hardened, noise: float, grads: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        device = grads[0].device
        self._keep = (list(grads), list(held))
        self._noise, self._forget = noise, 1 - defense.memory
        self._plan = plan_for(tuple(g.numel() for g in grads), ((0, 0),) * len(grads), device)
        self._entries = self._plan.sizes.clamp_min(1)
        self._pointers = torch.tensor([[t.data_ptr() for t in row] for row in (grads, held)], device=device)
        self._levels = torch.tensor(defense.levels(noise), device=device)
        self._widest = max(-(-g.numel() // BLOCK) for g in grads)

    def run(self, seed: int, least: Tensor, waiting: Tensor) -> Tensor:
        """Launch the kernels; `seed` settles the noise. Return what the noise of each tensor was measured by.

        That is the RMS of its gradient and the size of what waited since the last upload, at `least` so much.
        """
        where = (self._plan.blocks, self._pointers, len(least))
        programs = (len(self._plan.blocks),)
        parts = least.new_zeros(len(least), self._widest)
        _squares[programs](*where, parts, self._widest, BLOCK=BLOCK, num_warps=WARPS)
        sizes = torch.maximum((parts.sum(1) / self._entries).sqrt_().add_(waiting), least)
        chosen = (seed % 2**31, self._noise, self._levels, self._forget)
        _release[programs](*where, sizes, *chosen, LEVELS=len(self._levels), BLOCK=BLOCK, num_warps=WARPS)
        return sizes
