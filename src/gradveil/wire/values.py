"""The sent entries of a tensor: plain, as places in their band of magnitudes, or as a few levels.

Pruning both ends leaves magnitudes between a smallest and a largest one. Seen as integers, the bit patterns of positive
floats keep their order, so a magnitude is the band's lower end plus an offset of few bits. The top bits of the offset
are entropy coded, because small magnitudes are more frequent; the bits below, and the sign, are as good as random.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import passes, streams
from .frame import Bytes, Kind, Reader, Values, Words, varint
from .symbols import (
    Counts,
    estimate_bytes,
    even_bins,
    read_integers,
    read_symbols,
    read_varints,
    write_integers,
    write_symbols,
    write_varints,
)

Patterns = NDArray[np.unsignedinteger[Any]]
MAX_LEVELS = 256


@dataclass(frozen=True)
class _Plan:
    """One way to write the values, and about how many bytes it takes."""

    mode: Values
    head: bytes
    symbols: Bytes
    counts: Counts
    integers: Words
    width: int  # plain bits per entry, the sign included

    @cached_property
    def size(self) -> float:
        return len(self.head) + estimate_bytes(self.counts) + self.integers.size * self.width / 8

    def write(self) -> bytes:
        plain = write_integers(self.integers, self.symbols, even_bins(self.width))
        return b"".join((self.head, write_symbols(self.symbols, self.counts), plain))


def write_values(sent: Words, kind: Kind) -> tuple[Values, bytes]:
    """Return the smallest form of finite 16- or 32-bit patterns, none of them zero."""
    plans = [_plan_band(sent, kind), _plan_levels(sent, kind)]
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.size)
    section = best.write()
    if len(section) < sent.size * kind.size:
        return best.mode, section
    return Values.PLAIN, write_plain(sent, kind)


def write_plain(patterns: Patterns, kind: Kind) -> bytes:
    """Return the patterns as they are, little-endian."""
    return patterns.astype(f"<u{kind.size}").tobytes()


def read_values(mode: Values, reader: Reader, count: int, kind: Kind) -> Patterns:
    """Return `count` patterns, checked to be finite and not zero."""
    if mode is Values.PLAIN:
        return _read_plain(reader, count, kind)
    if kind.size > 4:
        reader.refuse("has a form that its type does not have")
    if mode is Values.BAND:
        return _read_band(reader, count, kind)
    return _read_levels(reader, count, kind)


def _plan_band(sent: Words, kind: Kind) -> _Plan:
    mask = np.uint32(kind.magnitude_mask)
    low, high, differ = (int(value) for value in passes.summarise(sent, mask))
    shift = (differ & -differ).bit_length() - 1 if differ else 0  # low bits that are the same everywhere
    width = ((high - low) >> shift).bit_length()
    integers = np.empty(sent.size, np.uint32)
    passes.band_integers(sent, mask, np.uint64(low), np.uint64(shift), integers)
    finest = min(width, 8)
    symbols = (integers >> np.uint32(width - finest) >> np.uint32(1)).astype(np.uint8)
    counts = streams.histogram(symbols)
    plans = []
    for coded in (*range(finest, 0, -2), 0):
        folded = np.zeros(256, np.int64)
        folded[: 1 << coded] = counts[: 1 << finest].reshape(1 << coded, -1).sum(1)
        head = varint(low) + bytes((shift, width, coded))
        plans.append(_Plan(Values.BAND, head, symbols, folded, integers, width - coded + 1))
    best = min(plans, key=lambda plan: plan.size)
    return replace(best, symbols=symbols >> np.uint8(best.width - plans[0].width))


def _read_band(reader: Reader, count: int, kind: Kind) -> Patterns:
    low = reader.varint(kind.infinity - 1)
    shift = reader.byte(limit=31)
    width = reader.byte(limit=31 - shift)
    coded = reader.byte(limit=min(width, 8))
    symbols = read_symbols(reader, count, 1 << coded)
    integers = read_integers(reader, symbols, even_bins(width - coded + 1))
    patterns = np.empty(count, np.uint32)
    sign_bit = np.uint64(8 * kind.size - 1)
    high = passes.band_patterns(integers, np.uint64(low), np.uint64(shift), sign_bit, patterns)
    if low == 0 or high >= kind.infinity:
        reader.refuse("holds NaN, infinity or a zero that was sent")
    return patterns.astype(kind.bits, copy=False)


def _plan_levels(sent: Words, kind: Kind) -> _Plan | None:
    levels = np.empty(MAX_LEVELS, np.uint32)
    numbers = np.empty(sent.size, np.uint32)
    found = passes.find_levels(sent, np.uint32(kind.magnitude_mask), levels, numbers)
    if found < 0:
        return None
    order = np.argsort(levels[:found])
    rank = np.empty(found, np.uint8)
    rank[order] = np.arange(found)
    symbols = rank[numbers >> 1]
    integers = symbols.astype(np.uint32) << 1 | numbers & 1
    head = bytes((found - 1,)) + write_varints(np.diff(levels[order], prepend=np.uint32(0)))
    return _Plan(Values.LEVELS, head, symbols, streams.histogram(symbols), integers, 1)


def _read_levels(reader: Reader, count: int, kind: Kind) -> Patterns:
    found = reader.byte() + 1
    steps = read_varints(reader, found)
    levels = np.cumsum(steps, dtype=np.uint64)
    if not steps.all() or levels[-1] >= kind.infinity:
        reader.refuse("has levels that do not rise or are not finite")
    symbols = read_symbols(reader, count, found)
    signs = read_integers(reader, symbols, even_bins(1)) & 1
    patterns = levels.astype(np.uint32)[symbols] | signs << np.uint32(8 * kind.size - 1)
    return patterns.astype(kind.bits, copy=False)


def _read_plain(reader: Reader, count: int, kind: Kind) -> Patterns:
    patterns: Patterns = np.frombuffer(reader.take(count * kind.size), f"<u{kind.size}").astype(kind.bits)
    magnitudes = patterns & kind.bits(kind.magnitude_mask)
    if not bool(magnitudes.all()) or bool((magnitudes >= kind.infinity).any()):
        reader.refuse("holds NaN, infinity or a zero that was sent")
    return patterns
