"""What gradveil puts into Flower messages, read and written in one place.

A request carries the model, a `gradveil` ConfigRecord (job, round, which uploads were used) and, in aligned rounds, a
mask. An answer carries one opaque array, single numbers, and a `gradveil` ConfigRecord. Arrays have serialisation
types of their own, so that a server without gradveil fails loudly instead of averaging bytes.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from torch import Tensor

from ..core import Grads, Masks, Tensors
from ..errors import GradientError, NeedError, WireError
from .packing import pack_masks, unpack_masks

OURS = "gradveil"
UPDATE, MASK, BUFFERS = "gradveil.update.v1", "gradveil.mask.v1", "gradveil.buffers.v1"
BATCH_NORM = ("running_mean", "running_var", "num_batches_tracked")
MOST_METRICS = 64


@dataclass(frozen=True)
class Request:
    """What the server says besides the model."""

    job: int
    round: int
    last: int | None = None  # the upload of this node that was used last, if the server knows the node
    used: tuple[int, ...] = ()  # for a node it does not know: every upload it may have used
    ask: str = "update"  # or "mask", or "key" (secure aggregation)
    key: str = "arrays"  # where the app expects the model
    version: int | None = None  # of the model, if the node is to keep it
    base: int | None = None  # the version the node holds already: only what changed comes along
    keys: tuple[bytes, ...] = ()  # of all clients of a secure round

    def record(self) -> ConfigRecord:
        """Return this request as a record."""
        out = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return ConfigRecord({k: v for k, v in out.items() if v is not None and v != []})

    @classmethod
    def read(cls, message: Message) -> "Request":
        """Return the request in a message; refuse one from a server that does not speak gradveil."""
        record = message.content.config_records.get(OURS, {})
        if not {"job", "round"} <= set(record):
            raise NeedError("the server sends no gradveil record: use gradveil.engines.flower_strategy.VeiledFedAvg")
        known = {f.name: record[f.name] for f in fields(cls) if f.name in record}
        values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in known.items()}
        return cls(**values)


def blob(body: bytes, kind: str) -> Array:
    """Return bytes as one array; `Array.numpy()` refuses its type."""
    return Array("uint8", (len(body),), kind, body)


def body_of(array: Any, kind: str) -> bytes:
    """Return the bytes of an array of this kind."""
    if not isinstance(array, Array) or array.stype != kind:
        raise WireError(f"expected an array of type {kind}, got {getattr(array, 'stype', type(array).__name__)}")
    return bytes(array.data)


def mask_content(masks: Masks) -> RecordDict:
    """Return the common mask as the content of a message, or as a part of one."""
    body = pack_masks(masks).cpu().numpy().tobytes()
    return RecordDict({f"{OURS}-mask": ArrayRecord({"mask": blob(body, MASK)})})


def read_mask(content: RecordDict, like: Grads) -> Masks | None:
    """Return the common mask in a message, None if there is none; `WireError` if it does not fit."""
    record = content.array_records.get(f"{OURS}-mask")
    if record is None:
        return None
    body = bytearray(body_of(record.get("mask"), MASK))
    return unpack_masks(torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8), like)


def model_record(content: RecordDict) -> tuple[str, ArrayRecord]:
    """Return the one record of arrays that is not ours, and its key."""
    found = [(key, record) for key, record in content.array_records.items() if not key.startswith(OURS)]
    if len(found) != 1:
        raise NeedError(f"expected one ArrayRecord with the model, got {len(found)}: nothing is sent")
    return found[0]


def tensors_of(record: ArrayRecord) -> Tensors:
    """Return the arrays of a model as tensors."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def is_buffer(name: str) -> bool:
    """Say whether an array is BatchNorm's bookkeeping, going by its name.

    >>> is_buffer("layer1.bn.running_mean"), is_buffer("layer1.conv.weight")
    (True, False)
    """
    return name.rpartition(".")[2] in BATCH_NORM


def sent_buffers(model: Tensors) -> Tensors:
    """Return the buffers that can be averaged, where clients send theirs."""
    return {name: t for name, t in model.items() if is_buffer(name) and t.is_floating_point()}


def parameters_of(model: Tensors, local: Iterable[str] = ()) -> Grads:
    """Return the arrays an update is made of, at least in float32; refuse those no defense can handle."""
    out = {}
    for name, tensor in model.items():
        if is_buffer(name) or name in local:
            continue
        if not tensor.is_floating_point():
            raise GradientError(
                f"{name} has type {tensor.dtype}, which no defense can protect: name it in local=... to keep it here"
            )
        out[name] = tensor if tensor.dtype == torch.float64 else tensor.float()
    return out


def numbers_of(content: RecordDict) -> dict[str, dict[str, float]]:
    """Return the metrics of a message: single finite numbers only, since a list could hold a gradient."""
    out = {key: dict(record.items()) for key, record in content.metric_records.items()}
    values = [value for record in out.values() for value in record.values()]
    if len(values) > MOST_METRICS or not all(isinstance(v, int | float) and math.isfinite(v) for v in values):
        raise WireError(f"metrics must be at most {MOST_METRICS} single finite numbers")
    return out


def metrics_only(content: RecordDict) -> RecordDict:
    """Return the metrics of a message; refuse any other record, which could carry an unprotected update."""
    extra = [key for key in content if not isinstance(content[key], MetricRecord)]
    if extra:
        raise NeedError(f"the app wants to send {extra[0]!r} unprotected; only metrics may leave here")
    return RecordDict({key: MetricRecord(numbers) for key, numbers in numbers_of(content).items()})


def apply_update(model: Tensors, update: Grads) -> Tensors:
    """Return the model minus the update, in the model's types; server and client do exactly this."""
    return {name: _minus(t, update[name]) if name in update else t for name, t in model.items()}


def _minus(tensor: Tensor, update: Tensor) -> Tensor:
    return (tensor.to(update.dtype) - update).to(tensor.dtype)
