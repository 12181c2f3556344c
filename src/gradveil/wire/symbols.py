"""Symbols and integers, entropy coded.

Symbols (0 to 255) go through a range asymmetric numeral system coder with a static table. An integer is a symbol, its
bin, and plain low bits that say where in the bin it lies. Flags, gaps, magnitudes and levels are all written so.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import streams
from .frame import Bytes, Reader, Words, varint

MAX_PRECISION = 14  # bits of a probability: fine enough for one rare byte in 16,384, and the table stays in L1
MIN_PRECISION = 8
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Bins:
    """Where each bin begins and how many plain bits follow its symbol."""

    base: NDArray[np.uint64]  # [256]
    width: Bytes  # [256]


def even_bins(width: int) -> Bins:
    """Return bins of 2^width integers each.

    >>> even_bins(4).base[:3]
    array([ 0, 16, 32], dtype=uint64)
    """
    return Bins(np.arange(256, dtype=np.uint64) << np.uint64(width), np.full(256, width, np.uint8))


def _growing_bins() -> Bins:
    symbols = np.arange(256, dtype=np.uint64)
    width = np.where(symbols < 4, 0, np.minimum(symbols // 4, 30) - 1)
    base = np.where(symbols < 4, symbols, (4 + symbols % 4) << width.astype(np.uint64))
    return Bins(base.astype(np.uint64), width.astype(np.uint8))


GROWING = _growing_bins()  # four bins an octave: 0, 1, 2, 3, 4, 5, 6, 7, 8-9, 10-11, 12-13, 14-15, 16-19, ...
GROWING_ALPHABET = 124  # bins that reach 2^32


def growing_symbols(integers: Words) -> Bytes:
    """Return the bin of each integer among `GROWING`.

    >>> growing_symbols(np.array([0, 3, 4, 9, 10], np.uint32))
    array([0, 3, 4, 8, 9], dtype=uint8)
    """
    return (np.searchsorted(GROWING.base[:GROWING_ALPHABET], integers, side="right") - 1).astype(np.uint8)


def entropy_bits(counts: Counts) -> float:
    """Return the bits that symbols with these counts need at least, each on its own.

    >>> entropy_bits(np.array([2, 2]))
    4.0
    """
    return float(streams.survey(counts)[0])


def estimate_bytes(counts: Counts) -> float:
    """Return about how long `write_symbols` is for symbols with these counts."""
    bits, first, last = streams.survey(counts)
    return float(bits / 8 + 1.2 * (last - first + 1) + streams.STATES + 6) if last > first else 2.0


def write_symbols(symbols: Bytes, counts: Counts) -> bytes:
    """Return the section of `symbols`, whose histogram is `counts`."""
    _, first, last = streams.survey(counts)
    if first >= last:
        return bytes((0, max(last, 0)))
    precision = min(max(symbols.size.bit_length(), MIN_PRECISION), MAX_PRECISION)
    frequency = _normalise(counts, precision)
    used = frequency[first : last + 1]
    stream = write_stream(symbols, frequency)
    head = bytes((precision, first, last))
    return b"".join((head, write_varints(used), varint(len(stream)), stream))


def read_symbols(reader: Reader, count: int, alphabet: int = 256) -> Bytes:
    """Read `count` symbols, all below `alphabet`."""
    precision = reader.byte(limit=MAX_PRECISION)
    first = reader.byte(limit=alphabet - 1)
    if precision == 0:
        return np.full(count, first, np.uint8)
    last = reader.byte(limit=alphabet - 1)
    if last < first:
        reader.refuse("has a table that ends before it begins")
    frequency = np.zeros(256, np.uint32)
    frequency[first : last + 1] = read_varints(reader, last - first + 1)
    if int(frequency.sum(dtype=np.uint64)) != 1 << precision:
        reader.refuse("has a table that does not add up")
    return read_stream(reader, reader.varint(2 * count + streams.STATES), count, frequency)


def write_stream(symbols: Bytes, frequency: Words) -> bytes:
    """Return `symbols` coded with these frequencies, which add up to a power of two."""
    room = np.empty(2 * symbols.size + streams.STATES, np.uint8)
    begin = streams.rans_encode(symbols, frequency, _starts(frequency), _precision(frequency), room)
    return room[begin:].tobytes()


def read_stream(reader: Reader, size: int, count: int, frequency: Words) -> Bytes:
    """Undo `write_stream`: `count` symbols from `size` bytes."""
    stream = reader.take(size)
    lookup = np.repeat(np.arange(256, dtype=np.uint8), frequency)
    out = np.empty(count, np.uint8)
    whole = size >= streams.STATES
    if not whole or not streams.rans_decode(stream, frequency, _starts(frequency), lookup, _precision(frequency), out):
        reader.refuse("has a damaged stream of symbols")
    return out


def write_integers(integers: Words, symbols: Bytes, bins: Bins) -> bytes:
    """Return the plain bits that say where in their bins the integers lie."""
    room = np.empty(integers.size * (int(bins.width.max()) + 7) // 8 + 8, np.uint8)
    return room[: streams.pack(integers, symbols, bins.base, bins.width, room)].tobytes()


def read_integers(reader: Reader, symbols: Bytes, bins: Bins) -> Words:
    """Undo `write_integers`."""
    out = np.empty(symbols.size, np.uint32)
    taken = streams.unpack(reader.rest(), symbols, bins.base, bins.width, out)
    if taken < 0:
        reader.refuse("is cut short or has bits set where none belong")
    reader.take(taken)
    return out


def write_varints(values: Words) -> bytes:
    """Return the values as varints, one after the other."""
    room = np.empty(5 * values.size, np.uint8)
    return room[: streams.write_varints(values, room)].tobytes()


def read_varints(reader: Reader, count: int) -> Words:
    """Undo `write_varints`."""
    out = np.empty(count, np.uint32)
    taken = streams.read_varints(reader.rest(), out)
    if taken < 0:
        reader.refuse("is cut short or declares a number beyond 32 bits")
    reader.take(taken)
    return out


def _precision(frequency: Words) -> int:
    return int(frequency.sum()).bit_length() - 1


def _starts(frequency: Words) -> Words:
    return (np.cumsum(frequency, dtype=np.uint64) - frequency).astype(np.uint32)


def _normalise(counts: Counts, precision: int) -> Words:
    """Return frequencies that add up to 2^precision, none of a symbol that occurs being zero."""
    total = 1 << precision
    frequency = np.maximum(np.rint(counts * (total / counts.sum())), counts > 0).astype(np.int64)
    while (excess := int(frequency.sum()) - total) != 0:
        largest = int(frequency.argmax())
        frequency[largest] -= min(excess, max(int(frequency[largest]) // 16, 1))
    out: Words = frequency.astype(np.uint32)
    return out
