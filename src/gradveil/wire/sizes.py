"""What a payload costs, measured on its bytes, with the paper's accounting beside it."""

from dataclasses import dataclass

import numpy as np
import torch

from ..core import Grads, Masks
from .frame import read_frame
from .symbols import entropy_bits

PAPER_FLOAT = 32  # bits the paper charges for a sent entry; a pruned one costs 1


@dataclass(frozen=True)
class TensorSize:
    """What one tensor costs."""

    entries: int
    sent: int  # entries that are not zero
    form: str  # such as "coded_bytes+band"
    positions_bytes: int
    values_bytes: int
    floor_bytes: float  # entropy of `sent` positions among `entries`, all equally likely


@dataclass(frozen=True)
class SizeReport:
    """What a payload costs. The parts add up: header + positions + values = total."""

    total_bytes: int
    header_bytes: int
    positions_bytes: int
    values_bytes: int
    dense_bytes: int  # the same tensors uncompressed, without names
    floor_bytes: float  # entropy of the positions; structure in them lets a payload go below
    paper_bytes: float
    tensors: dict[str, TensorSize]

    @property
    def ratio(self) -> float:
        """The payload over the uncompressed tensors."""
        return self.total_bytes / self.dense_bytes if self.dense_bytes else 1.0

    @property
    def paper_ratio(self) -> float:
        """What the paper would report: its charge over 32 bits an entry."""
        entries = sum(tensor.entries for tensor in self.tensors.values())
        return self.paper_bytes / (entries * PAPER_FLOAT / 8) if entries else 1.0


def paper_bits(grads: Grads, *, within: Masks | None = None) -> int:
    """Return the size the paper would charge: 32 bits for a sent entry, 1 bit for a pruned one.

    In an aligned round only pruned entries inside the common mask are charged. No receiver could decode so few flags:
    it does not know beforehand which entries are pruned. `len(encode(...))` is what is really sent.

    >>> paper_bits({"w": torch.tensor([0.0, 2.0, 0.0])})
    34
    """
    sent = sum(int(torch.count_nonzero(g)) for g in grads.values())
    charged = sum(g.numel() if within is None else int(within[name].sum()) for name, g in grads.items())
    return PAPER_FLOAT * sent + max(charged - sent, 0)


def size_report(grads: Grads, body: bytes, *, within: Masks | None = None) -> SizeReport:
    """Return where the bytes of `body`, the payload of `grads`, go."""
    frame = read_frame(body)
    tensors = {}
    for entry in frame.entries:
        grad = grads[entry.name]
        places = int(within[entry.name].sum()) if entry.inside and within is not None else grad.numel()
        sent = int(torch.count_nonzero(grad))
        tensors[entry.name] = TensorSize(
            entries=grad.numel(),
            sent=sent,
            form=f"{entry.positions.name}+{entry.values.name}".lower(),
            positions_bytes=entry.position_bytes,
            values_bytes=entry.value_bytes,
            floor_bytes=entropy_bits(np.array([sent, places - sent])) / 8,
        )
    return SizeReport(
        total_bytes=len(body),
        header_bytes=len(body) - frame.data.size,
        positions_bytes=sum(t.positions_bytes for t in tensors.values()),
        values_bytes=sum(t.values_bytes for t in tensors.values()),
        dense_bytes=sum(g.numel() * g.element_size() for g in grads.values()),
        floor_bytes=sum(t.floor_bytes for t in tensors.values()),
        paper_bytes=paper_bits(grads, within=within) / 8,
        tensors=tensors,
    )
