"""Flower, the server's side: FedAvg over protected updates, which trusts no answer.

strategy = VeiledFedAvg(dgp(), fraction_train=1.0)
strategy.start(grid, initial_arrays=..., num_rounds=10)
"""

import json
import logging
import random
import secrets
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result

from .. import check, tree
from ..core import Defense, Grads, Masks, Tensors
from ..defenses import AlignedDualPrune
from ..errors import GradveilError, StateError, WireError
from . import flower_records as records
from .fit import find
from .flower_answers import Accepted, Round, content_of, holds, metrics_of
from .flower_download import Sender
from .store import FileStore
from .vote import vote

log = logging.getLogger("flwr.gradveil")


class Rejected(NamedTuple):
    """An answer that was not used."""

    round: int
    node: int
    reason: str


class VeiledFedAvg(FedAvg):  # type: ignore[misc]
    """FedAvg for clients that run `VeilMod`.

    Guarantees: every answer is checked (sender, round, record types, bytes, shapes, finite values, number of
    examples) before it counts, and counts once; one that fails is dropped, logged with its node and kept in
    `rejected`, and the round goes on with the others. A round without a usable answer leaves the model as it is.
    Every request tells its node which upload was used last, so that nothing is lost or counted twice. In aligned
    rounds random clients propose the mask and are outvoted position by position; who proposes a mask that no honest
    client could propose is never asked again. Does not guarantee robustness against well-formed but hostile values.

    Args:
        defense: the same as the clients'.
        max_examples: no client counts for more examples than this, whatever it claims.
        proposers: how many clients propose the mask of an aligned round; 1 is the paper's rule, without an outvote.
        sparse_download: let clients keep the model and send them only what changed; a client that missed a round gets
            the full model. Saves most where all clients send inside one mask.
        checkpoint: a file with the model, the round and the uploads used, replaced after every round; `resume` reads
            it, so that a restarted server and its clients go on where they were.
        local: arrays the clients keep to themselves; the same as the clients'.
    """

    def __init__(
        self,
        defense: Defense,
        *,
        max_examples: int = 10_000,
        proposers: int = 3,
        sparse_download: bool = False,
        checkpoint: str | Path | None = None,
        local: tuple[str, ...] = (),
        **fedavg: Any,
    ) -> None:
        super().__init__(**fedavg)
        check.at_least(1, max_examples=max_examples, proposers=proposers)
        self.defense, self.local = defense, local
        self.max_examples, self.proposers, self.sparse_download = max_examples, proposers, sparse_download
        self.rejected: list[Rejected] = []
        self.barred: set[int] = set()  # nodes that proposed an impossible mask
        self.used: dict[int, int] = {}  # node -> its upload that was used last
        self.job = secrets.randbits(62)
        self._aligned = find(defense, AlignedDualPrune)
        self._store = None if checkpoint is None else FileStore(Path(checkpoint))
        self._download = Sender()
        self._timeout = 3600.0
        self._round: Round | None = None
        self._kind_of_round: type[Round] = Round
        self._keys: tuple[bytes, ...] = ()
        self._waiting: set[int] = set()

    def resume(self) -> ArrayRecord | None:
        """Return the model of the checkpoint and go on with its clients; None if there is no checkpoint yet."""
        saved = {} if self._store is None else self._store.load()
        if not saved:
            return None
        if "about" not in saved:
            raise StateError("the checkpoint is not one of VeiledFedAvg")
        about = json.loads(saved["about"].numpy().tobytes())
        self.job = about["job"]
        self.used = {int(node): upload for node, upload in about["used"].items()}
        return _record({name: saved[f"model.{name}"] for name in about["names"]})

    def start(self, grid: Grid, initial_arrays: ArrayRecord, *args: Any, timeout: float = 3600, **more: Any) -> Result:
        """Run the rounds; see Flower's `Strategy.start`."""
        self._timeout, self._download = timeout, Sender()
        return super().start(grid, initial_arrays, *args, timeout=timeout, **more)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return this round's requests, after asking for the mask in aligned rounds."""
        messages = self._invite(server_round, list(super().configure_train(server_round, arrays, config, grid)), grid)
        self._waiting = {message.metadata.dst_node_id for message in messages}
        model = records.tensors_of(arrays)
        like = records.parameters_of(model, self.local)
        this = self._kind_of_round(server_round, model, like, None, self.weighted_by_key, self.max_examples)
        extra: dict[str, Any] = {}
        if self._aligned is not None and messages:
            mask = self._ask_for_mask(this, messages[0].content, grid)
            if mask is None:
                log.warning("round %d: no client could propose a mask; the round is left out", server_round)
                return []
            this = replace(this, mask=mask)
            extra = dict(records.mask_content(mask))
        self._round = this
        return [self._addressed(message, server_round, extra) for message in messages]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to evaluate; the job's number lets a client find its own buffers."""
        messages = super().configure_evaluate(server_round, arrays, config, grid)
        return [self._addressed(message, server_round, {}) for message in messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after this round, or nothing if no answer can be used."""
        accepted = [part for reply in replies if (part := self._accept(server_round, reply)) is not None]
        if not accepted or self._round is None:
            return None, None
        accepted.sort(key=lambda part: part.node)  # the sum must not depend on who was faster
        weights = [part.examples for part in accepted]
        complete = all(part.buffers for part in accepted)
        buffers = tree.weighted_mean([part.buffers for part in accepted], weights) if complete else {}
        try:
            update = self._mean(accepted)
            model = records.apply_update(self._round.model, update) | buffers
            if not all(bool(torch.isfinite(tensor).all()) for tensor in model.values()):
                raise WireError("the model would hold NaN or infinity")  # finite updates may add up to more than fits
        except WireError as error:
            log.warning("round %d: nothing is used: %s", server_round, error)
            return None, None
        self.used |= {part.node: part.upload for part in accepted}
        if self.sparse_download:
            self._download.advance(update, buffers)
        if self._store is not None:
            self._store.save(self._checkpoint(model, server_round))
        return _record(model), self._combined([part.metrics for part in accepted], self.train_metrics_aggr_fn)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the mean of the metrics; an answer that is not metrics is dropped, not fatal."""
        good = []
        for reply in replies:
            try:
                content = content_of(reply)
                good.append(metrics_of(content, self.weighted_by_key, self.max_examples)[1])
                self._download.note(reply.metadata.src_node_id, holds(content))
            except GradveilError as error:
                self._reject(server_round, reply, str(error))
        return self._combined(good, self.evaluate_metrics_aggr_fn) if good else None

    def _invite(self, server_round: int, messages: list[Message], grid: Grid) -> list[Message]:
        """Return the messages of those who take part."""
        return messages

    def _mean(self, accepted: list[Accepted]) -> Grads:
        """Return the mean update; a `WireError` voids the round."""
        return tree.weighted_mean([part.update for part in accepted], [part.examples for part in accepted])

    def _accept(self, server_round: int, reply: Message) -> Accepted | None:
        try:
            if self._round is None or self._round.number != server_round:
                raise WireError(f"nobody was asked in round {server_round}")
            part = self._round.read(reply)
            if part.node not in self._waiting:
                raise WireError("this node was not asked in this round, or has answered already")
        except GradveilError as error:
            self._reject(server_round, reply, str(error))
            return None
        self._waiting.discard(part.node)
        self._download.note(part.node, part.holds)
        return part

    def _addressed(self, message: Message, server_round: int, extra: dict[str, Any], ask: str = "update") -> Message:
        """Return the message with what its node has to know; FedAvg gives all of them one and the same content."""
        node = message.metadata.dst_node_id
        last = self.used.get(node)
        request = records.Request(
            keys=self._keys if ask == "update" else (),
            job=self.job,
            round=server_round,
            last=last,
            # A node that came back under a new number is unknown: let it look for its upload among all of them.
            used=tuple(self.used.values()) if last is None else (),
            ask=ask,
            key=self.arrayrecord_key,
            version=self._download.version if self.sparse_download else None,
            base=self._download.base_for(node) if self.sparse_download else None,
        )
        content = self._download.content(node, message.content)
        message.content = RecordDict({**content, records.OURS: request.record(), **extra})
        return message

    def _ask_for_mask(self, this: Round, content: RecordDict, grid: Grid) -> Masks | None:
        """Return the mask random clients agree on by vote; ask others if none of them answers well."""
        chance = random.SystemRandom()
        nodes = [node for node in self._waiting if node not in self.barred]
        chance.shuffle(nodes)
        for first in range(0, len(nodes), self.proposers):
            questions = [
                self._addressed(Message(content, node, "train"), this.number, {}, ask="mask")
                for node in nodes[first : first + self.proposers]
            ]
            proposals: dict[int, Masks] = {}
            for reply in grid.send_and_receive(questions, timeout=self._timeout):
                try:
                    proposals[reply.metadata.src_node_id] = self._read_proposal(this, reply)
                    self._download.note(reply.metadata.src_node_id, holds(reply.content))
                except GradveilError as error:
                    self._reject(this.number, reply, f"bad proposal: {error}")
                    if reply.has_content():  # an answer that is wrong, not one that is missing
                        self.barred.add(reply.metadata.src_node_id)
            if proposals:
                return vote(list(proposals.values()), torch.Generator().manual_seed(chance.getrandbits(63)))
        return None

    def _read_proposal(self, this: Round, reply: Message) -> Masks:
        mask = records.read_mask(content_of(reply), this.like)
        if mask is None or self._aligned is None:
            raise WireError("the answer holds no mask")
        self._aligned.validate(mask, this.like)
        return mask

    def _combined(self, numbers: list[dict[str, float]], combine: Any) -> MetricRecord:
        """Combine the metrics all answers have; one client's odd key must not end the run."""
        common = set.intersection(*(set(one) for one in numbers))
        rows = [RecordDict({"metrics": MetricRecord({k: v for k, v in one.items() if k in common})}) for one in numbers]
        return combine(rows, self.weighted_by_key)

    def _checkpoint(self, model: Tensors, server_round: int) -> Tensors:
        # As text: node ids exceed int64, and safetensors does not keep the order of names.
        about = json.dumps({"job": self.job, "round": server_round, "used": self.used, "names": list(model)})
        return {**tree.under("model", model), "about": torch.frombuffer(bytearray(about.encode()), dtype=torch.uint8)}

    def _reject(self, server_round: int, reply: Message, why: str) -> None:
        node = reply.metadata.src_node_id
        self._download.note(node, None)
        self.rejected.append(Rejected(server_round, node, why))
        log.warning("round %d: the answer of node %d is not used: %s", server_round, node, why)


def _record(model: Tensors) -> ArrayRecord:
    return ArrayRecord({name: tensor.contiguous() for name, tensor in model.items()})
