"""The Triton kernels of `gpu`. Importing this file needs Triton.

Every program works on one chunk of one segment (tensor). Addresses are advanced to the chunk once, in 64 bits; inside
it 32-bit offsets do.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _locate(chunks, sizes, pointers, segments, CHUNK: tl.constexpr):
    """Return (segment, entries of this chunk, addresses of value, residual, sent and held)."""
    pid = tl.program_id(0)
    segment = tl.load(chunks + 2 * pid)
    start = tl.load(chunks + 2 * pid + 1)
    left = tl.minimum(tl.load(sizes + segment) - start, CHUNK).to(tl.int32)
    value = tl.load(pointers + segment).to(tl.pointer_type(tl.float32)) + start
    residual = tl.load(pointers + segments + segment).to(tl.pointer_type(tl.float32)) + start
    sent = tl.load(pointers + 2 * segments + segment).to(tl.pointer_type(tl.float32)) + start
    held = tl.load(pointers + 3 * segments + segment).to(tl.pointer_type(tl.float32)) + start
    return segment.to(tl.int32), left, value, residual, sent, held


@triton.jit
def _key(values):
    """Return integers that order as the magnitudes do: the bits of a float without its sign."""
    return values.to(tl.uint32, bitcast=True) << 1


@triton.jit
def count_exponents(
    chunks,
    sizes,
    pointers,
    segments,
    counts,
    FEEDBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Add the residual and count the first digit of every magnitude."""
    segment, left, value, residual, _, held = _locate(chunks, sizes, pointers, segments, CHUNK)
    found = tl.zeros([BINS], tl.int32)
    blocks = tl.cdiv(left, BLOCK)
    for j in range(blocks):
        i = j * BLOCK + tl.arange(0, BLOCK)
        inside = i < left
        v = tl.load(value + i, mask=inside, other=0.0)
        if FEEDBACK:
            v += tl.load(residual + i, mask=inside, other=0.0)
            tl.store(held + i, v, mask=inside)
        found += tl.histogram((_key(v) >> 24).to(tl.int32), BINS)
    # What was read past the end counted as zeros; take it off again.
    bins = tl.arange(0, BINS)
    found -= tl.where(bins == 0, blocks * BLOCK - left, 0)
    tl.atomic_add(counts + 2 * segment * BINS + bins, found, mask=found > 0)


