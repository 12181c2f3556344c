"""Gradient trees to bytes and back."""

import zlib
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core import Grads, Masks
from ..errors import GradientError, WireError
from . import passes
from .frame import MAX_TENSOR, Bytes, Entry, Frame, Kind, Positions, Reader, Values, kind_of, read_frame, write_frame
from .positions import read_flags, read_indices, write_positions
from .values import Patterns, read_values, write_plain, write_values

MAX_ENTRIES = 1 << 28  # what a payload may declare when the receiver does not say what it expects
Mask = NDArray[np.bool_]


def encode(grads: Grads, *, within: Masks | None = None) -> bytes:
    """Return the payload body of a gradient tree, each tensor in the smallest form.

    Guarantees: `decode` gives back every bit, but for a negative zero, which comes back as a positive one: a zero is
    an entry that was not sent. `within` holds the common masks of an aligned round; positions are then counted inside
    them only, and the receiver needs the same masks. Raises `GradientError` on NaN, infinity or an unknown type.

    >>> body = encode({"w": torch.tensor([0.0, -3.0, 0.0, 0.5])})
    >>> len(body), decode(body)
    (27, {'w': tensor([ 0.0000, -3.0000,  0.0000,  0.5000])})
    """
    entries, sections = [], []
    for name, tensor in grads.items():
        entry, positions, values = _encode_tensor(name, tensor, _own_mask(name, tensor, within))
        entries.append(entry)
        sections += [positions, values]
    inside = [_flat_mask(within[entry.name]) for entry in entries if within is not None and entry.inside]
    return write_frame(entries, sections, _checksum(inside) if inside else None)


def decode(
    body: bytes, *, like: Grads | None = None, within: Masks | None = None, max_entries: int = MAX_ENTRIES
) -> Grads:
    """Return the gradient tree of a payload body; entries that were not sent are exact zeros.

    Guarantees: anything that is not a payload raises `WireError`, after work in proportion to its bytes. `like` gives
    names, shapes and types, which must match exactly before anything is allocated, and the devices to put the tensors
    on; without it the payload may declare `max_entries` in all. Does not guarantee who sent the bytes: the checksum
    finds accidents, not forgeries.
    """
    if like is None:
        frame = read_frame(body)
        _check_total(frame, max_entries)
    else:
        frame = read_frame(body, max_tensors=len(like))
        _check_like(frame, like)
    masks = _masks_for(frame, within)
    out: Grads = {}
    offset = 0
    for entry in frame.entries:
        middle, end = offset + entry.position_bytes, offset + entry.position_bytes + entry.value_bytes
        flat = _decode_tensor(entry, frame.data[offset:middle], frame.data[middle:end], masks.get(entry.name))
        out[entry.name] = _to_tensor(flat, entry)
        offset = end
    return out if like is None else {name: out[name].to(tensor.device) for name, tensor in like.items()}


def _encode_tensor(name: str, tensor: Tensor, mask: Mask | None) -> tuple[Entry, bytes, bytes]:
    kind = kind_of(name, tensor)
    if tensor.numel() > MAX_TENSOR:
        raise ValueError(f"{name} has {tensor.numel()} entries, a tensor on the wire at most {MAX_TENSOR}: split it")
    bits = tensor.detach().reshape(-1).view(kind.signed).cpu().numpy().view(kind.bits)
    magnitude_mask = kind.bits(kind.magnitude_mask)
    covered = None if mask is None else bits[mask]
    # Where something was sent outside the mask, as noise can be, positions are counted among all entries.
    inside = covered is not None and np.count_nonzero(covered & magnitude_mask) == np.count_nonzero(
        bits & magnitude_mask
    )
    if covered is not None and inside:
        bits = covered
    flags, sent = _scan(bits, kind)
    if sent.size and int((sent & magnitude_mask).max()) >= kind.infinity:
        raise GradientError(f"{name} holds NaN or infinity: skip this batch, it must not be sent")
    positions, where = write_positions(flags, bits.size, sent.size)
    if sent.size == 0 or kind.size > 4:
        values, what = Values.PLAIN, write_plain(sent, kind)
    else:
        values, what = write_values(sent, kind)
    shape = tuple(tensor.shape)
    inside = inside and sent.size > 0
    return Entry(name, kind, shape, positions, values, inside, sent.size, len(where), len(what)), where, what


