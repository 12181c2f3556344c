"""The Triton kernels of `gpu`. Importing this file needs Triton.

Programs work on one block of one segment (tensor), on a segment, or on one of its two boundaries (a slot). A row of
`blocks` holds segment, entries, and the addresses of value, residual, sent and held; one of `groups` holds segment,
first block, the block after the last, and the number of the group in its segment.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

LARGEST = tl.constexpr(0x7FFFFFFF)
INFINITE = tl.constexpr(0x7F800000)  # magnitude of infinity; those of NaN lie above
SETTLED = tl.constexpr(0)  # the guess is the boundary
NARROWED = tl.constexpr(1)  # the boundary is among the candidates
OPEN = tl.constexpr(2)  # the guess missed, or its candidates do not fit: the whole segment is searched


@triton.jit
def _address(table, column):
    return tl.load(table + column).to(tl.pointer_type(tl.float32))


@triton.jit
def _aligned(table, column, WHOLE: tl.constexpr):
    """Return an address; that of a whole block is known to suit wide loads and stores."""
    # Not by way of `_address`: what is known of the result of a call is lost when the call is inlined.
    address = tl.load(table + column).to(tl.pointer_type(tl.float32))
    return tl.multiple_of(address, 16) if WHOLE else address


@triton.jit
def _read(address, i, inside, WHOLE: tl.constexpr):
    return tl.load(address + i) if WHOLE else tl.load(address + i, mask=inside, other=0.0)


@triton.jit
def _write(address, i, values, inside, WHOLE: tl.constexpr):
    if WHOLE:
        tl.store(address + i, values)
    else:
        tl.store(address + i, values, mask=inside)


@triton.jit
def _magnitude(values):
    """Return integers that order as the magnitudes do: the bits of a float without its sign."""
    return values.to(tl.int32, bitcast=True) & LARGEST


@triton.jit
def guess(
    sizes,
    pointers,
    segments,
    ranks,
    edges,
    FEEDBACK: tl.constexpr,
    SAMPLE: tl.constexpr,
    SIGMAS: tl.constexpr,
):
    """Bracket both boundaries of a segment between two entries of a sorted sample; a small segment is its own sample.

    One entry is drawn from each of SAMPLE equal stretches, at a place that looks random: a regular step could fall in
    with the structure of a layer.
    """
    segment = tl.program_id(0)
    n = tl.load(sizes + segment)
    i = tl.arange(0, SAMPLE)
    scattered = ((i * 1103515245 + 12345) >> 8) & 0x7FFFFF
    drawn = (i.to(tl.int64) * n) // SAMPLE + scattered % tl.maximum(n // SAMPLE, 1)
    place = tl.where(n > SAMPLE, drawn, i.to(tl.int64))
    inside = place < n
    v = tl.load(_address(pointers, segment) + place, mask=inside, other=0.0)
    if FEEDBACK:
        v += tl.load(_address(pointers, segments + segment) + place, mask=inside, other=0.0)
    ordered = tl.sort(tl.where(inside, _magnitude(v), -1), descending=True)
    for which in tl.static_range(2):
        slot = 2 * segment + which
        rank = tl.load(ranks + slot)
        expected = rank.to(tl.float32) * SAMPLE / n.to(tl.float32)
        margin = 2.0 + SIGMAS * tl.sqrt(tl.maximum(expected * (1.0 - expected / SAMPLE), 0.0))
        first = tl.where(n > SAMPLE, tl.floor(expected - margin).to(tl.int32), rank) - 1
        last = tl.where(n > SAMPLE, tl.ceil(expected + margin).to(tl.int32), rank) - 1
        high = tl.where(first < 0, LARGEST, tl.sum(tl.where(i == first, ordered, 0), axis=0))
        low = tl.where(last >= SAMPLE, 0, tl.sum(tl.where(i == last, ordered, 0), axis=0))
        tl.store(edges + 2 * slot, tl.where(rank == 0, LARGEST, low))
        tl.store(edges + 2 * slot + 1, high)


@triton.jit
def collect(
    blocks,
    numbers,
    edges,
    regions,
    candidates,
    tallies,
    finite,
    WHOLE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    THREADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add the residual; count what lies above each bracket and gather, in any order, what lies inside.

    A candidate is one word: its magnitude below, the number of its block above.
    """
    block = blocks + 6 * tl.program_id(0)
    origin = tl.load(numbers + tl.program_id(0)) << 32
    slot = 2 * tl.load(block).to(tl.int32)
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(block + 1)
    v = _read(_address(block, 2), i, inside, WHOLE)
    if FEEDBACK:
        v += _read(_address(block, 3), i, inside, WHOLE)
        _write(_address(block, 5), i, v, inside, WHOLE)
    size = _magnitude(v) if WHOLE else tl.where(inside, _magnitude(v), -1)
    top_low, top_high = tl.load(edges + 2 * slot), tl.load(edges + 2 * slot + 1)
    end_low, end_high = tl.load(edges + 2 * slot + 2), tl.load(edges + 2 * slot + 3)
    in_top = (size >= top_low) & (size <= top_high)
    in_end = (size >= end_low) & (size <= end_high)
    over_top, over_end = size > top_high, size > end_high
    # Five counts of one thread's entries fit one word: what this kernel pays for is sums over the block, and a
    # thread's own entries add up without a word to the others. Entries lie with the threads in turn.
    packed = in_top.to(tl.int32) + (in_end.to(tl.int32) << 6) + (over_top.to(tl.int32) << 12)
    packed += (over_end.to(tl.int32) << 18) + ((size >= INFINITE).to(tl.int32) << 24)
    packed = tl.reshape(packed, [BLOCK // THREADS, THREADS])
    inner = tl.cumsum(packed, axis=0)
    of_thread = tl.sum(packed, axis=0)
    hits = (of_thread & 63) + (((of_thread >> 6) & 63) << 16)
    above = ((of_thread >> 12) & 63) + (((of_thread >> 18) & 63) << 16)
    above_total, hits_total = tl.sum(above, axis=0), tl.sum(hits, axis=0)
    if tl.max(of_thread, axis=0) >> 24 > 0:
        tl.store(finite, 0)
    begin = (tl.cumsum(hits, axis=0) - hits)[None, :]
    top_order = tl.reshape((begin & 0xFFFF) + (inner & 63), [BLOCK])
    end_order = tl.reshape((begin >> 16) + ((inner >> 6) & 63), [BLOCK])
    # The four tallies of a segment lie side by side: one instruction, and one wait for where the candidates go.
    of = tl.arange(0, 4)
    found = tl.where(of % 2 == 0, above_total, hits_total)
    found = tl.where(of < 2, found & 0xFFFF, found >> 16)
    before = tl.atomic_add(tallies + 2 * slot + of, found, sem="relaxed")
    word, into = origin + size, (regions, candidates)
    top_before, end_before = tl.sum(tl.where(of == 1, before, 0), axis=0), tl.sum(tl.where(of == 3, before, 0), axis=0)
    _gather(word, in_top, top_order, top_before, hits_total & 0xFFFF, top_low < top_high, slot, into)
    _gather(word, in_end, end_order, end_before, hits_total >> 16, end_low < end_high, slot + 1, into)


@triton.jit
def _gather(word, match, order, before, hits, wide, slot, into):
    """Append the matching entries to the candidates of a boundary; a bracket of one magnitude only counts them."""
    regions, candidates = into
    if wide & (hits > 0) & (before + hits <= tl.load(regions + 2 * slot + 1)):
        tl.store(candidates + tl.load(regions + 2 * slot) + before - 1 + order, word, mask=match)


@triton.jit
def settle(ranks, edges, regions, tallies, states, widths, keys, wanted, equal):
    """See what a guess was worth: program (segment, top or end).

    `keys` becomes the smallest magnitude the boundary can have, `widths` the bits of its distance from there.
    """
    slot = 2 * tl.program_id(0) + tl.program_id(1)
    rank = tl.load(ranks + slot)
    low, high = tl.load(edges + 2 * slot), tl.load(edges + 2 * slot + 1)
    above, inside = tl.load(tallies + 2 * slot), tl.load(tallies + 2 * slot + 1)
    caught = (above < rank) & (rank <= above + inside)
    state = OPEN
    if (rank == 0) | (caught & (low == high)):
        state = SETTLED
    elif caught & (inside <= tl.load(regions + 2 * slot + 1)):
        state = NARROWED
    bits = tl.arange(0, 32)
    width = tl.sum((((high - low) >> bits) > 0).to(tl.int32), axis=0)
    tl.store(states + slot, state)
    tl.store(widths + slot, tl.where(state == OPEN, 31, tl.where(state == SETTLED, 0, width)))
    tl.store(keys + slot, tl.where(state == OPEN, 0, low))
    tl.store(wanted + slot, tl.where(state == OPEN, rank, tl.maximum(rank - above, 0)))
    tl.store(equal + slot, tl.where(rank == 0, 0, inside))


@triton.jit
def count_digits(
    blocks,
    groups,
    regions,
    candidates,
    tallies,
    states,
    widths,
    keys,
    counts,
    DONE: tl.constexpr,
    DIGIT: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count the next digit of the entries that agree with a boundary in the DONE bits found so far.

    A program has one block of the candidates or, where the whole segment is searched, one group of blocks.
    """
    group = groups + 4 * tl.program_id(0)
    segment = tl.load(group)
    i = tl.arange(0, BLOCK)
    for which in tl.static_range(2):
        slot = 2 * segment + which
        state = tl.load(states + slot)
        width = tl.load(widths + slot)
        begin = tl.load(group + 3) * BLOCK
        found = tl.load(tallies + 2 * slot + 1) - begin
        if width > DONE:
            if (state == NARROWED) & (found > 0):
                inside = i < found
                word = tl.load(candidates + tl.load(regions + 2 * slot) + begin + i, mask=inside, other=0)
                _tally(word.to(tl.int32), inside, slot, width, keys, counts, DONE, DIGIT, BLOCK)
            if state == OPEN:
                for j in range(tl.load(group + 1), tl.load(group + 2)):
                    inside = i < tl.load(blocks + 6 * j + 1)
                    v = tl.load(_address(blocks + 6 * j, 5 if FEEDBACK else 2) + i, mask=inside, other=0.0)
                    _tally(_magnitude(v), inside, slot, width, keys, counts, DONE, DIGIT, BLOCK)


@triton.jit
def _tally(size, inside, slot, width, keys, counts, DONE: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr):
    distance = size - tl.load(keys + slot)
    match = inside & (distance >= 0) & ((distance >> (width - DONE)) == 0)
    digit = tl.where(match, distance >> tl.maximum(width - DONE - DIGIT, 0), 0)
    table = counts + (slot << DIGIT)
    hits = tl.sum(match.to(tl.int32), axis=0)
    # Few of them one by one, many by a histogram; what does not match counts as zero there, and is taken off again.
    if hits > BLOCK // 64:
        bins = tl.arange(0, 1 << DIGIT)
        sums = tl.histogram(digit, 1 << DIGIT) - tl.where(bins == 0, BLOCK - hits, 0)
        tl.atomic_add(table + bins, sums, mask=sums > 0, sem="relaxed")
    elif hits > 0:
        tl.atomic_add(table + digit, match.to(tl.int32), mask=match, sem="relaxed")


@triton.jit
def pick(counts, widths, keys, wanted, equal, DONE: tl.constexpr, DIGIT: tl.constexpr):
    """Find the digit in which one boundary of one segment lies: program (segment, top or end)."""
    slot = 2 * tl.program_id(0) + tl.program_id(1)
    width = tl.load(widths + slot)
    if width > DONE:
        bins = tl.arange(0, 1 << DIGIT)
        count = tl.load(counts + (slot << DIGIT) + bins)
        rank = tl.load(wanted + slot)
        from_here_up = tl.cumsum(count, axis=0, reverse=True)
        found = tl.sum((from_here_up >= rank).to(tl.int32), axis=0) - 1
        here = bins == found
        tl.store(keys + slot, tl.load(keys + slot) + (found << tl.maximum(width - DONE - DIGIT, 0)))
        tl.store(wanted + slot, rank - tl.sum(tl.where(here, from_here_up - count, 0), axis=0))
        tl.store(equal + slot, tl.sum(tl.where(here, count, 0), axis=0))


@triton.jit
def _is_cut(slot, keys, wanted, equal):
    """Say whether only some of the entries equal to a boundary rank above it; for zeros it makes no difference."""
    need = tl.load(wanted + slot)
    return (need > 0) & (need < tl.load(equal + slot)) & (tl.load(keys + slot) > 0)


@triton.jit
def count_ties(
    blocks,
    groups,
    regions,
    candidates,
    tallies,
    states,
    keys,
    wanted,
    equal,
    ties,
    FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count, block by block, the entries equal to a boundary that cuts through them; programs as in `count_digits`."""
    group = groups + 4 * tl.program_id(0)
    segment = tl.load(group)
    i = tl.arange(0, BLOCK)
    for which in tl.static_range(2):
        slot = 2 * segment + which
        if _is_cut(slot, keys, wanted, equal):
            key = tl.load(keys + slot)
            if tl.load(states + slot) == NARROWED:
                begin = tl.load(group + 3) * BLOCK
                inside = i < tl.load(tallies + 2 * slot + 1) - begin
                word = tl.load(candidates + tl.load(regions + 2 * slot) + begin + i, mask=inside, other=0)
                match = inside & (word.to(tl.int32) == key)
                tl.atomic_add(ties + 2 * (word >> 32) + which, match.to(tl.int32), mask=match, sem="relaxed")
            else:
                for j in range(tl.load(group + 1), tl.load(group + 2)):
                    inside = i < tl.load(blocks + 6 * j + 1)
                    v = tl.load(_address(blocks + 6 * j, 5 if FEEDBACK else 2) + i, mask=inside, other=0.0)
                    tl.store(ties + 2 * j + which, tl.sum((_magnitude(v) == key).to(tl.int32), axis=0))


@triton.jit
def add_ties(sizes, first_block, keys, wanted, equal, ties, before, BLOCK: tl.constexpr):
    """Sum the ties of all earlier blocks of a segment: program (segment, top or end)."""
    segment, which = tl.program_id(0), tl.program_id(1)
    if _is_cut(2 * segment + which, keys, wanted, equal):
        first = tl.load(first_block + segment)
        count = tl.cdiv(tl.load(sizes + segment), BLOCK)
        i = tl.arange(0, BLOCK)
        earlier = 0
        for p in range(0, count, BLOCK):
            here = 2 * (first + p + i) + which
            found = tl.load(ties + here, mask=p + i < count, other=0)
            tl.store(before + here, earlier + tl.cumsum(found, axis=0) - found, mask=p + i < count)
            earlier += tl.sum(found, axis=0)


@triton.jit
def _reaches(size, slot, place, cuts):
    """Return the entries that rank at or above a boundary: equal ones by their index, should it cut through them."""
    keys, wanted, equal, ties, before = cuts
    key = tl.load(keys + slot)
    same, over = size == key, size > key
    if _is_cut(slot, keys, wanted, equal):
        left = tl.load(wanted + slot) - tl.load(before + place)
        found = tl.load(ties + place)
        if (left > 0) & (left < found):  # in one block of a segment at most
            same = same & (tl.cumsum(same.to(tl.int32), axis=0) <= left)
        else:
            same = same & (left >= found)
    return over | same


@triton.jit
def write(
    blocks,
    numbers,
    keys,
    wanted,
    equal,
    ties,
    before,
    WHOLE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the band to `sent` and the rest to `held`."""
    block = blocks + 6 * tl.program_id(0)
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(block + 1)
    cuts = (keys, wanted, equal, ties, before)
    sent = _divide(block, tl.load(numbers + tl.program_id(0)), i, inside, cuts, WHOLE, FEEDBACK)
    _write(_aligned(block, 4, WHOLE), i, sent, inside, WHOLE)


@triton.jit
def write_mean(
    blocks,
    numbers,
    targets,
    clients,
    blocks_each,
    keys,
    wanted,
    equal,
    ties,
    before,
    WHOLE: tl.constexpr,
    FEEDBACK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the rest of every client to `held`, and of their bands only the mean: all that a server makes of them."""
    first = tl.load(numbers + tl.program_id(0))
    i = tl.arange(0, BLOCK)
    inside = i < tl.load(blocks + 6 * first + 1)
    cuts = (keys, wanted, equal, ties, before)
    total = tl.zeros([BLOCK], tl.float32)
    for client in range(clients):
        number = first + client * blocks_each
        total += _divide(blocks + 6 * number, number, i, inside, cuts, WHOLE, FEEDBACK)
    _write(_aligned(targets, first, WHOLE), i, total / clients, inside, WHOLE)


@triton.jit
def _divide(block, number, i, inside, cuts, WHOLE: tl.constexpr, FEEDBACK: tl.constexpr):
    """Return the band of one block, zero elsewhere; write the rest to `held`."""
    slot, place = 2 * tl.load(block), 2 * number
    v = _read(_aligned(block, 5 if FEEDBACK else 2, WHOLE), i, inside, WHOLE)
    size = _magnitude(v)
    removed, kept = _reaches(size, slot, place, cuts), _reaches(size, slot + 1, place + 1, cuts)
    keep = kept & (removed == 0)
    if FEEDBACK:
        _write(_aligned(block, 5, WHOLE), i, tl.where(keep, 0.0, v), inside, WHOLE)
    return tl.where(keep, v, 0.0)
