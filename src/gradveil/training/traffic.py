"""What a round costs on the wire: real bytes from real encodings, and the paper's own count beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from .. import wire
from ..core import Masks, Payload, Tensors


def paper_bytes(sent: float, total: int, room: int | None = None) -> tuple[float, float]:
    """Return (up, down) in bytes as the paper counts them, for `sent` of `total` entries.

    A sent entry costs 32 bits and a pruned one 1 bit. In an aligned round `room` entries lie in the common mask, and
    the mask is charged to the download. A receiver could not decode this; `Traffic` counts what really crosses.

    >>> paper_bytes(20, 100), paper_bytes(20, 100, room=40), paper_bytes(100, 100)
    ((90.0, 400.0), (82.5, 172.5), (400.0, 400.0))
    """
    inside = total if room is None else room
    flags = inside - sent if sent < total else 0
    down = 32 * total if room is None else 32 * room + total
    return (32 * sent + flags) / 8, down / 8


def entries_sent(raw: int, received: int, total: int) -> int:
    """Return how many entries the paper would charge 32 bits for.

    Zeros that were in the raw gradient already were not pruned: an undefended gradient counts as dense.
    """
    return total if received >= raw else received


@dataclass(frozen=True)
class Traffic:
    """The messages of one round.

    Users repeat the server's momentum step themselves, so the mean of what was sent is all they download; one who
    missed the round before first needs the model. The initial model is not counted: all build it from the seed.
    """

    payloads: Sequence[Payload]  # of the users that were measured
    mean: Tensors  # what the server sends back
    mask: Masks | None  # of an aligned round
    statistics: Tensors  # BatchNorm statistics of one user; empty if none are sent
    model: Tensors  # what a newcomer downloads
    newcomers: int = 0
    participants: int = 1

    def per_user(self) -> tuple[float, float]:
        """Return the mean bytes (up, down) of a user."""
        n = self.participants
        extra = len(wire.encode(self.statistics)) if self.statistics else 0
        mask = 0 if self.mask is None else mask_bytes(self.mask)
        up = sum(p.nbytes for p in self.payloads) / len(self.payloads) + extra + mask / n
        down = len(wire.encode(self.mean, within=self.mask)) + extra + mask * (n - 1) / n
        if self.newcomers:
            down += len(wire.encode(self.model)) * self.newcomers / n
        return up, down


def mask_bytes(mask: Masks) -> int:
    """Return the size of a common mask on the wire, as positions that all carry the same value."""
    return len(wire.encode({name: m.float() for name, m in mask.items()}))
