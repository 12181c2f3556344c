"""Bytes from the other side: a `WireError` or a valid tree, soon and without large allocations."""

import itertools
import random
import struct
import time
import tracemalloc
import zlib
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradveil import wire
from gradveil.core import Grads
from gradveil.errors import WireError
from gradveil.wire.frame import KINDS, MAX_NAME, Entry, Positions, Values, read_frame, varint, write_frame

MUTATIONS = 26_000  # in each of four parts
FEW = 1 << 14  # entries a mutated payload may declare, so that looking at every valid tree stays cheap


def sealed(rest: bytes, head: bytes = b"GVW\x01") -> bytes:
    """A payload whose checksum is right, whatever it holds."""
    return head + struct.pack("<I", zlib.crc32(rest)) + rest


def described(
    name: bytes = b"w",
    form: int = 0,
    shape: tuple[int, ...] = (4,),
    sent: int = 0,
    where: bytes = b"",
    what: bytes = b"",
) -> bytes:
    head = varint(len(name)) + name + bytes((form, len(shape))) + b"".join(map(varint, shape))
    return head + varint(sent) + varint(len(where)) + varint(len(what))


def one(where: bytes = b"", what: bytes = b"", **description: object) -> bytes:
    return sealed(b"\0\1" + described(where=where, what=what, **description) + where + what)


ONES = struct.pack("<2f", 1.0, 1.0)
BAND_OF_ONE = b"\x80\x80\x80\xfc\x03\x00\x00\x00\x00\x00"  # 1.0, nothing else; one byte of signs follows
HOSTILE = {
    "empty": ("does not begin", b""),
    "short": ("does not begin", b"GVW\x01\0\0"),
    "other magic": ("does not begin", b"PK\x03\x04" + bytes(40)),
    "other version": ("wire version 2", sealed(b"\0\0", b"GVW\x02")),
    "checksum": ("checksum", b"GVW\x01\0\0\0\0" + b"\0\0"),
    "unknown flag": ("holds 2 where", sealed(b"\2\0")),
    "mask not named": ("mask that is not named", one(form=1 | 1 << 5, sent=2, shape=(2,), what=ONES)),
    "tensors declared, none there": ("cut short", sealed(b"\0\5")),
    "too many tensors": ("more than 16384", sealed(b"\0" + varint(1 << 40))),
    "endless varint": ("more than 16384", sealed(b"\0" + b"\xff" * 30)),
    "overlong name": ("more than 1024", one(name=b"n" * (MAX_NAME + 1))),
    "name cut off": ("cut short", sealed(b"\0\1\x64abc")),
    "name not utf-8": ("not UTF-8", one(name=b"\xff\xfe")),
    "two of a name": ("same name", sealed(b"\0\2" + 2 * described())),
    "unknown value form": ("unknown form", one(form=3 << 3)),
    "too many dimensions": ("65 where at most 64", one(shape=(1,) * 65)),
    "huge tensor": ("a tensor has at most", one(shape=(1 << 62, 1 << 62))),
    "huge total": (
        "raise max_entries",
        sealed(b"\0\x09" + b"".join(described(name=bytes((97 + i,)), shape=(1 << 25,)) for i in range(9))),
    ),
    "more sent than there are": ("declares more than 1", one(form=1, shape=(1,), sent=2, what=ONES)),
    "fewer sent than all": ("2 entries sent of 3", one(form=1, shape=(3,), sent=2, what=ONES)),
    "sent but nowhere": ("does not say where", one(form=0, sent=2, what=ONES)),
    "somewhere but none sent": ("does not say where", one(form=2, where=b"\0")),
    "section for nothing": ("3 bytes too many", one(form=0, where=b"abc")),
    "many sent in few bytes": ("too few bytes", one(form=1, shape=(1 << 27,), sent=1 << 27, what=ONES)),
    "trailing garbage": ("do not add up", sealed(b"\0\1" + described() + b"more")),
    "garbage in a section": ("4 bytes too many", one(form=1, shape=(1,), sent=1, what=ONES)),
    "nan": ("NaN", one(form=1, shape=(1,), sent=1, what=struct.pack("<f", float("nan")))),
    "infinity": ("NaN", one(form=1, shape=(1,), sent=1, what=struct.pack("<f", float("-inf")))),
    "infinity in half precision": ("NaN", one(form=1 | 1 << 6, shape=(1,), sent=1, what=b"\x00\x7c")),
    "a zero sent": ("NaN", one(form=1, shape=(1,), sent=1, what=bytes(4))),
    "a negative zero sent": ("NaN", one(form=1, shape=(1,), sent=1, what=b"\0\0\0\x80")),
    "bitmap cut short": ("cut short", one(form=2, shape=(9,), sent=2, where=b"\3", what=ONES)),
    "bitmap of another count": ("declared 2 positions", one(form=2, sent=2, where=b"\7", what=ONES)),
    "bitmap beyond the end": ("beyond the end", one(form=2, sent=2, where=b"\x11", what=ONES)),
    "index beyond the end": ("beyond the end", one(form=3, sent=2, where=b"\x03\x11", what=ONES)),
    "index wider than 32 bits": ("33 where at most 32", one(form=3, sent=2, where=b"\x21" + bytes(9), what=ONES)),
    "index with loose bits": ("bits set where none belong", one(form=3, sent=2, where=b"\x01\x80", what=ONES)),
    "flags of too few entries": ("which are too few", one(form=5, shape=(1 << 27,), sent=2, where=b"\0\1", what=ONES)),
    "table that does not add up": (
        "does not add up",
        one(form=5, sent=2, where=b"\x08\x00\x01\x05\x05\x08" + bytes(8), what=ONES),
    ),
    "table that ends before it begins": (
        "ends before it begins",
        one(form=5, sent=2, where=b"\x08\x05\x01\x05", what=ONES),
    ),
    "table beyond 32 bits": ("beyond 32 bits", one(form=5, sent=2, where=b"\x08\x00\x00" + b"\xff" * 5, what=ONES)),
    "precision out of range": ("15 where at most 14", one(form=5, sent=2, where=b"\x0f\x00\x01", what=ONES)),
    "nibble above 15": ("16 where at most 15", one(form=6, sent=2, where=b"\x00\x10", what=ONES)),
    "stream without states": (
        "damaged stream",
        one(form=5, sent=2, where=b"\x01\x03\x04\x01\x01\x04" + bytes(4), what=ONES),
    ),
    "stream that ends early": ("damaged stream", one(form=7, shape=(99,), sent=9, where=bytes(8), what=ONES * 5)),
    "stream with a tail": (
        "damaged stream",
        one(form=7, sent=2, where=struct.pack("<II", 1 << 16, 1 << 16) + bytes(2), what=ONES),
    ),
    "band at zero": ("NaN", one(form=1 | 1 << 3, shape=(2,), sent=2, what=bytes(7))),
    "band wider than the type": (
        "1 where at most 0",
        one(form=1 | 1 << 3, shape=(2,), sent=2, what=b"\x01\x1f\x01" + bytes(5)),
    ),
    "band up to infinity": (
        "NaN",
        one(form=1 | 1 << 3, shape=(2,), sent=2, what=varint(0x7F7FFFFF) + b"\x00\x01\x00\x00\x00\x0f"),
    ),
    "band with a tail": ("1 bytes too many", one(form=1 | 1 << 3, shape=(2,), sent=2, what=BAND_OF_ONE + b"\0\0")),
    "band of a double": (
        "form that its type",
        one(form=1 | 1 << 3 | 3 << 6, shape=(2,), sent=2, what=BAND_OF_ONE + b"\0"),
    ),
    "levels that do not rise": (
        "do not rise",
        one(form=1 | 2 << 3, shape=(2,), sent=2, what=b"\x01\x05\x00\x00\x00\x00"),
    ),
    "levels beyond infinity": (
        "do not rise",
        one(form=1 | 2 << 3, shape=(2,), sent=2, what=b"\x00" + varint(0x7F800000) + bytes(3)),
    ),
    "symbol without a level": (
        "1 where at most 0",
        one(form=1 | 2 << 3, shape=(2,), sent=2, what=b"\x00\x05\x00\x01\x00"),
    ),
}


