"""Flower, the client's side: a mod that lets nothing but the protected update leave.

    app = ClientApp(mods=[VeilMod(dgp())])

The app itself stays an ordinary FedAvg client: it trains and answers with its new weights and `num-examples`. The
server runs `VeiledFedAvg` with the same defense.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from torch import Tensor

from .. import check, tree, wire
from ..core import Defense, Grads, Masks, Tensors
from ..defenses import AlignedDualPrune
from ..errors import EngineError, GradveilError, NeedError, StateError
from ..guard import Guard
from ..veil import Veil
from . import flower_records as records
from .fit import find, refuse_idle, refuse_unfit
from .flower_download import held, receive
from .flower_guard import recall
from .flower_memory import Store, notes_of, save, store_of
from .following import Account, accounting
from .store import Courier, FileStore, Upload

Handler = Callable[[Message, Context], Message]

RAISED, REFUSED = 2, 6  # Flower's codes for an app that raised, and for a mod whose conditions are not met
DEFAULT_GUARD = Guard(jump=None)  # a client may be asked rarely, and much can change between two requests
log = logging.getLogger("flwr.gradveil")


@dataclass(frozen=True)
class VeilMod:
    """Protects the update in every answer to a train message, and keeps the residual.

    Guarantees: an answer holds the sealed update, single numbers from the app's metrics, and nothing else; where that
    cannot be built (an unknown record, a type no defense handles, a missing or stale residual, a server without
    gradveil) an error goes out instead. So it does for a model that looks manipulated: the guard looks before the app
    is called. Answers to evaluate and query messages may hold metrics only; of an app's error only its kind leaves. The
    residual is written before the answer leaves; an upload the server did not use goes back into it. Does not
    guarantee anything about what metrics reveal, nor about a server that lies about which uploads it used.

    Args:
        defense: what protects the update; one that needs the batch or the model cannot work here.
        folder: where the residual lives as a file; the node's `gradveil-dir` setting goes first. Without either it
            lives in the node state of the run. The guard's memory lies there too, and is the node's, not the job's.
        buffers: BatchNorm statistics are averages over private activations. "local" keeps each client's own on the
            node and puts them into every model that arrives; "send" sends them as they are.
        local: further arrays that never leave, such as integer tensors.
        restart_lost: start from a zero residual when the old one is lost, instead of refusing. The first update after
            that has no residual to hide in.
        weight_key: the metric that holds the number of examples.
        prepared: the client applies the defense's `prepare_model` and `prepare_batch` itself.
        guard: looks at every model to be trained. The default pins the names and shapes that arrive first;
            `Guard.pin(model.state_dict(), jump=None)` pins your own. None is for the study of attacks.
        input_shape: of one example, for the guard; it finds out by itself if pictures are square.
        follow: refuse updates whose single examples the app did not follow (`engines.following`).
        seed: fixes the defense's random numbers; for experiments only.
    """

    defense: Defense
    folder: Path | None = None
    buffers: Literal["local", "send"] = "local"
    local: tuple[str, ...] = ()
    restart_lost: bool = False
    weight_key: str = "num-examples"
    prepared: bool = False
    guard: Guard | None = DEFAULT_GUARD
    input_shape: tuple[int, ...] | None = None
    follow: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check.one_of(("local", "send"), buffers=self.buffers)
        refuse_unfit(self.defense, "a Flower mod", self.prepared)
        refuse_idle(self.defense, self.follow)
        if self.guard is not None and any(": " in line for line in self.guard.pinned or ()):
            raise NeedError("Flower sends tensors, not modules: pin them with Guard.pin(model.state_dict(), jump=None)")

    def __call__(self, message: Message, context: Context, call_next: Handler) -> Message:
        """Handle one message; called by Flower."""
        try:
            if message.metadata.message_type.partition(".")[0] == "train":
                return self._train(message, context, call_next)
            return self._other(message, context, call_next)
        except GradveilError as error:
            log.error("nothing is sent: %s", error)
            return Message(Error(REFUSED, f"gradveil: {error}"), reply_to=message)
        except Exception as error:  # Flower would send its text to the server, and a tensor of the batch may be in it
            log.exception("nothing is sent")
            why = f"gradveil: the client raised {type(error).__name__}; what it says stays in the log of this node"
            return Message(Error(RAISED, why), reply_to=message)

    def _train(self, message: Message, context: Context, call_next: Handler) -> Message:
        request = records.Request.read(message)
        store = store_of(request.job, context, self.folder)
        with contextlib.ExitStack() as claims:
            claims.enter_context(store.claimed())
            memory = store.load()
            if request.ask == "key":
                return self._offer_key(message, store, memory)
            arrived, before = self._open_model(message, request, memory)
            notes = None if self.guard is None else notes_of(before, context, self.folder)
            if notes is not None:
                claims.enter_context(notes.claimed())  # until saved: two jobs at once must not both find it unseen
            kept = {**held(request, arrived), **self._look_at(before, memory, notes)}
            me = torch.tensor([request.round, context.node_id - 2**63])  # numbers of nodes take 64 bits without a sign
            _refuse_company(memory, me)
            like = records.parameters_of(before, self.local)
            mask = self._open_mask(message, like)
            courier = self._courier(like, memory, request, context)  # refuses a lost residual before any work is done
            _strip(message)
            with accounting() as account:
                reply = _answer(call_next(message, context))
            after, examples = self._read_answer(reply, before)
            grads = tree.sub(like, records.parameters_of(after, self.local))
            if request.ask == "mask":
                proposal = {**records.mask_content(courier.veil.propose(grads)), **_held_record(request)}
                save(store, notes, {**memory, **kept})
                return Message(RecordDict(proposal), reply_to=message)
            upload = courier.send(grads, examples, mask, self._largest(account, grads, examples))
            content = RecordDict({
                request.key: ArrayRecord({"update": self._wrap(upload, request, like, memory),
                                          **self._sent_buffers(after)}),
                **{key: MetricRecord(numbers) for key, numbers in records.numbers_of(reply.content).items()},
                records.OURS: ConfigRecord({"upload": upload.id, "round": request.round, **_holds(request)}),
            })  # fmt: skip
            own = tree.under("buffer", {n: t for n, t in after.items() if self._stays(n)})
            save(store, notes, {**courier.memory(), **own, **kept, "answered": me})  # last: nothing after it can fail
            return Message(content, reply_to=message)

    def _wrap(self, upload: Upload, request: records.Request, like: Grads, memory: Tensors) -> Array:
        """Return the array that leaves."""
        return records.blob(upload.payload.body, records.UPDATE)

    def _offer_key(self, message: Message, store: Store, memory: Tensors) -> Message:
        raise NeedError("the server wants secure aggregation: use SecureVeilMod")

    def _other(self, message: Message, context: Context, call_next: Handler) -> Message:
        """Let the app answer with metrics; it sees the model with this node's own buffers."""
        known = {}
        if records.OURS in message.content.config_records:
            request = records.Request.read(message)
            store = store_of(request.job, context, self.folder)
            with store.claimed():
                memory = store.load()
                arrived, _ = self._open_model(message, request, memory)
                if request.version is not None:
                    store.save({**memory, **held(request, arrived)})
            known = _held_record(request)
            _strip(message)
        reply = _answer(call_next(message, context))
        return Message(RecordDict({**records.metrics_only(reply.content), **known}), reply_to=message)

    def _open_model(self, message: Message, request: records.Request, memory: Tensors) -> tuple[Tensors, Tensors]:
        """Return the model as the server has it, and as the app sees it: with this node's own buffers."""
        key, arrived = receive(message.content, request, memory, self.local)
        own = {n: t for n, t in tree.only("buffer", memory).items() if n in arrived and self._stays(n)}
        seen = {**arrived, **own}
        record = ArrayRecord({name: Array(tensor.numpy()) for name, tensor in seen.items()})
        message.content = RecordDict({**message.content, key: record})
        return arrived, seen

    def _look_at(self, model: Tensors, memory: Tensors, notes: FileStore | None) -> Tensors:
        """Let the guard look at a model that is to be trained, and return what it remembers."""
        if self.guard is None:
            return {}
        seen = recall(self.guard, model, tree.only("guard", memory), {} if notes is None else notes.load())
        rng = torch.Generator().manual_seed(secrets.randbits(63) if self.seed is None else self.seed)
        return tree.under("guard", self.guard.admit(model, seen, input_shape=self.input_shape, rng=rng).state_dict())

    def _open_mask(self, message: Message, like: Grads) -> Masks | None:
        mask = records.read_mask(message.content, like)
        if mask is not None:
            part = find(self.defense, AlignedDualPrune)
            if part is None:
                raise NeedError(f"the server runs aligned rounds, but {self.defense.key()} has none: use its defense")
            part.validate(mask, like)
        return mask

    def _courier(self, like: Grads, memory: Tensors, request: records.Request, context: Context) -> Courier:
        client = str(context.node_config.get("partition-id", context.node_id))
        try:
            courier = Courier(Veil(self.defense, like, seed=self.seed, client=client), like, memory)
            courier.settle(request.last, request.used)
        except StateError as error:
            if not self.restart_lost:
                raise
            log.warning("starting from a zero residual: %s", error)
            courier = Courier(Veil(self.defense, like, seed=self.seed, client=client), like, {})
        return courier

    def _read_answer(self, reply: Message, before: Tensors) -> tuple[Tensors, int]:
        """Return the app's new model and number of examples; refuse anything that is not exactly that."""
        odd = [key for key in reply.content if not isinstance(reply.content[key], ArrayRecord | MetricRecord)]
        if odd:
            raise NeedError(
                f"the app's answer holds {odd[0]!r}, which is neither the model nor metrics: nothing is sent"
            )
        after = records.tensors_of(records.model_record(reply.content)[1])
        if {n: (t.shape, t.dtype) for n, t in after.items()} != {n: (t.shape, t.dtype) for n, t in before.items()}:
            raise NeedError("the app's answer is not the model it got (other names, shapes or types): nothing is sent")
        numbers = {k: v for record in records.numbers_of(reply.content).values() for k, v in record.items()}
        examples = numbers.get(self.weight_key)
        if not isinstance(examples, int) or examples < 1:
            raise NeedError(f"the app's metrics need {self.weight_key!r}, a whole number above 0, got {examples!r}")
        return after, examples

    def _largest(self, account: Account, update: Grads, examples: int) -> Tensors | None:
        largest = account.largest(update, examples)
        if self.follow and largest is None:
            raise NeedError(
                "the app followed no example, though VeilMod(follow=True) wants it: train inside "
                "gradveil.engines.following.following(model, optimizer)"
            )
        return largest

    def _sent_buffers(self, after: Tensors) -> dict[str, Array]:
        if self.buffers == "local":
            return {}
        floats = records.sent_buffers(after)
        return {"buffers": records.blob(wire.encode(floats), records.BUFFERS)} if floats else {}

    def _stays(self, name: str) -> bool:
        if name in self.local:
            return True
        return records.is_buffer(name) and (self.buffers == "local" or name.endswith("num_batches_tracked"))


