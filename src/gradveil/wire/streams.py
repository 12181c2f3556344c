"""Compiled loops over streams of symbols and bits.

Whatever the bytes say, every index is inside its array: symbols index tables of 256, slots are masked to the size of
their table, reads are compared with the end of the stream, and outputs are sized by the caller.
"""
# mypy: allow-untyped-defs

import numpy as np

from ..jit import compiled

LOWEST = 1 << 16  # a coder state lies in [LOWEST, 2^32); it starts and must end at LOWEST
STATES = 8  # bytes of the two final coder states at the head of a stream


@compiled
def histogram(symbols):
    """Return how often each of 256 symbols occurs."""
    even = np.zeros(256, np.int64)
    odd = np.zeros(256, np.int64)  # two tables: equal neighbours need not wait for each other
    for i in range(0, symbols.size - 1, 2):
        even[symbols[i]] += 1
        odd[symbols[i + 1]] += 1
    if symbols.size & 1:
        even[symbols[symbols.size - 1]] += 1
    return even + odd


@compiled
def survey(counts):
    """Return the entropy in bits of symbols with these counts, and the first and last symbol that occurs."""
    total, first, last = 0, counts.size, -1
    for i in range(counts.size):
        total += counts[i]
        if counts[i] > 0:
            first, last = min(first, i), i
    bits = 0.0
    for i in range(counts.size):
        if counts[i] > 0:
            bits += counts[i] * np.log2(total / counts[i])
    return bits, first, last


@compiled
def rans_encode(symbols, frequency, start, precision, out):
    """Write the stream of `symbols` to the end of `out`, back to front; return where it begins.

    `out` holds at least 2 bytes per symbol and 8 for the states: a symbol puts out one 16-bit word at most.
    """
    sixteen, precision = np.uint64(16), np.uint64(precision)
    room = np.uint64(32) - precision
    states = np.full(2, LOWEST, np.uint64)
    position = out.size
    for i in range(symbols.size - 1, -1, -1):
        symbol = symbols[i]
        f = np.uint64(frequency[symbol])
        state = states[i & 1]
        if state >= f << room:
            position -= 2
            out[position] = np.uint8(state & np.uint64(255))
            out[position + 1] = np.uint8((state >> np.uint64(8)) & np.uint64(255))
            state >>= sixteen
        quotient = np.uint64(np.uint32(state) // np.uint32(f))
        states[i & 1] = (quotient << precision) + (state - quotient * f) + np.uint64(start[symbol])
    for lane in range(1, -1, -1):
        position -= 4
        for byte in range(4):
            out[position + byte] = np.uint8((states[lane] >> np.uint64(8 * byte)) & np.uint64(255))
    return position


@compiled
def rans_decode(stream, frequency, start, lookup, precision, out):
    """Read `out.size` symbols; return whether the stream was read to its very end and ends as it must.

    `stream` holds at least the 8 bytes of the states, `lookup` 2^precision symbols.
    """
    precision, sixteen, lowest = np.uint64(precision), np.uint64(16), np.uint64(LOWEST)
    slots = np.uint64(lookup.size - 1)
    states = np.zeros(2, np.uint64)
    for i in range(8):
        states[i >> 2] |= np.uint64(stream[i]) << np.uint64(8 * (i & 3))
    position = 8
    for i in range(out.size):
        state = states[i & 1]
        slot = state & slots
        symbol = lookup[slot]
        out[i] = symbol
        state = np.uint64(frequency[symbol]) * (state >> precision) + slot - np.uint64(start[symbol])
        if state < lowest:
            if position + 2 > stream.size:
                return False
            state = (state << sixteen) | np.uint64(stream[position]) | (np.uint64(stream[position + 1]) << np.uint64(8))
            position += 2
        states[i & 1] = state
    return position == stream.size and states[0] == lowest and states[1] == lowest


@compiled
def pack(integers, symbols, base, width, out):
    """Write the low `width[symbol]` bits of integer - base[symbol], least significant bit first; return the bytes.

    `out` holds all bits and 8 bytes more, since whole words are written.
    """
    pending, held, position = np.uint64(0), np.uint64(0), 0
    for i in range(integers.size):
        symbol = symbols[i]
        pending |= (np.uint64(integers[i]) - np.uint64(base[symbol])) << held
        held += np.uint64(width[symbol])
        if held >= np.uint64(32):
            for byte in range(4):
                out[position + byte] = np.uint8((pending >> np.uint64(8 * byte)) & np.uint64(255))
            pending >>= np.uint64(32)
            held -= np.uint64(32)
            position += 4
    while held > np.uint64(0):
        out[position] = np.uint8(pending & np.uint64(255))
        pending >>= np.uint64(8)
        held -= min(held, np.uint64(8))
        position += 1
    return position


@compiled
def unpack(data, symbols, base, width, out):
    """Undo `pack`; return the bytes read, or -1 where `data` ends early or the unused last bits are not zero."""
    pending, held, position = np.uint64(0), np.uint64(0), 0
    for i in range(out.size):
        symbol = symbols[i]
        needed = np.uint64(width[symbol])
        if held < needed and position + 4 <= data.size:
            for byte in range(4):
                pending |= np.uint64(data[position + byte]) << (held + np.uint64(8 * byte))
            held += np.uint64(32)
            position += 4
        while held < needed:
            if position >= data.size:
                return -1
            pending |= np.uint64(data[position]) << held
            held += np.uint64(8)
            position += 1
        out[i] = np.uint32(np.uint64(base[symbol]) + (pending & ((np.uint64(1) << needed) - np.uint64(1))))
        pending >>= needed
        held -= needed
    loose = (np.uint64(1) << (held & np.uint64(7))) - np.uint64(1)  # of the last byte; whole bytes are given back
    return -1 if pending & loose else position - np.int64(held >> np.uint64(3))


@compiled
def write_varints(values, out):
    """Write every value below 2^32 as a LEB128 varint; return the bytes written, at most 5 for each."""
    position = 0
    for i in range(values.size):
        rest = np.uint64(values[i])
        while rest >= np.uint64(128):
            out[position] = np.uint8((rest & np.uint64(127)) | np.uint64(128))
            rest >>= np.uint64(7)
            position += 1
        out[position] = np.uint8(rest)
        position += 1
    return position


@compiled
def read_varints(data, out):
    """Read `out.size` varints below 2^32; return the bytes read, or -1 where one is cut off or too large."""
    position = 0
    for i in range(out.size):
        value, shift = np.uint64(0), np.uint64(0)
        while True:
            if position >= data.size or shift > np.uint64(28):
                return -1
            byte = np.uint64(data[position])
            position += 1
            value |= (byte & np.uint64(127)) << shift
            shift += np.uint64(7)
            if byte < np.uint64(128):
                break
        if value >> np.uint64(32):
            return -1
        out[i] = np.uint32(value)
    return position