def _scan(bits: Patterns, kind: Kind) -> tuple[Bytes, Patterns]:
    """Return one flag bit per entry, and the patterns of the entries that are not zero (32 bits wide, or 64)."""
    magnitude_mask = kind.bits(kind.magnitude_mask)
    if kind.size > 4:
        is_sent = (bits & magnitude_mask) != 0
        return np.packbits(is_sent, bitorder="little"), bits[is_sent]
    flags = np.zeros(-(-bits.size // 8), np.uint8)
    sent = np.empty(bits.size + 1, np.uint32)
    count = passes.scan(bits.astype(np.uint32, copy=False), np.uint32(magnitude_mask), flags, sent)
    return flags, sent[:count]


def _decode_tensor(entry: Entry, where: Bytes, what: Bytes, mask: Mask | None) -> Patterns:
    n = entry.numel if mask is None else int(np.count_nonzero(mask))
    count, kind, mode = entry.sent, entry.kind, entry.positions
    places, values = (
        Reader(where, f"the position section of {entry.name!r}"),
        Reader(what, f"the value section of {entry.name!r}"),
    )
    if count > n or (mode is Positions.ALL and count != n):
        places.refuse(f"declares {count} entries sent of {n}")
    if mode is Positions.NONE:
        out: Patterns = np.zeros(n, kind.bits)
    elif mode is Positions.ALL:
        out = read_values(entry.values, values, count, kind)
    elif mode in (Positions.INDEX, Positions.CODED_GAPS):
        indices = read_indices(mode, places, n, count)
        sent = read_values(entry.values, values, count, kind)
        out = np.zeros(n, kind.bits)
        out[indices] = sent
    else:
        flags = read_flags(mode, places, n, count)
        sent = read_values(entry.values, values, count, kind)
        out = np.zeros(n, kind.bits)
        passes.scatter(flags, sent, out)
    places.finish()
    values.finish()
    if mask is None:
        return out
    whole = np.zeros(entry.numel, kind.bits)
    whole[mask] = out
    return whole


def _to_tensor(flat: Patterns, entry: Entry) -> Tensor:
    signed = flat.view(f"i{entry.kind.size}")
    return torch.from_numpy(signed).view(entry.kind.dtype).reshape(entry.shape)


def _check_total(frame: Frame, max_entries: int) -> None:
    total = sum(entry.numel for entry in frame.entries)
    if total > max_entries:
        raise WireError(
            f"the payload declares {total} entries, more than {max_entries}: pass like=..., or raise max_entries "
            "if you expect so many"
        )


def _check_like(frame: Frame, like: Grads) -> None:
    declared = {entry.name: entry for entry in frame.entries}
    if declared.keys() != like.keys():
        odd = sorted(declared.keys() ^ like.keys())[0]
        raise WireError(f"the payload is not of the expected parameters: they differ in {odd[:80]!r}")
    for name, tensor in like.items():
        entry = declared[name]
        if entry.shape != tuple(tensor.shape) or entry.kind.dtype != tensor.dtype:
            raise WireError(
                f"the payload has {name} as {entry.kind.dtype} {entry.shape}, expected {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


def _own_mask(name: str, tensor: Tensor, within: Masks | None) -> Mask | None:
    if within is None:
        return None
    if name not in within or within[name].dtype != torch.bool or within[name].shape != tensor.shape:
        raise ValueError(f"within needs one bool mask per tensor, of the same shape; the one of {name!r} does not fit")
    return _flat_mask(within[name])


def _masks_for(frame: Frame, within: Masks | None) -> dict[str, Mask]:
    """Return the masks of the entries that count inside them, checked to be the sender's."""
    needed = [entry for entry in frame.entries if entry.inside]
    for entry in needed:
        if within is None or entry.name not in within or tuple(within[entry.name].shape) != entry.shape:
            raise WireError(f"{entry.name!r} was sent inside a common mask: pass the round's masks as within=...")
    masks = {entry.name: _flat_mask(within[entry.name]) for entry in needed if within is not None}
    if needed and _checksum(masks.values()) != frame.mask_checksum:
        raise WireError("the payload was sent inside another common mask than the one given")
    return masks


def _flat_mask(mask: Tensor) -> Mask:
    flat: Mask = mask.detach().reshape(-1).cpu().numpy()
    return flat


def _checksum(masks: Iterable[Mask]) -> int:
    value = 0
    for mask in masks:
        value = zlib.crc32(np.packbits(mask, bitorder="little").tobytes(), value)
    return value
