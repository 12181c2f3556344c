"""Gradients as bytes and back."""

import struct

import torch

from .core import Grads, Masks
from .errors import WireError


def encode(grads: Grads, *, within: Masks | None = None) -> bytes:
    """Return the payload body of a gradient tree."""
    from safetensors.torch import save

    return struct.pack("<4s", b"GVW0") + save({k: v.contiguous() for k, v in grads.items()})


def decode(body: bytes, *, like: Grads | None = None, within: Masks | None = None) -> Grads:
    """Return the gradient tree of a payload body; `like` gives the names, shapes and types to expect."""
    from safetensors.torch import load

    try:
        out = load(body[4:])
    except Exception as error:
        raise WireError(str(error)) from error
    return out if like is None else {name: out[name] for name in like}


def paper_bits(grads: Grads) -> int:
    """Return the size the paper would charge: 32 bits for a sent entry, 1 bit for a pruned one."""
    sent = sum(int(torch.count_nonzero(g)) for g in grads.values())
    total = sum(g.numel() for g in grads.values())
    return 32 * sent + (total - sent if sent < total else 0)