def _refuse_company(memory: Tensors, me: Tensor) -> None:
    """Refuse the memory of another node: a node that came back under a new number is not asked twice in one round."""
    round_, node = memory.get("answered", me).tolist()
    if round_ == int(me[0]) and node != int(me[1]):
        raise StateError(
            "another node has answered in this round from the same memory: give every node a folder or a "
            "partition-id of its own"
        )


def _holds(request: records.Request) -> dict[str, int]:
    return {} if request.version is None else {"holds": request.version}


def _held_record(request: records.Request) -> dict[str, ConfigRecord]:
    """Return the record that tells which model this node keeps, if the server wants it to keep one."""
    return {} if request.version is None else {records.OURS: ConfigRecord(_holds(request))}


def _answer(reply: Any) -> Message:
    """Return the app's answer; Flower's SuperNode would hang on anything that is not a message."""
    if not isinstance(reply, Message):
        raise NeedError(f"the client app returned {type(reply).__name__} instead of a Message: nothing is sent")
    if reply.has_error():
        log.error("the client app answered with an error: %s", reply.error.reason)
        raise EngineError(
            f"the client app answered with error {reply.error.code}; its text stays in the log of this node"
        )
    return reply


def _strip(message: Message) -> None:
    """Take gradveil's records out of a message before the app sees it."""
    message.content = RecordDict({k: v for k, v in message.content.items() if not k.startswith(records.OURS)})
