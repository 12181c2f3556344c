"""Which entries of a tensor are sent: flags or gaps, plain or coded, whichever is the smallest."""

import numpy as np

from . import streams
from .frame import SPARSEST_FLAGS, Bytes, Positions, Reader, Words
from .symbols import (
    GROWING,
    GROWING_ALPHABET,
    estimate_bytes,
    even_bins,
    growing_symbols,
    read_integers,
    read_stream,
    read_symbols,
    write_integers,
    write_stream,
    write_symbols,
)

EVEN_PRECISION = 14
GAPS_BELOW = 8  # gaps are tried where less than one entry in 8 is sent; above, a plain bitmap is already smaller


def write_positions(flags: Bytes, n: int, count: int) -> tuple[Positions, bytes]:
    """Return the smallest form of `count` positions among `n`, given as one flag bit per entry."""
    if count == 0:
        return Positions.NONE, b""
    if count == n:
        return Positions.ALL, b""
    if count * GAPS_BELOW < n:
        indices = np.flatnonzero(np.unpackbits(flags, bitorder="little"))
        gaps = (np.diff(indices, prepend=-1) - 1).astype(np.uint32)
        mode, section = min(_plain_gaps(gaps), _coded_gaps(gaps), key=lambda form: len(form[1]))
    else:
        mode, section = Positions.BITMAP, flags.tobytes()
    if count * SPARSEST_FLAGS < n:
        return mode, section
    return min((mode, section), _coded_flags(flags, n, count), key=lambda form: len(form[1]))


def read_flags(mode: Positions, reader: Reader, n: int, count: int) -> Bytes:
    """Return the flags of a section that holds flags, checked to be `count` among `n`."""
    size = -(-n // 8)
    if mode is Positions.BITMAP:
        flags = reader.take(size)
    elif count * SPARSEST_FLAGS < n:
        reader.refuse(f"codes flags for {count} of {n} entries, which are too few")
    elif mode is Positions.CODED_BYTES:
        flags = read_symbols(reader, size)
    elif mode is Positions.CODED_NIBBLES:
        flags = _join(read_symbols(reader, 2 * size, alphabet=16))
    else:
        flags = _join(read_stream(reader, reader.rest().size, 2 * size, _even_frequency(n, count)))
    if n % 8 and flags[-1] >> n % 8:
        reader.refuse("points beyond the end of the tensor")
    if int(np.bitwise_count(flags).sum(dtype=np.int64)) != count:
        reader.refuse(f"does not hold the declared {count} positions")
    return flags


def read_indices(mode: Positions, reader: Reader, n: int, count: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions of a section that holds gaps, checked to lie below `n`."""
    if mode is Positions.INDEX:
        gaps = read_integers(reader, np.zeros(count, np.uint8), even_bins(reader.byte(limit=32)))
    else:
        gaps = read_integers(reader, read_symbols(reader, count, GROWING_ALPHABET), GROWING)
    indices = np.cumsum(gaps, dtype=np.int64) + np.arange(count)
    if indices[-1] >= n:
        reader.refuse("points beyond the end of the tensor")
    return indices


def _plain_gaps(gaps: Words) -> tuple[Positions, bytes]:
    width = int(gaps.max()).bit_length()
    symbols = np.zeros(gaps.size, np.uint8)
    return Positions.INDEX, bytes((width,)) + write_integers(gaps, symbols, even_bins(width))


def _coded_gaps(gaps: Words) -> tuple[Positions, bytes]:
    symbols = growing_symbols(gaps)
    coded = write_symbols(symbols, streams.histogram(symbols))
    return Positions.CODED_GAPS, coded + write_integers(gaps, symbols, GROWING)


def _coded_flags(flags: Bytes, n: int, count: int) -> tuple[Positions, bytes]:
    """Return the smallest of the coded forms of flags.

    Bytes profit from sent entries that sit together, nibbles need a table a tenth of the size, and even nibbles none
    at all: small tensors and random positions are theirs.
    """
    of_bytes = streams.histogram(flags)
    square = of_bytes.reshape(16, 16)
    of_nibbles = np.zeros(256, np.int64)
    of_nibbles[:16] = square.sum(0) + square.sum(1)
    even = _even_frequency(n, count)
    even_size = of_nibbles[:16] @ (EVEN_PRECISION - np.log2(even[:16])) / 8 + streams.STATES
    sizes = {
        Positions.CODED_BYTES: estimate_bytes(of_bytes),
        Positions.CODED_NIBBLES: estimate_bytes(of_nibbles),
        Positions.EVEN_NIBBLES: float(even_size),
    }
    mode = min(sizes, key=sizes.__getitem__)
    if mode is Positions.CODED_BYTES:
        return mode, write_symbols(flags, of_bytes)
    if mode is Positions.CODED_NIBBLES:
        return mode, write_symbols(_split(flags), of_nibbles)
    return mode, write_stream(_split(flags), even)


def _even_frequency(n: int, count: int) -> Words:
    """Return the table of four flags that are each set with probability count / n, in whole numbers throughout."""
    share = min(max((count << 16) // n, 1), (1 << 16) - 1)
    chance = [share**ones * ((1 << 16) - share) ** (4 - ones) for ones in range(5)]  # of 2^64
    frequency = np.zeros(256, np.uint32)
    frequency[:16] = [max(chance[nibble.bit_count()] >> (64 - EVEN_PRECISION), 1) for nibble in range(16)]
    likeliest = 0 if 2 * count < n else 15
    frequency[likeliest] = int(frequency[likeliest]) + (1 << EVEN_PRECISION) - int(frequency.sum())
    return frequency


def _split(flags: Bytes) -> Bytes:
    """Return the nibbles of each byte, the low one first."""
    out = np.empty(2 * flags.size, np.uint8)
    out[0::2] = flags & 15
    out[1::2] = flags >> 4
    return out


def _join(nibbles: Bytes) -> Bytes:
    return nibbles[0::2] | nibbles[1::2] << np.uint8(4)