@triton.jit
def count_digits(
    chunks,
    sizes,
    pointers,
    segments,
    prefixes,
    counts,
    SHIFT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count the next digit of the entries that begin like a boundary."""
    segment, left, value, _, _, held = _locate(chunks, sizes, pointers, segments, CHUNK)
    source = held if FEEDBACK else value
    slot = 2 * segment
    bins = tl.arange(0, BINS)
    top = tl.load(prefixes + slot).to(tl.uint32, bitcast=True)
    end = tl.load(prefixes + slot + 1).to(tl.uint32, bitcast=True)
    found_top = tl.zeros([BINS], tl.int32)
    found_end = tl.zeros([BINS], tl.int32)
    for j in range(tl.cdiv(left, BLOCK)):
        i = j * BLOCK + tl.arange(0, BLOCK)
        inside = i < left
        digits = _key(tl.load(source + i, mask=inside, other=0.0)) >> SHIFT
        found_top = _tally(found_top, counts + slot * BINS, digits, inside, top, bins, BLOCK, BINS)
        found_end = _tally(found_end, counts + (slot + 1) * BINS, digits, inside, end, bins, BLOCK, BINS)
    tl.atomic_add(counts + slot * BINS + bins, found_top, mask=found_top > 0)
    tl.atomic_add(counts + (slot + 1) * BINS + bins, found_end, mask=found_end > 0)


@triton.jit
def _tally(found, table, digits, inside, prefix, bins, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Count the last digit of the entries that begin with `prefix`: few of them one by one, many by a histogram."""
    match = inside & (digits // BINS == prefix)
    hits = tl.sum(match.to(tl.int32))
    digit = (digits % BINS).to(tl.int32)
    if hits > BLOCK // 64:
        found += tl.histogram(tl.where(match, digit, 0), BINS) - tl.where(bins == 0, BLOCK - hits, 0)
    elif hits > 0:
        tl.atomic_add(table + digit, match.to(tl.int32), mask=match)
    return found


@triton.jit
def pick(counts, ranks, prefixes, wanted, equal, finite, FIRST: tl.constexpr, BINS: tl.constexpr):
    """Find the digit in which one boundary of one segment lies: program (segment, top or end)."""
    segment = tl.program_id(0)
    which = tl.program_id(1)
    slot = 2 * segment + which
    bins = tl.arange(0, BINS)
    if FIRST:
        # In the first pass both boundaries share one table.
        count = tl.load(counts + 2 * segment * BINS + bins)
        rank = tl.load(ranks + slot)
        if tl.sum(tl.where(bins == BINS - 1, count, 0)) > 0:  # the exponent of infinity and NaN
            tl.store(finite, 0)
        prefix = 0
    else:
        count = tl.load(counts + slot * BINS + bins)
        rank = tl.load(wanted + slot)
        prefix = tl.load(prefixes + slot)
    from_here_up = tl.cumsum(count, axis=0, reverse=True)
    found = tl.sum((from_here_up >= rank).to(tl.int32)) - 1
    here = bins == found
    tl.store(prefixes + slot, prefix * BINS + found)
    tl.store(wanted + slot, rank - tl.sum(tl.where(here, from_here_up - count, 0)))
    tl.store(equal + slot, tl.sum(tl.where(here, count, 0)))


@triton.jit
def count_ties(
    chunks,
    sizes,
    pointers,
    segments,
    keys,
    wanted,
    equal,
    ties,
    FEEDBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count, in each program, the entries equal to a boundary that is cut in two."""
    segment, left, value, _, _, held = _locate(chunks, sizes, pointers, segments, CHUNK)
    source = held if FEEDBACK else value
    for which in tl.static_range(2):
        slot = 2 * segment + which
        need = tl.load(wanted + slot)
        if (need > 0) & (need < tl.load(equal + slot)):
            boundary = tl.load(keys + slot).to(tl.uint32, bitcast=True)
            total = 0
            for j in range(tl.cdiv(left, BLOCK)):
                i = j * BLOCK + tl.arange(0, BLOCK)
                inside = i < left
                key = _key(tl.load(source + i, mask=inside, other=0.0))
                total += tl.sum((inside & (key == boundary)).to(tl.int32))
            tl.store(ties + 2 * tl.program_id(0) + which, total)


@triton.jit
def _ties_before(ties, first, which, BLOCK: tl.constexpr):
    total = 0
    for p in range(first, tl.program_id(0), BLOCK):
        i = p + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(ties + 2 * i + which, mask=i < tl.program_id(0), other=0))
    return total


@triton.jit
def _above(key, boundary, need, cut, seen):
    """Say which entries rank above a boundary; only a boundary cut in two asks how many equal ones came before."""
    equal = key == boundary
    above = (key > boundary) | (equal & (need > 0))
    if cut:
        order = seen + tl.cumsum(equal.to(tl.int32), axis=0) - 1
        above = (key > boundary) | (equal & (order < need))
        seen += tl.sum(equal.to(tl.int32))
    return above, seen


@triton.jit
def write(
    chunks,
    sizes,
    pointers,
    segments,
    keys,
    wanted,
    equal,
    ties,
    first_chunk,
    FEEDBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the band to `sent` and the rest to `held`."""
    segment, left, value, _, sent, held = _locate(chunks, sizes, pointers, segments, CHUNK)
    source = held if FEEDBACK else value
    slot = 2 * segment
    top_key = tl.load(keys + slot).to(tl.uint32, bitcast=True)
    end_key = tl.load(keys + slot + 1).to(tl.uint32, bitcast=True)
    top_need, end_need = tl.load(wanted + slot), tl.load(wanted + slot + 1)
    top_cut = (top_need > 0) & (top_need < tl.load(equal + slot))
    end_cut = (end_need > 0) & (end_need < tl.load(equal + slot + 1))
    first = tl.load(first_chunk + segment)
    top_seen = 0
    end_seen = 0
    if top_cut:
        top_seen = _ties_before(ties, first, 0, BLOCK)
    if end_cut:
        end_seen = _ties_before(ties, first, 1, BLOCK)
    for j in range(tl.cdiv(left, BLOCK)):
        i = j * BLOCK + tl.arange(0, BLOCK)
        inside = i < left
        v = tl.load(source + i, mask=inside, other=0.0)
        key = _key(v)
        over_top, top_seen = _above(key, top_key, top_need, top_cut, top_seen)
        over_end, end_seen = _above(key, end_key, end_need, end_cut, end_seen)
        keep = over_end & (over_top == 0)
        tl.store(sent + i, tl.where(keep, v, 0.0), mask=inside)
        if FEEDBACK:
            tl.store(held + i, tl.where(keep, 0.0, v), mask=inside)
