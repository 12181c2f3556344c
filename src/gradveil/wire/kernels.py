"""The compiled loops of the wire format. Every read and write is inside its array, whatever the bytes say.

numba does not check indices, so each function here bounds every index itself: symbols index tables of 256, slots are
masked to the size of their table, stream reads are compared with the end of the stream, and outputs are sized by the
caller. Integers are unsigned 64-bit inside the loops, so no sum or shift wraps.
"""

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

LOWEST = 1 << 16  # a coder state lies in [LOWEST, 2^32); it starts and must end at LOWEST
STATES = 8  # bytes of the two final coder states at the head of a stream


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, keeping the machine code on disk where some folder for it can be written."""
    try:
        kernel: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba found no writable folder: a read-only install without a home
        kernel = numba.njit(nogil=True, error_model="numpy")(function)
    return kernel


@compiled
def scan(bits, magnitude_mask, flags, sent):  # type: ignore[no-untyped-def]
    """Write one flag per entry and the bit patterns of the entries that are not zero; return how many there are.

    `flags` holds ceil(n / 8) zeroed bytes; `sent` one entry more than `bits`, since the slot after the last is written.
    """
    n = bits.size
    count = 0
    for i in range(n >> 3):
        byte = np.uint8(0)
        for j in range(8):
            entry = bits[8 * i + j]
            is_sent = (entry & magnitude_mask) != 0
            sent[count] = entry
            count += is_sent
            byte |= np.uint8(is_sent) << np.uint8(j)
        flags[i] = byte
    for i in range(n & ~7, n):
        is_sent = (bits[i] & magnitude_mask) != 0
        sent[count] = bits[i]
        count += is_sent
        flags[i >> 3] |= np.uint8(is_sent) << np.uint8(i & 7)
    return count


@compiled
def summarise(sent, magnitude_mask):  # type: ignore[no-untyped-def]
    """Return the smallest and the largest magnitude pattern, and the bits in which any two of them differ."""
    first = np.uint64(sent[0] & magnitude_mask)
    low, high, differ = first, first, np.uint64(0)
    for i in range(sent.size):
        magnitude = np.uint64(sent[i] & magnitude_mask)
        low = min(low, magnitude)
        high = max(high, magnitude)
        differ |= magnitude ^ first
    return low, high, differ


@compiled
def band_integers(sent, magnitude_mask, low, shift, out):  # type: ignore[no-untyped-def]
    """Write 2 * ((magnitude - low) >> shift) + sign of every entry."""
    for i in range(sent.size):
        magnitude = np.uint64(sent[i] & magnitude_mask)
        sign = np.uint64(sent[i] > magnitude_mask)
        out[i] = np.uint32((((magnitude - low) >> shift) << np.uint64(1)) | sign)


@compiled
def band_patterns(integers, low, shift, sign_bit, out):  # type: ignore[no-untyped-def]
    """Undo `band_integers`; return the largest magnitude met, which may be beyond the type."""
    high = np.uint64(0)
    for i in range(integers.size):
        integer = np.uint64(integers[i])
        magnitude = low + ((integer >> np.uint64(1)) << shift)
        high = max(high, magnitude)
        out[i] = np.uint32(magnitude | ((integer & np.uint64(1)) << sign_bit))
    return high


@compiled
def find_levels(sent, magnitude_mask, levels, out):  # type: ignore[no-untyped-def]
    """Number the distinct magnitudes in order of appearance; return how many, or -1 once `levels` is full.

    `out` receives 2 * number + sign of every entry.
    """
    slots = np.full(4 * levels.size, -1, np.int64)
    found = 0
    for i in range(sent.size):
        magnitude = sent[i] & magnitude_mask
        slot = np.int64((np.uint64(magnitude) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)) % slots.size
        while slots[slot] >= 0 and levels[slots[slot]] != magnitude:
            slot = (slot + 1) % slots.size
        if slots[slot] < 0:
            if found == levels.size:
                return -1
            levels[found] = magnitude
            slots[slot] = found
            found += 1
        out[i] = np.uint32(2 * slots[slot] + (sent[i] > magnitude_mask))
    return found


@compiled
def histogram(symbols):  # type: ignore[no-untyped-def]
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
def rans_encode(symbols, frequency, start, precision, out):  # type: ignore[no-untyped-def]
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
def rans_decode(stream, frequency, start, lookup, precision, out):  # type: ignore[no-untyped-def]
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
def pack(integers, symbols, base, width, out):  # type: ignore[no-untyped-def]
    """Write the low `width[symbol]` bits of integer - base[symbol], least significant bit first; return the bytes."""
    pending, held, position = np.uint64(0), np.uint64(0), 0
    for i in range(integers.size):
        symbol = symbols[i]
        pending |= (np.uint64(integers[i]) - np.uint64(base[symbol])) << held
        held += np.uint64(width[symbol])
        while held >= np.uint64(8):
            out[position] = np.uint8(pending & np.uint64(255))
            pending >>= np.uint64(8)
            held -= np.uint64(8)
            position += 1
    if held > np.uint64(0):
        out[position] = np.uint8(pending)
        position += 1
    return position


@compiled
def unpack(data, symbols, base, width, out):  # type: ignore[no-untyped-def]
    """Undo `pack`; return the bytes read, or -1 where `data` ends early or the unused last bits are not zero."""
    pending, held, position = np.uint64(0), np.uint64(0), 0
    for i in range(out.size):
        symbol = symbols[i]
        needed = np.uint64(width[symbol])
        while held < needed:
            if position >= data.size:
                return -1
            pending |= np.uint64(data[position]) << held
            held += np.uint64(8)
            position += 1
        out[i] = np.uint32(np.uint64(base[symbol]) + (pending & ((np.uint64(1) << needed) - np.uint64(1))))
        pending >>= needed
        held -= needed
    return position if pending == 0 else -1


@compiled
def write_varints(values, out):  # type: ignore[no-untyped-def]
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
def read_varints(data, out):  # type: ignore[no-untyped-def]
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


@compiled
def count_flags(flags):  # type: ignore[no-untyped-def]
    """Return the number of set bits."""
    count = 0
    for i in range(flags.size):
        byte = flags[i]
        while byte:
            byte &= byte - np.uint8(1)
            count += 1
    return count


@compiled
def scatter(flags, sent, out):  # type: ignore[no-untyped-def]
    """Put `sent` where the flags are set. The caller made sure that exactly `sent.size` are, all below `out.size`."""
    count = 0
    for i in range(out.size):
        if (flags[i >> 3] >> np.uint8(i & 7)) & np.uint8(1):
            out[i] = sent[count]
            count += 1
