"""What the server makes of an answer: everything is checked, and anything wrong is a `GradveilError`."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from flwr.app import Message, RecordDict

from .. import tree, wire
from ..core import Grads, Masks, Tensors
from ..errors import WireError
from . import flower_records as records


class Accepted(NamedTuple):
    """An answer that counts."""

    node: int
    upload: int
    update: Grads
    buffers: Tensors
    examples: int
    metrics: dict[str, float]
    holds: int | None  # the version of the model this node keeps


@dataclass(frozen=True)
class Round:
    """What an answer of this round must fit."""

    number: int
    model: Tensors
    like: Grads
    mask: Masks | None
    weight_key: str
    max_examples: int

    def read(self, reply: Message) -> Accepted:
        """Return what an answer brings."""
        content = content_of(reply)
        ours = content.config_records.get(records.OURS, {})
        upload = ours.get("upload")
        if ours.get("round") != self.number or not isinstance(upload, int):
            raise WireError(f"the answer belongs to round {ours.get('round')}, not to {self.number}")
        arrays = records.model_record(content)[1]
        update = self.decode(arrays.get("update"))
        buffers: Tensors = {}
        if "buffers" in arrays:
            body = records.body_of(arrays["buffers"], records.BUFFERS)
            buffers = wire.decode(body, like=records.sent_buffers(self.model))
            tree.require_finite(buffers)
        examples, metrics = metrics_of(content, self.weight_key, self.max_examples)
        return Accepted(reply.metadata.src_node_id, upload, update, buffers, examples, metrics, holds(content))

    def decode(self, array: Any) -> Grads:
        """Return the update in the array that came."""
        update = wire.decode(records.body_of(array, records.UPDATE), like=self.like, within=self.mask)
        tree.require_finite(update)
        return update


def content_of(reply: Message) -> RecordDict:
    """Return the content of a reply, or raise what its error says."""
    if reply.has_error():
        raise WireError(f"{reply.error.reason or 'no reason given'} (code {reply.error.code})")
    return reply.content


def metrics_of(content: RecordDict, weight_key: str, max_examples: int) -> tuple[int, dict[str, float]]:
    """Return the number of examples, bounded, and all metrics of an answer."""
    found = records.numbers_of(content)
    if len(found) != 1:
        raise WireError(f"expected one MetricRecord, got {len(found)}")
    numbers = next(iter(found.values()))
    claimed = numbers.get(weight_key)
    if not isinstance(claimed, int) or claimed < 1:
        raise WireError(f"{weight_key} must be a whole number above 0, got {claimed!r}")
    examples = min(claimed, max_examples)
    return examples, {**numbers, weight_key: examples}


def holds(content: RecordDict) -> int | None:
    """Return the version of the model a node says it keeps."""
    version = content.config_records.get(records.OURS, {}).get("holds")
    return version if isinstance(version, int) else None
