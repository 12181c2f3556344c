"""The frame of a payload: magic, version, checksum, and one description per tensor before any data.

Everything a receiver must know to refuse a payload stands in the descriptions, so names, shapes, types and sizes are
settled before anything is allocated. docs/wire-format.md gives every byte.
"""

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import GradientError, WireError

MAGIC = b"GVW"
VERSION = 1
PREFIX = 8  # magic, version, checksum; the checksum covers all that follows
MAX_NAME = 1024  # bytes of UTF-8
MAX_TENSORS = 1 << 14
MAX_DIMS = 64  # as in PyTorch
MAX_TENSOR = (1 << 32) - 1  # entries of one tensor: positions and gaps fit 32 bits
SPARSEST_FLAGS = 64  # coded flags need one sent entry in 64, so work is bounded by the bytes received

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]


class Positions(IntEnum):
    """How a tensor says which of its entries follow."""

    NONE = 0  # all entries are zero
    ALL = 1  # no entry is zero
    BITMAP = 2
    INDEX = 3
    CODED_GAPS = 4
    CODED_BYTES = 5
    CODED_NIBBLES = 6
    EVEN_NIBBLES = 7  # coded by a table that both sides derive from the share sent


class Values(IntEnum):
    """How a tensor writes the entries that follow."""

    PLAIN = 0
    BAND = 1
    LEVELS = 2


@dataclass(frozen=True)
class Kind:
    """A floating-point type, seen as bit patterns: a sign above a magnitude that orders like an integer."""

    code: int
    dtype: torch.dtype
    signed: torch.dtype  # the integer type of the same size
    bits: type[np.unsignedinteger[Any]]
    infinity: int  # the pattern of infinity; finite magnitudes lie below

    @property
    def size(self) -> int:
        """Bytes of one entry."""
        return self.dtype.itemsize

    @property
    def magnitude_mask(self) -> int:
        """All bits but the sign."""
        return (1 << (8 * self.size - 1)) - 1


KINDS = (
    Kind(0, torch.float32, torch.int32, np.uint32, 0x7F80_0000),
    Kind(1, torch.float16, torch.int16, np.uint16, 0x7C00),
    Kind(2, torch.bfloat16, torch.int16, np.uint16, 0x7F80),
    Kind(3, torch.float64, torch.int64, np.uint64, 0x7FF0_0000_0000_0000),
)


def kind_of(name: str, tensor: torch.Tensor) -> Kind:
    """Return the kind of a tensor or say that its type cannot be sent."""
    for kind in KINDS:
        if tensor.dtype == kind.dtype:
            return kind
    known = ", ".join(str(kind.dtype).removeprefix("torch.") for kind in KINDS)
    raise GradientError(f"{name} has type {tensor.dtype}, which the wire does not carry: convert it to one of {known}")


