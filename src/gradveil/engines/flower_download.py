"""The model's way down: in full to a client that does not hold it, else only what changed.

Clients that keep the last model need no more than the mean update of the round, which is sparse when all clients send
inside one mask. Server and client subtract the same numbers with the same operation, so both hold the same bits.
"""

import json
import secrets
from typing import Any

import torch
from flwr.app import ArrayRecord, RecordDict

from .. import tree, wire
from ..core import Grads, Tensors
from ..errors import NeedError
from . import flower_records as records

DELTA = f"{records.OURS}-delta"


class Sender:
    """The server's side: which model each node holds, and the step from the model before to the current one."""

    def __init__(self) -> None:
        self.version = secrets.randbits(62)
        self._base: int | None = None
        self._delta: ArrayRecord | None = None
        self._holds: dict[int, int] = {}

    def advance(self, update: Grads, buffers: Tensors) -> None:
        """Note that the model became model - update, with these buffers."""
        self._base, self.version = self.version, secrets.randbits(62)
        arrays = {"update": records.blob(wire.encode(update), records.UPDATE)}
        if buffers:
            arrays["buffers"] = records.blob(wire.encode(buffers), records.BUFFERS)
        self._delta = ArrayRecord(arrays)

    def note(self, node: int, version: Any) -> None:
        """Remember what a node says it holds; anything odd means that it gets the full model."""
        if isinstance(version, int):
            self._holds[node] = version
        else:
            self._holds.pop(node, None)

    def base_for(self, node: int) -> int | None:
        """Return the version the node can go on from; None if it needs the full model."""
        held = self._holds.get(node)
        return held if held is not None and held in (self.version, self._base) else None

    def content(self, node: int, content: RecordDict) -> RecordDict:
        """Return the message's content for this node: with the model, with the step, or with neither."""
        base = self.base_for(node)
        if base is None:
            return content
        rest = {key: value for key, value in content.items() if key not in content.array_records}
        return RecordDict(rest if base == self.version or self._delta is None else {**rest, DELTA: self._delta})


def receive(
    content: RecordDict, request: records.Request, memory: Tensors, local: tuple[str, ...]
) -> tuple[str, Tensors]:
    """Return the model a message stands for, and the key under which the app expects it."""
    if request.base is None:
        key, record = records.model_record(content)
        return key, records.tensors_of(record)
    if "version" not in memory or int(memory["version"]) != request.base:
        raise NeedError("this node does not hold the model the server builds on: it needs the full model")
    model = {name: memory[f"model.{name}"] for name in json.loads(memory["names"].numpy().tobytes())}
    step = content.array_records.get(DELTA)
    if step is not None:
        body = records.body_of(step.get("update"), records.UPDATE)
        model = records.apply_update(model, wire.decode(body, like=records.parameters_of(model, local)))
        if "buffers" in step:
            like = records.sent_buffers(model)
            model |= wire.decode(records.body_of(step["buffers"], records.BUFFERS), like=like)
    return request.key, model


def held(request: records.Request, model: Tensors) -> Tensors:
    """Return what a node keeps of the model: nothing, unless the server wants to build on it."""
    if request.version is None:
        return {}
    # Files do not keep the order of names, and the guard takes the first layer for the one that sees pictures.
    names = torch.frombuffer(bytearray(json.dumps(list(model)).encode()), dtype=torch.uint8)
    return {**tree.under("model", model), "names": names, "version": torch.tensor(request.version)}
