"""Where a Flower client keeps its memory: in a folder of the node, or in the node state of Flower's run."""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Array, ArrayRecord, Context

from .. import tree
from ..core import Tensors
from ..errors import StateError
from . import flower_records as records
from .flower_guard import notes_on
from .store import FileStore

CONTEXT_BYTES = 25_000_000  # Flower loses larger node states without an error


@dataclass(frozen=True)
class ContextStore:
    """A client's memory in Flower's node state: kept for one run, gone when the SuperNode restarts."""

    context: Context

    def load(self) -> Tensors:
        """Return what was saved last."""
        record = self.context.state.array_records.get(records.OURS)
        return {} if record is None else records.tensors_of(record)

    def save(self, tensors: Tensors) -> None:
        """Replace what is there, unless it is more than Flower carries safely."""
        size = sum(t.nbytes for t in tensors.values())
        if size > CONTEXT_BYTES:
            raise StateError(
                f"the residual takes {size / 1e6:.0f} MB, and Flower loses node states above "
                f"{CONTEXT_BYTES / 1e6:.0f} MB: give the node a folder (--node-config 'gradveil-dir=\"/path\"')"
            )
        arrays = {name: Array(t.detach().cpu().contiguous().numpy()) for name, t in tensors.items()}
        self.context.state[records.OURS] = ArrayRecord(arrays)

    def claimed(self) -> contextlib.nullcontext[None]:
        """Flower hands the state to one message at a time."""
        return contextlib.nullcontext()


Store = FileStore | ContextStore


def store_of(job: int, context: Context, folder: Path | None) -> Store:
    """Return where a job's memory lies; the node's `gradveil-dir` setting goes before `folder`."""
    place, part = _place(context, folder)
    return ContextStore(context) if place is None else FileStore(place / f"{job:016x}-{part}.safetensors")


def notes_of(model: Tensors, context: Context, folder: Path | None) -> FileStore | None:
    """Return where the guard's memory outlives the job; None where it lives and ends with Flower's run."""
    place, part = _place(context, folder)
    return None if place is None else notes_on(model, place, part)


def save(store: Store, notes: FileStore | None, memory: Tensors) -> None:
    """Save a client's memory, the guard's part first: a kill in between may refuse a model, never forget one."""
    if notes is not None:
        notes.save(tree.only("guard", memory))
    store.save(memory)


def _place(context: Context, folder: Path | None) -> tuple[Path | None, str]:
    place = context.node_config.get("gradveil-dir", folder)
    part = str(context.node_config.get("partition-id", "node"))
    return None if place is None else Path(str(place)), part