@dataclass(frozen=True)
class Entry:
    """The description of one tensor."""

    name: str
    kind: Kind
    shape: tuple[int, ...]
    positions: Positions
    values: Values
    inside: bool  # positions count inside the common mask only
    sent: int
    position_bytes: int
    value_bytes: int

    @property
    def numel(self) -> int:
        """The number of entries of the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Frame:
    """A payload whose frame was read and whose data was not."""

    entries: tuple[Entry, ...]
    mask_checksum: int | None
    data: Bytes  # the sections, positions before values, in the order of the entries


def varint(value: int) -> bytes:
    """Return `value` in LEB128: seven bits a byte, the lowest first, the top bit set on all bytes but the last."""
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class Reader:
    """A cursor over received bytes that never moves past their end."""

    def __init__(self, data: Bytes, what: str) -> None:
        self._data = data
        self._view = data.data  # single bytes come faster from here
        self._at = 0
        self._what = what

    def refuse(self, why: str) -> NoReturn:
        """Raise the `WireError` of this part of the payload."""
        raise WireError(f"bad payload: {self._what} {why}")

    def rest(self) -> Bytes:
        """Return what was not read yet, without moving."""
        return self._data[self._at :]

    def take(self, count: int) -> Bytes:
        """Return the next `count` bytes."""
        if count > self._data.size - self._at:
            self.refuse("is cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def byte(self, limit: int = 255) -> int:
        """Return the next byte, which must not exceed `limit`."""
        if self._at == len(self._view):
            self.refuse("is cut short")
        value = self._view[self._at]
        self._at += 1
        if value > limit:
            self.refuse(f"holds {value} where at most {limit} is allowed")
        return value

    def varint(self, limit: int) -> int:
        """Return the next varint, which must not exceed `limit`."""
        value = 0
        for shift in range(0, 64, 7):
            byte = self.byte()
            value |= (byte & 127) << shift
            if byte < 128:
                break
        if byte >= 128 or value > limit:
            self.refuse(f"declares more than {limit}")
        return value

    def finish(self) -> None:
        """Refuse bytes left over."""
        if self._at != self._data.size:
            self.refuse(f"has {self._data.size - self._at} bytes too many")


def write_frame(entries: Sequence[Entry], sections: Sequence[bytes], mask_checksum: int | None) -> bytes:
    """Return the payload made of these descriptions and their sections."""
    if len(entries) > MAX_TENSORS:
        raise ValueError(f"a payload holds at most {MAX_TENSORS} tensors, got {len(entries)}: send several payloads")
    head = [b"\0" if mask_checksum is None else b"\1" + struct.pack("<I", mask_checksum), varint(len(entries))]
    for entry in entries:
        name = entry.name.encode()
        if len(name) > MAX_NAME:
            raise ValueError(f"a tensor's name may have {MAX_NAME} bytes, {entry.name[:40]!r}... has {len(name)}")
        form = entry.positions | entry.values << 3 | entry.inside << 5 | entry.kind.code << 6
        head += [varint(len(name)), name, bytes((form, len(entry.shape))), *map(varint, entry.shape)]
        head += [varint(entry.sent), varint(entry.position_bytes), varint(entry.value_bytes)]
    rest = b"".join([*head, *sections])
    return MAGIC + struct.pack("<BI", VERSION, zlib.crc32(rest)) + rest


def read_frame(body: bytes, max_tensors: int = MAX_TENSORS) -> Frame:
    """Return the frame of a payload; raises `WireError` on anything that is not one."""
    if len(body) < PREFIX or body[:3] != MAGIC:
        raise WireError("bad payload: it does not begin like a gradveil payload")
    if body[3] != VERSION:
        raise WireError(f"payload of wire version {body[3]}, this side reads version {VERSION}: use the same release")
    if zlib.crc32(memoryview(body)[PREFIX:]) != struct.unpack_from("<I", body, 4)[0]:
        raise WireError("bad payload: the checksum does not match, so bytes were lost or changed on the way")
    # A copy, because compiled loops would be compiled once more for read-only arrays.
    reader = Reader(np.frombuffer(body, np.uint8, offset=PREFIX).copy(), "the header")
    aligned = reader.byte(limit=1)
    mask_checksum = int.from_bytes(reader.take(4).tobytes(), "little") if aligned else None
    count = reader.varint(max_tensors)
    entries = tuple(_read_entry(reader) for _ in range(count))
    data = reader.rest()
    _check(entries, data.size, bool(aligned))
    return Frame(entries, mask_checksum, data)


def _read_entry(reader: Reader) -> Entry:
    length = reader.varint(MAX_NAME)
    try:
        name = reader.take(length).tobytes().decode()
    except UnicodeDecodeError:
        reader.refuse("holds a name that is not UTF-8")
    form = reader.byte()
    if (form >> 3 & 3) > max(Values):
        reader.refuse(f"asks for an unknown form of {name!r}")
    dims = reader.byte(limit=MAX_DIMS)
    shape = tuple(reader.varint((1 << 63) - 1) for _ in range(dims))
    numel = math.prod(shape)
    if numel > MAX_TENSOR:
        reader.refuse(f"declares {numel} entries for {name!r}, a tensor has at most {MAX_TENSOR}")
    return Entry(
        name=name,
        kind=KINDS[form >> 6],
        shape=shape,
        positions=Positions(form & 7),
        values=Values(form >> 3 & 3),
        inside=bool(form >> 5 & 1),
        sent=reader.varint(numel),
        position_bytes=reader.varint(MAX_TENSOR),
        value_bytes=reader.varint(1 << 40),
    )


def _check(entries: Sequence[Entry], data_bytes: int, aligned: bool) -> None:
    """Refuse what cannot be decoded, before anything of the declared sizes is allocated."""
    if len({entry.name for entry in entries}) != len(entries):
        raise WireError("bad payload: two tensors have the same name")
    if sum(entry.position_bytes + entry.value_bytes for entry in entries) != data_bytes:
        raise WireError("bad payload: the sections do not add up to the bytes that follow the header")
    for entry in entries:
        # Every sent entry has at least its sign in the value bytes, so nobody can declare many with few bytes.
        if entry.sent > 8 * entry.value_bytes:
            raise WireError(f"bad payload: {entry.name!r} has too few bytes for {entry.sent} sent entries")
        if (entry.sent == 0) != (entry.positions is Positions.NONE):
            raise WireError(f"bad payload: {entry.name!r} does not say where its {entry.sent} sent entries go")
        if entry.inside and not aligned:
            raise WireError(f"bad payload: {entry.name!r} counts inside a mask that is not named")
