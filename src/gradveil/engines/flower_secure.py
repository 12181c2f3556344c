"""Flower with secure aggregation: the server sees the sum of the clients' aligned updates and no single one.

    defense = ErrorFeedback(Chain(AlignedDualPrune(), FixedPoint()))
    app = ClientApp(mods=[SecureVeilMod(defense)])
    strategy = SecureFedAvg(defense)

See `gradveil.engines.secure` for what this guarantees and what not.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from .. import wire
from ..core import Defense, Grads, Payload, Tensors
from ..errors import EngineError, GradveilError, NeedError, WireError
from . import flower_records as records
from .flower import VeilMod
from .flower_answers import Accepted, Round, content_of
from .flower_memory import Store
from .flower_strategy import VeiledFedAvg
from .secure import FEWEST, add_up, blind, fixed_point_of, new_key
from .store import Upload

WORDS = "gradveil.words.v1"
log = logging.getLogger("flwr.gradveil")


@dataclass(frozen=True)
class SecureVeilMod(VeilMod):
    """A `VeilMod` whose update leaves only under the pairwise streams of a secure round.

    Guarantees: where the server gives no keys of other clients, or not this client's own among them, nothing is sent.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        fixed_point_of(self.defense)
        if "mask" not in self.defense.needs or self.buffers != "local":
            raise NeedError("secure aggregation needs an aligned defense, and buffers stay local")

    def _offer_key(self, message: Message, store: Store, memory: Tensors) -> Message:
        secret, public = new_key()
        store.save({**memory, "secret": torch.frombuffer(bytearray(secret), dtype=torch.uint8)})
        return Message(RecordDict({records.OURS: ConfigRecord({"public": public})}), reply_to=message)

    def _wrap(self, upload: Upload, request: records.Request, like: Grads, memory: Tensors) -> Array:
        if "secret" not in memory or upload.mask is None:
            raise NeedError("the server did not ask for a key first: nothing is sent in the clear")
        sent = wire.decode(upload.payload.body, like=like, within=upload.mask)
        words = fixed_point_of(self.defense).to_words(sent, upload.mask)
        about = f"{request.job}|{request.round}".encode()
        hidden = blind(words, memory["secret"].numpy().tobytes(), request.keys, about)
        return records.blob(hidden.astype("<u4").tobytes(), WORDS)


@dataclass(frozen=True)
class SecureRound(Round):
    """Reads vectors that mean nothing one by one."""

    def decode(self, array: Any) -> Grads:
        """Return the words that came, to be added up."""
        body = records.body_of(array, WORDS)
        count = sum(int(m.sum()) for m in (self.mask or {}).values())
        if len(body) != 4 * count:
            raise WireError(f"expected {count} words, got {len(body)} bytes")
        return {"words": torch.frombuffer(bytearray(body), dtype=torch.uint32)}


class SecureFedAvg(VeiledFedAvg):
    """A `VeiledFedAvg` that adds the updates up without reading them.

    Guarantees: the model moves by the plain mean over all clients of the round, exactly. If one of them does not
    answer, or the sum is out of range, the round is void: nothing is used, and every client takes its update back.
    Every client counts the same, because the number of examples would have to be hidden too. `last_sum` keeps the
    sum and `seen` the payload an attacker at the server has: hand it to `gradveil.observe` to attack it.
    """

    def __init__(self, defense: Defense, **more: Any) -> None:
        super().__init__(defense, **more)
        self._grid = fixed_point_of(defense)
        if self._aligned is None:
            raise EngineError("secure aggregation needs aligned rounds: use AlignedDualPrune")
        self._kind_of_round = SecureRound
        self._cohort = 0
        self.last_sum: Grads | None = None
        self.seen: Payload | None = None

    def _invite(self, server_round: int, messages: list[Message], grid: Grid) -> list[Message]:
        """Ask everyone for a key; who answers takes part."""
        questions = [Message(m.content, m.metadata.dst_node_id, "train") for m in messages]
        questions = [self._addressed(q, server_round, {}, ask="key") for q in questions]
        for question in questions:
            question.content = RecordDict({records.OURS: question.content[records.OURS]})
        keys: dict[int, bytes] = {}
        for reply in grid.send_and_receive(questions, timeout=self._timeout):
            try:
                public = content_of(reply).config_records.get(records.OURS, {}).get("public")
                if not isinstance(public, bytes) or len(public) != 32:
                    raise WireError("the answer holds no key")
                keys[reply.metadata.src_node_id] = public
            except GradveilError as error:
                self._reject(server_round, reply, str(error))
        self._cohort, self._keys = len(keys), tuple(keys[node] for node in sorted(keys))
        if not FEWEST <= len(keys) <= self._grid.most_clients:
            log.warning("round %d: %d clients offer keys, which is too few or too many", server_round, len(keys))
            return []
        return [message for message in messages if message.metadata.dst_node_id in keys]

    def _mean(self, accepted: list[Accepted]) -> Grads:
        if len(accepted) != self._cohort or self._round is None or self._round.mask is None:
            raise WireError(f"{len(accepted)} of {self._cohort} clients answered, so the sum cannot be opened")
        total = add_up({part.node: part.update["words"].numpy().astype(np.uint32) for part in accepted})
        self.last_sum = self._grid.from_sum(total, self._round.mask, self._cohort)
        mean = {name: t / self._cohort for name, t in self.last_sum.items()}
        self.seen = Payload(wire.encode(mean), sum(part.examples for part in accepted), self._round.number)
        return mean
