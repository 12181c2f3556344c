"""A second reader of the wire format, written from docs/wire-format.md alone, entry by entry and without numpy."""

import math
import struct
import zlib
from collections.abc import Iterator

import pytest
import torch

from gradveil import wire

SIZES = (4, 2, 2, 8)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
SIGNED = (torch.int32, torch.int16, torch.int16, torch.int64)


class Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        assert self.at + count <= len(self.data)
        self.at += count
        return self.data[self.at - count : self.at]

    def u8(self) -> int:
        return self.take(1)[0]

    def varint(self) -> int:
        value, shift = 0, 0
        while True:
            byte = self.u8()
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value


def read_symbols(cursor: Cursor, count: int) -> list[int]:
    precision, first = cursor.u8(), cursor.u8()
    if precision == 0:
        return [first] * count
    last = cursor.u8()
    table = {symbol: cursor.varint() for symbol in range(first, last + 1)}
    return read_stream(Cursor(cursor.take(cursor.varint())), count, table, precision)


def read_stream(cursor: Cursor, count: int, table: dict[int, int], precision: int) -> list[int]:
    begin, slots, total = {}, [], 0
    for symbol, frequency in table.items():
        begin[symbol] = total
        total += frequency
        slots += [symbol] * frequency
    assert total == 1 << precision
    states = list(struct.unpack("<II", cursor.take(8)))
    out = []
    for i in range(count):
        x = states[i % 2]
        slot = x % (1 << precision)
        symbol = slots[slot]
        x = table[symbol] * (x >> precision) + slot - begin[symbol]
        if x < 1 << 16:
            x = (x << 16) + struct.unpack("<H", cursor.take(2))[0]
        states[i % 2] = x
        out.append(symbol)
    assert states == [1 << 16] * 2
    assert cursor.at == len(cursor.data)
    return out


