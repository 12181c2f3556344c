"""What a node's guard remembers, whatever number the server gives to a job.

The server picks the job's number, so a memory that lives with the job could be wiped by counting up. With a folder of
the node, what the guard saw of a model lies in a file of its own: one for each set of names and shapes. Order and type
do not count there, since an app loads the same weights in another order or type all the same.
"""

import hashlib
import json
from pathlib import Path

from ..core import Tensors
from ..guard import Guard, Seen, fingerprint
from .store import FileStore


def notes_on(model: Tensors, folder: Path, part: str) -> FileStore:
    """Return where this node keeps what its guard saw of models with these names and shapes."""
    shapes = json.dumps(sorted((name, list(t.shape)) for name, t in model.items()))
    digest = hashlib.sha256(shapes.encode()).hexdigest()[:32]
    return FileStore(folder / f"guard-{digest}-{part}.safetensors")


def recall(guard: Guard, model: Tensors, job: Tensors, node: Tensors) -> Seen | None:
    """Return what to compare a model with: the node's memory before the job's.

    A job keeps the structure it began with, and a node the order and types of its names: where one of them differs,
    that memory is returned, and the guard refuses. With a pinned guard only its user can have changed the structure,
    so memory of another one is passed over.
    """
    structure = fingerprint(model)
    memories = [Seen.from_state_dict(saved) for saved in (node, job) if saved]
    other = [seen for seen in memories if seen.structure != structure]
    same = [seen for seen in memories if seen.structure == structure]
    if other and guard.pinned is None:
        return other[0]
    return same[0] if same else None
