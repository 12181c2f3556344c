"""The Triton kernels of `gpu`. Importing this file needs Triton."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _locate(chunks, sizes, pointers, segments):
    """Return (segment, first index, size, pointers of value, residual, sent and held) of this program."""
    pid = tl.program_id(0)
    segment = tl.load(chunks + 2 * pid)
    start = tl.load(chunks + 2 * pid + 1)
    n = tl.load(sizes + segment)
    value = tl.load(pointers + segment).to(tl.pointer_type(tl.float32))
    residual = tl.load(pointers + segments + segment).to(tl.pointer_type(tl.float32))
    sent = tl.load(pointers + 2 * segments + segment).to(tl.pointer_type(tl.float32))
    held = tl.load(pointers + 3 * segments + segment).to(tl.pointer_type(tl.float32))
    return segment, start, n, value, residual, sent, held


@triton.jit
def _key(values):
    """Return integers that order as the magnitudes do: the bits of a float without its sign."""
    return values.to(tl.uint32, bitcast=True) << 1


@triton.jit
def count(
    chunks,
    sizes,
    pointers,
    segments,
    prefixes,
    equal,
    counts,
    SHIFT: tl.constexpr,
    FIRST: tl.constexpr,
    FEEDBACK: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Count one digit of the magnitudes that share a boundary's leading digits; the first pass adds the residual."""
    segment, start, n, value, residual, _, held = _locate(chunks, sizes, pointers, segments)
    source = held if FEEDBACK and not FIRST else value
    bins = tl.arange(0, BINS)
    found_top = tl.zeros([BINS], tl.int32)
    found_end = tl.zeros([BINS], tl.int32)
    top = tl.load(prefixes + 2 * segment).to(tl.uint32, bitcast=True)
    end = tl.load(prefixes + 2 * segment + 1).to(tl.uint32, bitcast=True)
    # A histogram is worth it where many entries match, and spares one address where all are equal.
    many_top = tl.load(equal + 2 * segment) * 16 > n
    many_end = tl.load(equal + 2 * segment + 1) * 16 > n
    matched_top = tl.zeros([BLOCK], tl.int32)
    matched_end = tl.zeros([BLOCK], tl.int32)
    blocks = tl.minimum(tl.cdiv(n - start, BLOCK), CHUNK // BLOCK)
    for j in range(blocks):
        i = start + j * BLOCK + tl.arange(0, BLOCK)
        inside = i < n
        v = tl.load(source + i, mask=inside, other=0.0)
        if FIRST and FEEDBACK:
            v += tl.load(residual + i, mask=inside, other=0.0)
            tl.store(held + i, v, mask=inside)
        digits = _key(v) >> SHIFT
        if FIRST:
            found_top += tl.histogram(digits.to(tl.int32), BINS)
            matched_top += inside.to(tl.int32)
        else:
            found_top, matched_top = _tally(
                found_top, matched_top, many_top, counts + 2 * segment * BINS, digits, inside, top, BINS
            )
            found_end, matched_end = _tally(
                found_end, matched_end, many_end, counts + (2 * segment + 1) * BINS, digits, inside, end, BINS
            )
    # Entries that do not match, or lie past the end, were counted in bin 0; take them off again.
    seen = (blocks * BLOCK).to(tl.int32)
    if FIRST or many_top:
        found_top -= tl.where(bins == 0, seen - tl.sum(matched_top), 0)
        tl.atomic_add(counts + 2 * segment * BINS + bins, found_top, mask=found_top > 0)
    if not FIRST:  # noqa: SIM102  (the first is known to the compiler, the second to the GPU)
        if many_end:
            found_end -= tl.where(bins == 0, seen - tl.sum(matched_end), 0)
            tl.atomic_add(counts + (2 * segment + 1) * BINS + bins, found_end, mask=found_end > 0)


@triton.jit
def _tally(found, matched, many, table, digits, inside, prefix, BINS: tl.constexpr):
    """Count the last digit of the entries that begin with `prefix`: few of them one by one, many by a histogram."""
    match = inside & (digits // BINS == prefix)
    digit = (digits % BINS).to(tl.int32)
    if many:
        found += tl.histogram(tl.where(match, digit, 0), BINS)
        matched += match.to(tl.int32)
    else:
        tl.atomic_add(table + digit, match.to(tl.int32), mask=match)
    return found, matched


@triton.jit
def pick(counts, ranks, prefixes, wanted, equal, finite, FIRST: tl.constexpr, BINS: tl.constexpr):
    """Find the digit in which one boundary of one segment lies: program (segment, top or end)."""
    segment = tl.program_id(0)
    which = tl.program_id(1)
    slot = 2 * segment + which
    bins = tl.arange(0, BINS)
    if FIRST:
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
    segment, start, n, value, _, _, held = _locate(chunks, sizes, pointers, segments)
    source = held if FEEDBACK else value
    for which in tl.static_range(2):
        slot = 2 * segment + which
        need = tl.load(wanted + slot)
        if (need > 0) & (need < tl.load(equal + slot)):
            boundary = tl.load(keys + slot).to(tl.uint32, bitcast=True)
            total = 0
            for j in range(0, CHUNK, BLOCK):
                i = start + j + tl.arange(0, BLOCK)
                inside = i < n
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
    segment, start, n, value, _, sent, held = _locate(chunks, sizes, pointers, segments)
    source = held if FEEDBACK else value
    first = tl.load(first_chunk + segment)
    top_key = tl.load(keys + 2 * segment).to(tl.uint32, bitcast=True)
    end_key = tl.load(keys + 2 * segment + 1).to(tl.uint32, bitcast=True)
    top_need, end_need = tl.load(wanted + 2 * segment), tl.load(wanted + 2 * segment + 1)
    top_cut = (top_need > 0) & (top_need < tl.load(equal + 2 * segment))
    end_cut = (end_need > 0) & (end_need < tl.load(equal + 2 * segment + 1))
    top_seen = 0
    end_seen = 0
    if top_cut:
        top_seen = _ties_before(ties, first, 0, BLOCK)
    if end_cut:
        end_seen = _ties_before(ties, first, 1, BLOCK)
    for j in range(0, CHUNK, BLOCK):
        if start + j < n:
            i = start + j + tl.arange(0, BLOCK)
            inside = i < n
            v = tl.load(source + i, mask=inside, other=0.0)
            key = _key(v)
            over_top, top_seen = _above(key, top_key, top_need, top_cut, top_seen)
            over_end, end_seen = _above(key, end_key, end_need, end_cut, end_seen)
            keep = over_end & (over_top == 0)
            tl.store(sent + i, tl.where(keep, v, 0.0), mask=inside)
            if FEEDBACK:
                tl.store(held + i, tl.where(keep, 0.0, v), mask=inside)
