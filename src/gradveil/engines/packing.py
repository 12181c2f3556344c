"""Sparse numbers as bytes, on any device: values first, then one bit per position."""

import math

import numpy as np
import torch
from torch import Tensor

from ..core import Grads, Masks
from ..errors import WireError


def pack_bits(flags: Tensor) -> Tensor:
    """Return a flat bool tensor as bytes, lowest bit first.

    >>> pack_bits(torch.tensor([True, False, True] + [False] * 6 + [True]))
    tensor([5, 2], dtype=torch.uint8)
    """
    if not flags.is_cuda:  # numpy is many times as fast as the same in torch
        return torch.from_numpy(np.packbits(flags.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(flags.to(torch.uint8), (0, -flags.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=flags.device)).sum(1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, size: int) -> Tensor:
    """Return the first `size` flags of packed bytes.

    >>> unpack_bits(torch.tensor([5], dtype=torch.uint8), 3)
    tensor([ True, False,  True])
    """
    if not packed.is_cuda:
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=size, bitorder="little")).bool()
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).bool().view(-1)[:size]


def pack_sparse(flat: Tensor, room: int) -> Tensor:
    """Return the entries of a float32 vector that are not zero as bytes, with room for `room` values.

    >>> unpack_sparse(pack_sparse(torch.tensor([0.0, 2.0, 0.0]), 2), 3, 2)
    tensor([0., 2., 0.])
    """
    keep = flat != 0
    values = flat.new_zeros(room)
    sent = flat[keep]
    values[: sent.numel()] = sent
    return torch.cat([values.view(torch.uint8), pack_bits(keep)])


def unpack_sparse(message: Tensor, size: int, room: int) -> Tensor:
    """Return the vector of `size` entries in a message of `pack_sparse`."""
    keep = unpack_bits(message[4 * room :], size)
    values = message[: 4 * room].clone().view(torch.float32)
    return torch.zeros(size, device=message.device).masked_scatter_(keep, values)


def sparse_pays(size: int, room: int, world: int) -> bool:
    """Say whether gathering packed messages moves fewer bytes per rank than a dense ring, which moves all twice.

    >>> sparse_pays(1000, 200, world=4), sparse_pays(1000, 200, world=16)
    (True, False)
    """
    return (4 * room + math.ceil(size / 8)) * (world - 1) < 8 * size * (world - 1) / world


def pack_masks(masks: Masks) -> Tensor:
    """Return the masks of all tensors as bytes, one after the other by name: the order of a dict may change."""
    return pack_bits(torch.cat([masks[name].reshape(-1) for name in sorted(masks)]))


def unpack_masks(packed: Tensor, like: Grads) -> Masks:
    """Return the masks in `packed`; raises `WireError` if the bytes do not fit the shapes of `like`."""
    names = sorted(like)
    sizes = [like[name].numel() for name in names]
    if packed.dtype != torch.uint8 or packed.numel() != math.ceil(sum(sizes) / 8):
        raise WireError(f"a mask of {sum(sizes)} positions does not take {packed.numel()} bytes")
    parts = dict(zip(names, torch.split(unpack_bits(packed, sum(sizes)), sizes), strict=True))
    return {name: parts[name].view(tensor.shape) for name, tensor in like.items()}
