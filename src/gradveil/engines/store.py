"""A client's memory between rounds: uploads are confirmed or taken back, and a kill loses nothing.

What a client holds back, and what it sent without knowing yet whether the server used it, is one set of tensors. It is
written after every upload and before the bytes leave. The next request says which upload the server used last; an
upload it did not use goes back into the residual. So at any moment

    sum of all gradients = what the server used + the upload on its way + the residual,

to rounding, whatever was killed, dropped, repeated or late in between.
"""

import contextlib
import fcntl
import secrets
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .. import tree
from ..core import Grads, Masks, Payload, Tensors
from ..errors import StateError
from ..files import write_tensors
from ..veil import Veil
from .packing import pack_masks, unpack_masks


@dataclass(frozen=True)
class FileStore:
    """Tensors in one file: replaced as a whole, on the disk before `save` returns, readable by its owner only."""

    path: Path

    def load(self) -> Tensors:
        """Return what was saved last, nothing if there is no file."""
        if not self.path.exists():
            return {}
        try:
            return load_file(self.path)
        except (OSError, SafetensorError) as error:
            raise StateError(f"cannot read the client's memory {self.path}: {error}") from error

    def save(self, tensors: Tensors) -> None:
        """Replace the file: a kill leaves the old one or the new one."""
        write_tensors(self.path, tensors)

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Hold the file for one request; a second process that wants it meanwhile is refused."""
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self.path.with_name(self.path.name + ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise StateError(
                    f"another process is using {self.path}: give every node a folder of its own"
                ) from error
            yield  # the system drops the lock with the process, however it ends


@dataclass(frozen=True)
class Upload:
    """A sealed update on its way, under a number of its own."""

    id: int
    payload: Payload
    mask: Masks | None


class Courier:
    """A veil whose uploads are settled before the next one leaves.

    >>> from gradveil import DualPrune, ErrorFeedback
    >>> like = {"w": torch.zeros(4)}
    >>> def client(memory): return Courier(Veil(ErrorFeedback(DualPrune(0.25, 0.5)), like), like, memory)
    >>> first = client({})
    >>> upload = first.send({"w": torch.tensor([4.0, -3.0, 2.0, 1.0])}, 1)
    >>> again = client(first.memory())  # another process, later: the upload never arrived
    >>> again.settle(None, ())
    >>> again.veil.residual["w"]
    tensor([ 4., -3.,  2.,  1.])
    """

    def __init__(self, veil: Veil, like: Grads, memory: Tensors) -> None:
        self.veil = veil
        self.pending: Upload | None = None
        self.confirmed: int | None = None
        self._like = like
        if tree.only("veil", memory):
            self._recall(memory)

    def settle(self, last: int | None, used: Collection[int]) -> None:
        """Confirm the upload on its way or take it back.

        Args:
            last: the upload of this client the server used last, as far as it knows this client; else None.
            used: for a client the server does not know by name: all uploads it may have used.

        Raises:
            StateError: the server has used an upload this memory does not know of, so the residual is missing or old.
        """
        pending = self.pending.id if self.pending else None
        if last is not None and last not in (pending, self.confirmed):
            raise StateError(
                "the residual of this node is missing or stale: the server has used an upload this node does not "
                "remember. Restore its memory, give every node a folder or a partition-id of its own, or allow a "
                "restart from zero (restart_lost=True)"
            )
        if self.pending is None:
            return
        if pending == last or pending in used:
            self.veil.acknowledge(self.pending.payload)
            self.confirmed = pending
        elif self.veil.residual is not None:
            self.veil.undo(self.pending.payload, mask=self.pending.mask)
        self.pending = None

    def send(
        self, grads: Grads, num_examples: int, mask: Masks | None = None, largest: Tensors | None = None
    ) -> Upload:
        """Seal an update under a new number; `memory()` must be saved before its bytes leave."""
        if self.pending is not None:
            raise StateError("the upload before is not settled: call settle first")
        payload = self.veil.seal(grads, num_examples, mask=mask, largest=largest)
        self.pending = Upload(secrets.randbits(62), payload, mask)
        return self.pending

    def memory(self) -> Tensors:
        """Return all that has to be kept until the next request."""
        out = tree.under("veil", self.veil.state_dict())
        if self.confirmed is not None:
            out["confirmed"] = torch.tensor(self.confirmed)
        if self.pending is not None:
            payload = self.pending.payload
            out["upload.about"] = torch.tensor([self.pending.id, payload.num_examples, payload.round])
            out["upload.body"] = _bytes(payload.body)
            if self.pending.mask is not None:
                out["upload.mask"] = pack_masks(self.pending.mask)
        return out

    def _recall(self, memory: Tensors) -> None:
        self.veil.load_state_dict(tree.only("veil", memory))
        self.confirmed = int(memory["confirmed"]) if "confirmed" in memory else None
        if "upload.about" in memory:
            id_, examples, round_ = memory["upload.about"].tolist()
            mask = unpack_masks(memory["upload.mask"], self._like) if "upload.mask" in memory else None
            self.pending = Upload(id_, Payload(memory["upload.body"].numpy().tobytes(), examples, round_), mask)


def _bytes(body: bytes) -> Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.uint8)
