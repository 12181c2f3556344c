"""Exact selection on a CPU in three passes over the data, without sorting.

The bits of a non-negative float, read as an integer, grow with its value. So a histogram of the upper half of the bits
finds the two bins in which the band begins and ends, a histogram of the lower half of the entries in those bins finds
the two exact magnitudes, and one last pass writes the result. Error feedback is added in the first pass and taken off
in the last. Each tensor is one job of a thread pool; the kernels release the interpreter lock, and unlike numba's own
parallel loops they may be called from any thread and after a fork.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..jit import compiled

Floats = NDArray[np.float32]

_HIGH_BINS = 1 << 15  # sign bit dropped, upper 15 of 31 bits
_LOW_BINS = 1 << 16
_NOT_FINITE = 0x7F80  # upper bits of infinity and NaN begin here
_MAGNITUDE = np.uint32(0x7FFFFFFF)


@compiled
def _boundary(counts: Any, rank: int) -> tuple[int, int]:
    """Return (bin, how many of its entries rank above the boundary) for the boundary below the `rank` largest."""
    above = 0
    for b in range(counts.size - 1, -1, -1):
        if above + counts[b] >= rank:
            return b, rank - above
        above += counts[b]
    return 0, counts[0]


@compiled
def _count_high(keys: Any, counts: Any) -> None:
    # Two tables in turn: neighbours of equal magnitude would otherwise wait for each other's store.
    half = counts.size // 2
    for i in range(0, keys.size - 1, 2):
        counts[(keys[i] & _MAGNITUDE) >> 16] += 1
        counts[half + ((keys[i + 1] & _MAGNITUDE) >> 16)] += 1
    if keys.size % 2:
        counts[(keys[keys.size - 1] & _MAGNITUDE) >> 16] += 1
    for b in range(half):
        counts[b] += counts[half + b]


@compiled
def _threshold(keys: Any, high: int, low: Any, rank_in_bin: int) -> tuple[int, int]:
    """Return (exact magnitude key, last index at which an equal magnitude still ranks above the boundary)."""
    low_bin, wanted = _boundary(low, rank_in_bin)
    key = (high << 16) | low_bin
    if wanted == 0:
        return key, -1
    if wanted == low[low_bin]:
        return key, keys.size
    for i in range(keys.size):
        if (keys[i] & _MAGNITUDE) == key:
            wanted -= 1
            if wanted == 0:
                return key, i
    return key, keys.size


@compiled
def _bounds(keys: Any, top: int, kept: int) -> tuple[int, int, int, int, bool]:
    """Return the exact upper and lower ends of the band as (key, last index above) twice, and whether all is finite."""
    counts = np.zeros(2 * _HIGH_BINS, np.int64)
    _count_high(keys, counts)
    for b in range(_NOT_FINITE, _HIGH_BINS):
        if counts[b]:
            return 0, 0, 0, 0, False
    high_top, rank_top = _boundary(counts[:_NOT_FINITE], top)
    high_end, rank_end = _boundary(counts[:_NOT_FINITE], top + kept)
    low_top, low_end = np.zeros(_LOW_BINS, np.int32), np.zeros(_LOW_BINS, np.int32)
    for i in range(keys.size):
        key = keys[i] & _MAGNITUDE
        high = key >> 16
        if high == high_top:
            low_top[key & 0xFFFF] += 1
        if high == high_end:
            low_end[key & 0xFFFF] += 1
    key_top, last_top = _threshold(keys, high_top, low_top, rank_top)
    key_end, last_end = _threshold(keys, high_end, low_end, rank_end)
    return key_top, last_top, key_end, last_end, True


@compiled
def _limits(bounds: Any, n: int) -> tuple[np.float32, np.float32, bool]:
    """Return (smallest magnitude sent, smallest magnitude above the band, whether that decides every tie)."""
    key_top, last_top, key_end, last_end, _ = bounds
    edges = np.empty(2, np.uint32)
    edges[0] = key_end if last_end == n else key_end + 1
    edges[1] = key_top if last_top == n else key_top + 1
    limits = edges.view(np.float32)
    return limits[0], limits[1], (last_top == n or last_top == -1) and (last_end == n or last_end == -1)


@compiled
def _cut_ties(keys: Any, bounds: Any, i: int) -> bool:
    key_top, last_top, key_end, last_end, _ = bounds
    key = keys[i] & _MAGNITUDE
    above_top = key > key_top or (key == key_top and i <= last_top)
    return (key > key_end or (key == key_end and i <= last_end)) and not above_top


@compiled
def _prune(values: Any, keys: Any, top: int, kept: int, sent: Any) -> bool:
    bounds = _bounds(keys, top, kept)
    if not bounds[4]:
        return False
    first, stop, simple = _limits(bounds, values.size)
    if simple:
        for i in range(values.size):
            size = abs(values[i])
            sent[i] = values[i] if (size >= first) & (size < stop) else np.float32(0)
    else:
        for i in range(values.size):
            sent[i] = values[i] if _cut_ties(keys, bounds, i) else np.float32(0)
    return True


@compiled
def _prune_with_feedback(values: Any, residual: Any, top: int, kept: int, sent: Any, held: Any, keys: Any) -> bool:
    """Like `_prune` of values + residual; `keys` are the bits of `held`, which receives what is not sent."""
    for i in range(values.size):
        held[i] = values[i] + residual[i]
    bounds = _bounds(keys, top, kept)
    if not bounds[4]:
        return False
    first, stop, simple = _limits(bounds, values.size)
    for i in range(values.size):
        total = held[i]
        size = abs(total)
        keep = (size >= first) & (size < stop) if simple else _cut_ties(keys, bounds, i)
        sent[i] = total if keep else np.float32(0)
        held[i] = np.float32(0) if keep else total
    return True


_POOLS: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not survive a fork


def _in_parallel(jobs: Sequence[tuple[int, Callable[[], bool]]]) -> list[bool]:
    """Run jobs (cost, function), dearest first, on as many threads as there are cores."""
    if sum(cost for cost, _ in jobs) < 1 << 17 or len(jobs) == 1:
        return [job() for _, job in jobs]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pool = _POOLS.setdefault(os.getpid(), ThreadPoolExecutor(cores, thread_name_prefix="gradveil-select"))
    order = sorted(range(len(jobs)), key=lambda i: -jobs[i][0])
    results = dict(zip(order, pool.map(lambda i: jobs[i][1](), order), strict=True))
    return [results[i] for i in range(len(jobs))]


def prune(values: Sequence[Floats], bands: Sequence[tuple[int, int]]) -> tuple[list[Floats], list[bool]]:
    """Return (sent, is finite) of flat float32 arrays; an array that is not finite leaves its output undefined."""
    sent = [np.empty_like(v) for v in values]
    jobs = [
        (v.size, lambda v=v, b=b, s=s: bool(_prune(v, v.view(np.uint32), b[0], b[1], s)))
        for v, b, s in zip(values, bands, sent, strict=True)
    ]
    return sent, _in_parallel(jobs)


def prune_with_feedback(
    values: Sequence[Floats], residuals: Sequence[Floats], bands: Sequence[tuple[int, int]]
) -> tuple[list[Floats], list[Floats], list[bool]]:
    """Return (sent, next residual, is finite) of value + residual, flat float32 arrays each."""
    sent = [np.empty_like(v) for v in values]
    held = [np.empty_like(v) for v in values]
    jobs = [
        (
            v.size,
            lambda v=v, r=r, b=b, s=s, h=h: bool(_prune_with_feedback(v, r, b[0], b[1], s, h, h.view(np.uint32))),
        )
        for v, r, b, s, h in zip(values, residuals, bands, sent, held, strict=True)
    ]
    return sent, held, _in_parallel(jobs)
