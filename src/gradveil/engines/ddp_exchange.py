"""What ranks tell each other: counts, masks, and protected values in the collective that moves the fewest bytes."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core import Grads, Masks
from ..errors import EngineError
from .packing import pack_masks, pack_sparse, sparse_pays, unpack_masks, unpack_sparse


@dataclass
class Transit:
    """Protected values on their way."""

    size: int  # of the vector
    keep: Tensor | None  # the common positions, in aligned rounds
    room: int | None  # values in a packed message; None when `parts` holds one sum
    parts: list[Tensor]  # none if no rank has anything to send
    work: Any


class Exchange:
    """One rank's side of all collectives; a peer that is gone shows as `EngineError`."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.world, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.step = 0  # for messages
        self.bytes_sent = 0  # what this rank handed to collectives
        self.device = device
        self._group = group

    def agree(self, values: list[int]) -> list[int]:
        """Return the largest of each value over all ranks."""
        shared = torch.tensor(values, dtype=torch.int64, device=self.device)
        with self._explained():
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        self.bytes_sent += shared.nbytes
        return [int(value) for value in shared.tolist()]

    def common_mask(self, leader: int, own: Masks | None, like: Grads) -> Masks:
        """Return the leader's masks; the leader itself passes them as `own`."""
        if own is not None:
            packed = pack_masks(own)
            self.bytes_sent += packed.nbytes
        else:
            size = math.ceil(sum(tensor.numel() for tensor in like.values()) / 8)
            packed = torch.empty(size, dtype=torch.uint8, device=self.device)
        with self._explained():
            dist.broadcast(packed, src=dist.get_global_rank(self._group, leader), group=self._group)
        return unpack_masks(packed, like)

    def start(self, flat: Tensor, keep: Tensor | None) -> Transit:
        """Start to add a vector up over all ranks: inside the mask, packed, or dense."""
        room = None
        message = flat if keep is None else flat[keep]
        if keep is None:
            most = self.agree([int(torch.count_nonzero(flat))])[0]
            if most == 0:
                return Transit(flat.numel(), None, 0, [], None)
            if sparse_pays(flat.numel(), most, self.world):
                room, message = most, pack_sparse(flat, most)
        with self._explained():
            if room is not None:
                parts = [torch.empty_like(message) for _ in range(self.world)]
                work = dist.all_gather(parts, message, group=self._group, async_op=True)
            else:
                parts = [message]
                work = dist.all_reduce(message, group=self._group, async_op=True)
        self.bytes_sent += message.nbytes
        return Transit(flat.numel(), keep, room, parts, work)

    def finish(self, transit: Transit) -> Tensor:
        """Wait, and return the mean over all ranks."""
        if transit.work is not None:
            with self._explained():
                transit.work.wait()
        total = torch.zeros(transit.size, device=self.device)
        if transit.keep is not None:
            total.masked_scatter_(transit.keep, transit.parts[0])
        elif transit.room is not None:
            for part in transit.parts:  # in rank order, so that every rank adds alike
                total += unpack_sparse(part, transit.size, transit.room)
        else:
            total = transit.parts[0]
        return total / self.world

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise when a peer is gone or the group timed out
            raise EngineError(
                f"rank {self.rank} of {self.world} lost its peers in step {self.step}: a rank died, or the group's "
                f"timeout passed. Start all ranks again from their last checkpoint. ({error})"
            ) from error