@pytest.mark.parametrize(("reason", "body"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_bytes_are_refused_soon_and_without_large_allocations(reason, body):
    with pytest.raises(WireError, match=reason):  # compiles what this payload reaches
        wire.decode(body)
    tracemalloc.start()
    begin = time.process_time()
    with pytest.raises(WireError):
        wire.decode(body)
    seconds = time.process_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seconds < 0.05
    assert peak < 1 << 20


def test_the_handmade_payloads_are_refused_for_one_fault_each():
    assert wire.decode(one(form=1, shape=(2,), sent=2, what=ONES))["w"].tolist() == [1, 1]
    assert wire.decode(one(form=2, sent=2, where=b"\x09", what=ONES))["w"].tolist() == [1, 0, 0, 1]
    assert wire.decode(one(form=3, sent=2, where=b"\x02\x08", what=ONES))["w"].tolist() == [1, 0, 0, 1]
    nibbles = wire.decode(one(form=6, shape=(8,), sent=4, where=b"\x00\x03", what=ONES * 2))["w"]
    assert nibbles.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]
    assert wire.decode(one(form=1 | 1 << 3, shape=(2,), sent=2, what=BAND_OF_ONE + b"\2"))["w"].tolist() == [1, -1]


@given(st.binary(max_size=200), st.booleans())
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_are_a_tree(rest, seal):
    check(sealed(rest) if seal else rest)


@given(st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_every_truncation_is_refused(cut):
    body = SEEDS[cut % len(SEEDS)]
    shorter = body[8 : 8 + cut % (len(body) - 8)]
    with pytest.raises(WireError):
        wire.decode(sealed(shorter))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_mutated_payloads_are_refused_or_are_a_tree(part):
    """The checksum of each is right, so that it is the decoder that meets them."""
    draw = random.Random(part)
    valid, slowest = 0, 0.0
    for _ in range(MUTATIONS):
        body = mutate(draw.choice(SEEDS), draw)
        begin = time.process_time()
        valid += check(body)
        slowest = max(slowest, time.process_time() - begin)
    assert 0.01 < valid / MUTATIONS < 0.9  # mutations reach the decoder, and do break things
    assert slowest < 1.0


def check(body: bytes) -> bool:
    """Decode; return whether it is a valid tree."""
    try:
        tree = wire.decode(body, max_entries=FEW)
    except WireError:
        return False
    for tensor in tree.values():
        assert bool(torch.isfinite(tensor).all())
    return True


def mutate(body: bytes, draw: random.Random) -> bytes:
    """Change a payload in one of the ways in which accidents and attackers do, and make its checksum right again."""
    if draw.random() < 0.5:
        return rewritten(body, draw)
    rest = bytearray(body[8:])
    at = draw.randrange(len(rest))
    match draw.randrange(6):
        case 0 | 1:
            for _ in range(draw.randint(1, 3)):
                rest[draw.randrange(len(rest))] ^= 1 << draw.randrange(8)
        case 2:
            rest[at] = draw.choice((0, 1, 2, 0x7F, 0x80, 0xFF))
        case 3:
            del rest[at:]
        case 4:
            return sealed(damaged(body[8:], draw))
        case 5:
            other = draw.choice(SEEDS)
            rest[at:] = other[draw.randrange(8, len(other)) :]
    return sealed(bytes(rest))


def rewritten(body: bytes, draw: random.Random) -> bytes:
    """Change one section or one description and write a frame that fits it, so that the sections are really read."""
    entries, sections = (list(part) for part in parts(body))
    which = draw.randrange(len(sections))
    sections[which] = damaged(sections[which], draw)
    entry = entries[which // 2]
    match draw.randrange(8):
        case 0:
            entry = replace(entry, sent=max(entry.sent + draw.choice((-1, 1, 7)), 0))
        case 1:
            entry = replace(entry, shape=(*entry.shape, draw.choice((0, 2, 3))))
        case 2:
            entry = replace(entry, positions=draw.choice(list(Positions)), values=draw.choice(list(Values)))
        case 3:
            entry = replace(entry, kind=draw.choice(KINDS))
    index = which // 2 * 2
    sizes = {"position_bytes": len(sections[index]), "value_bytes": len(sections[index + 1])}
    entries[which // 2] = replace(entry, **sizes)
    return write_frame(entries, sections, None)


@cache
def parts(body: bytes) -> tuple[tuple[Entry, ...], tuple[bytes, ...]]:
    """The descriptions and the sections of a payload."""
    frame = read_frame(body)
    sizes = [size for entry in frame.entries for size in (entry.position_bytes, entry.value_bytes)]
    ends = list(itertools.accumulate(sizes))
    return frame.entries, tuple(frame.data[end - size : end].tobytes() for end, size in zip(ends, sizes, strict=True))


def damaged(section: bytes, draw: random.Random) -> bytes:
    """Change, remove or insert a few bytes."""
    at = draw.randrange(len(section) + 1)
    gone = draw.randint(0, 2)
    return section[:at] + draw.randbytes(draw.choice((gone, gone, 0, 1, 3))) + section[at + gone :]


def seeds() -> list[bytes]:
    """Payloads of every form, small enough that a mutation often hits something that matters."""
    rng = torch.Generator().manual_seed(0)

    def sparse(n: int, share: float) -> torch.Tensor:
        return torch.randn(n, generator=rng) * (torch.rand(n, generator=rng) < share)

    trees: list[Grads] = [
        {"w": sparse(40, 0.3)},
        {"w": sparse(400, 0.2), "b": sparse(9, 0.5)},
        {"w": sparse(400, 0.2).half(), "b": torch.zeros(3)},
        {"w": sparse(400, 0.2).bfloat16().reshape(20, 20)},
        {"w": sparse(30, 0.5).double()},
        {"w": sparse(500, 0.01)},
        {"w": sparse(12_000, 0.01).sign()},
        {"w": (sparse(600, 0.3) * 2).round()},
        {"w": sparse(60, 0.2).repeat_interleave(8)},
        {"w": sparse(150, 0.2).repeat_interleave(4).sign()},
        {"w": sparse(1500, 1.0).abs().half()},
        {"": torch.tensor(1.5), "\N{GREEK SMALL LETTER ALPHA}": torch.zeros(0, 5)},
    ]
    return [wire.encode(tree) for tree in trees]


SEEDS = seeds()
