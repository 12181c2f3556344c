"""Compiled passes over the bit patterns of a tensor."""
# mypy: allow-untyped-defs

import numpy as np

from ..jit import compiled


@compiled
def scan(bits, magnitude_mask, flags, sent):
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
def summarise(sent, magnitude_mask):
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
def band_integers(sent, magnitude_mask, low, shift, out):
    """Write 2 * ((magnitude - low) >> shift) + sign of every entry."""
    for i in range(sent.size):
        magnitude = np.uint64(sent[i] & magnitude_mask)
        sign = np.uint64(sent[i] > magnitude_mask)
        out[i] = np.uint32((((magnitude - low) >> shift) << np.uint64(1)) | sign)


@compiled
def band_patterns(integers, low, shift, sign_bit, out):
    """Undo `band_integers`; return the largest magnitude met, which may be beyond the type."""
    high = np.uint64(0)
    for i in range(integers.size):
        integer = np.uint64(integers[i])
        magnitude = low + ((integer >> np.uint64(1)) << shift)
        high = max(high, magnitude)
        out[i] = np.uint32(magnitude | ((integer & np.uint64(1)) << sign_bit))
    return high


@compiled
def find_levels(sent, magnitude_mask, levels, out):
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
def scatter(flags, sent, out):
    """Put `sent` where the flags are set, of which there are as many as entries in `sent`, at least one."""
    count, last = 0, sent.size - 1
    for i in range(out.size >> 3):
        byte = int(flags[i])
        for j in range(8):  # no branch: whether an entry was sent cannot be predicted
            bit = (byte >> j) & 1
            out[8 * i + j] = np.uint64(sent[min(count, last)]) * np.uint64(bit)
            count += bit
    for i in range(out.size & ~7, out.size):
        bit = (int(flags[i >> 3]) >> (i & 7)) & 1
        out[i] = np.uint64(sent[min(count, last)]) * np.uint64(bit)
        count += bit