def read_bits(cursor: Cursor, widths: list[int]) -> Iterator[int]:
    pool = int.from_bytes(cursor.take(-(-sum(widths) // 8)), "little")
    for width in widths:
        yield pool & ((1 << width) - 1)
        pool >>= width
    assert pool == 0


def read_positions(form: int, cursor: Cursor, n: int, k: int) -> list[int]:
    if form in (0, 1):
        return list(range(k))
    if form == 3:
        return indices(read_bits(cursor, [cursor.u8()] * k))
    if form == 4:
        symbols = read_symbols(cursor, k)
        widths = [0 if s < 4 else s // 4 - 1 for s in symbols]
        bases = [s if s < 4 else (4 + s % 4) << w for s, w in zip(symbols, widths, strict=True)]
        return indices(base + low for base, low in zip(bases, read_bits(cursor, widths), strict=True))
    size = -(-n // 8)
    if form == 2:
        flags = list(cursor.take(size))
    elif form == 5:
        flags = read_symbols(cursor, size)
    else:
        if form == 6:
            nibbles = read_symbols(cursor, 2 * size)
        else:
            nibbles = read_stream(Cursor(cursor.take(len(cursor.data) - cursor.at)), 2 * size, even_table(n, k), 14)
        flags = [low + 16 * high for low, high in zip(nibbles[::2], nibbles[1::2], strict=True)]
    return [i for i in range(8 * size) if flags[i // 8] >> i % 8 & 1]


def indices(gaps: Iterator[int]) -> list[int]:
    out = [-1]
    for gap in gaps:
        out.append(out[-1] + gap + 1)
    return out[1:]


def even_table(n: int, k: int) -> dict[int, int]:
    s = min(max(65536 * k // n, 1), 65535)
    ones = [bin(nibble).count("1") for nibble in range(16)]
    table = {nibble: max(s**j * (65536 - s) ** (4 - j) // 2**50, 1) for nibble, j in enumerate(ones)}
    table[15 if 2 * k >= n else 0] += 2**14 - sum(table.values())
    return table


def read_values(form: int, cursor: Cursor, k: int, size: int) -> list[int]:
    sign = 8 * size - 1
    if form == 0:
        return [int.from_bytes(cursor.take(size), "little") for _ in range(k)]
    if form == 1:
        low, zero_bits, width, coded = cursor.varint(), cursor.u8(), cursor.u8(), cursor.u8()
        symbols = read_symbols(cursor, k)
        plain = read_bits(cursor, [width - coded + 1] * k)
        places = [
            ((symbol << (width - coded)) + (bits >> 1), bits & 1) for symbol, bits in zip(symbols, plain, strict=True)
        ]
        return [low + (d << zero_bits) | s << sign for d, s in places]
    steps = [0]
    for _ in range(cursor.u8() + 1):
        steps.append(steps[-1] + cursor.varint())
    symbols = read_symbols(cursor, k)
    return [steps[symbol + 1] | s << sign for symbol, s in zip(symbols, read_bits(cursor, [1] * k), strict=True)]


def read(body: bytes, masks: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    assert body[:4] == b"GVW\x01"
    assert struct.unpack("<I", body[4:8])[0] == zlib.crc32(body[8:])
    cursor = Cursor(body[8:])
    if cursor.u8():
        cursor.take(4)
    descriptions = []
    for _ in range(cursor.varint()):
        name = cursor.take(cursor.varint()).decode()
        form = cursor.u8()
        shape = [cursor.varint() for _ in range(cursor.u8())]
        descriptions.append((name, form, shape, cursor.varint(), cursor.varint(), cursor.varint()))
    out = {}
    for name, form, shape, k, position_bytes, value_bytes in descriptions:
        kind = form >> 6
        places = masks[name].flatten().nonzero().flatten().tolist() if form >> 5 & 1 else range(math.prod(shape))
        where, what = Cursor(cursor.take(position_bytes)), Cursor(cursor.take(value_bytes))
        positions = read_positions(form & 7, where, len(places), k)
        values = read_values(form >> 3 & 3, what, k, SIZES[kind])
        assert len(where.data) - where.at == len(what.data) - what.at == 0
        flat = [0] * math.prod(shape)
        for position, value in zip(positions, values, strict=True):
            flat[places[position]] = value - (value >> 8 * SIZES[kind] - 1 << 8 * SIZES[kind])
        out[name] = torch.tensor(flat, dtype=SIGNED[kind]).view(DTYPES[kind]).reshape(shape)
    assert cursor.at == len(cursor.data)
    return out


def sparse(n: int, share: float) -> torch.Tensor:
    rng = torch.Generator().manual_seed(n)
    return torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < share)


TREES = {
    "none+plain": torch.zeros(5),
    "all+band": sparse(700, 1.1),
    "bitmap+plain": torch.tensor([0.0, 2.0]),
    "bitmap+band": sparse(64, 0.3).sign() * torch.linspace(1, 2, 64),
    "index+band": sparse(900, 0.02).sign() * torch.linspace(1, 2, 900),
    "coded_gaps+band": sparse(50_000, 0.012),
    "coded_gaps+levels": sparse(60_000, 0.01).sign(),
    "coded_bytes+band": sparse(20_000, 0.2).repeat_interleave(8),
    "coded_nibbles+levels": sparse(1_500, 0.2).repeat_interleave(4).sign() * 3,
    "even_nibbles+band": sparse(3_000, 0.7),
    "even_nibbles+levels": (sparse(3_000, 0.3) * 4).round().half(),
    "even_nibbles+plain": sparse(3_000, 0.2).double(),
}


@pytest.mark.parametrize("form", TREES)
def test_a_reader_written_from_the_document_reads_every_form(form):
    grads = {"first": TREES[form].reshape(-1, 1), "b": sparse(40, 0.2).bfloat16()}
    body = wire.encode(grads)
    assert wire.size_report(grads, body).tensors["first"].form == form
    assert all(torch.equal(tensor, grads[name]) for name, tensor in read(body, {}).items())


def test_a_reader_written_from_the_document_reads_aligned_rounds():
    grads = {"w": sparse(2_000, 0.2), "b": sparse(30, 0.5)}
    masks = {name: (g != 0) | (torch.arange(g.numel()) % 3 == 0) for name, g in grads.items()}
    body = wire.encode(grads, within=masks)
    assert body[8] == 1
    packed = b"".join(
        bytes(sum(1 << j for j in range(8) if i + j < len(m) and m[i + j]) for i in range(0, len(m), 8))
        for m in masks.values()
    )
    assert struct.unpack("<I", body[9:13])[0] == zlib.crc32(packed)
    assert all(torch.equal(tensor, grads[name]) for name, tensor in read(body, masks).items())
