"""PyTorch DDP: every rank protects its own gradient before anything is exchanged.

    model = DistributedDataParallel(model)
    guard = attach(model, dgp())

`backward()` then runs the defense on this rank's gradient and leaves the mean of what all ranks sent in `.grad`.
Nothing else of the training loop changes.
"""

import contextlib
import math
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import tree
from ..core import Defense, Grads, Masks, State, Step, Tensors
from ..defenses import AlignedDualPrune, Chain, DualPrune, ErrorFeedback, Identity, TopK
from ..errors import EngineError, NeedError, StateError
from ..veil import Veil, derive_rng
from .packing import pack_masks, pack_sparse, sparse_pays, unpack_masks, unpack_sparse

# Operators that treat every tensor alone and draw no random number: a bucket can be protected and sent while backward
# still runs. Anything else waits for the whole gradient, so that its result does not depend on the buckets.
_LAYERWISE = (Identity, DualPrune, TopK, AlignedDualPrune)


@dataclass
class _Bucket:
    """One of DDP's buckets: its flat buffer, the parameters' views of it, and the promise DDP waits for."""

    buffer: Tensor
    views: dict[str, Tensor]
    promise: "Future[Tensor]"


@dataclass
class _Flight:
    """Buckets whose protected values are on their way."""

    buckets: list[_Bucket]
    used: list[str] = field(default_factory=list)  # parameters that take part, in order
    masks: Masks | None = None
    room: int = 0  # values in a packed message; 0 when `parts` holds one sum
    parts: list[Tensor] = field(default_factory=list)
    work: Any = None


class Guard:
    """A defense at work inside a DDP model; made by `attach`.

    Guarantees: what a rank hands to a collective is the output of `defense.apply`, in aligned rounds also a mask, and
    three kinds of counts (is it finite, was it used, how many values). All ranks end a step with equal gradients. If
    any rank's gradient holds NaN or infinity, the step has no effect on any rank: no residual changes, all gradients
    are zero (infinite, if a gradient scaler waits for that sign) and `skipped` grows by one. Does not hide a rank's
    message from the other ranks.
    """

    def __init__(
        self, model: DistributedDataParallel, defense: Defense, *, seed: int | None = None, scaler: Any = None
    ) -> None:
        self.defense = defense
        self.round = 0
        self.skipped = 0
        self.bytes_sent = 0  # what this rank handed to collectives
        self._group = model.process_group
        self._world, self._rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        self._scaler = scaler
        params = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self._names = {id(p): name for name, p in params.items()}  # by parameter: DDP rebuilds its buckets
        self._like = {name: torch.zeros(p.shape, device=p.device) for name, p in params.items()}
        self._device = next(iter(self._like.values())).device
        self._seed = secrets.randbits(63) if seed is None else seed
        self._lottery = self._agree([secrets.randbits(31) if seed is None else seed & 0x7FFFFFFF])[0]
        self._state: State = defense.init(self._like)
        self._layerwise = _is_layerwise(defense)
        self._may_be_unused = model.find_unused_parameters
        self._waiting: list[_Bucket] = []
        self._flying: list[_Flight] = []
        self._next_state: State = {}
        self._bad = False

    @property
    def residual(self) -> Grads | None:
        """What this rank has held back so far, if the defense keeps it."""
        return self.defense.residual(self._state)

    def state_dict(self) -> Tensors:
        """Return this rank's state as tensors (never the seed); every rank saves its own."""
        return {
            **tree.under("state", self._state),
            "round": torch.tensor(self.round),
            "lottery": torch.tensor(self._lottery),
            "rank": torch.tensor([self._rank, self._world]),
        }

    def load_state_dict(self, saved: Tensors) -> None:
        """Continue from this rank's `state_dict`; raises `StateError` and changes nothing if it does not fit."""
        owner = saved.get("rank", torch.tensor([])).tolist()
        if owner != [self._rank, self._world]:
            raise StateError(
                f"this is rank {self._rank} of {self._world}, the state is of (rank, world) = {owner}: "
                "each rank loads the file it saved"
            )
        probe = Veil(self.defense, self._like)
        probe.load_state_dict(saved)
        self._state = tree.only("state", probe.state_dict())
        self.round, self._lottery = probe.round, int(saved["lottery"])

    # register_comm_hook compares these very annotations, and wants the argument called `bucket`.
    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Protect one bucket; DDP calls this during backward, in the order of the buckets."""
        buffer = bucket.buffer()
        names = [self._names[id(p)] for p in bucket.parameters()]
        promise: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._waiting.append(_Bucket(buffer, dict(zip(names, bucket.gradients(), strict=True)), promise))
        if self._layerwise or bucket.is_last():
            self._launch(self._waiting)
            self._waiting = []
        if bucket.is_last():
            self._land()
        return promise

    def _launch(self, buckets: list[_Bucket]) -> None:
        """Protect these buckets and start their exchange."""
        scale = self._scale()
        views = {name: view for bucket in buckets for name, view in bucket.views.items()}
        grads = {name: views[name].float() / scale for name in self._like if name in views}
        finite = all(bool(torch.isfinite(g).all()) for g in grads.values())
        bad, *touched = self._agree([int(not finite), *(self._touched(g) for g in grads.values())])
        self._bad = self._bad or bool(bad)
        # A parameter no rank used keeps grad=None, so DDP would drop a residual sent for it: it takes no part.
        flight = _Flight(buckets, [name for name, seen in zip(grads, touched, strict=True) if seen])
        self._flying.append(flight)
        if self._bad or not flight.used:
            return
        grads = {name: grads[name] for name in flight.used}
        flight.masks = self._common_mask(grads) if "mask" in self.defense.needs else None
        sent, state = self.defense.apply(grads, self._state, self._step(flight.masks))
        self._next_state |= state
        self._exchange(flight, _flatten(sent))

    def _exchange(self, flight: _Flight, flat: Tensor) -> None:
        """Start the cheapest collective: the sum inside the common mask, packed messages, or the dense sum."""
        packed = False
        if flight.masks is not None:
            flat = flat[_flatten(flight.masks)]
        else:
            room = self._agree([int(torch.count_nonzero(flat))])[0]
            packed = sparse_pays(flat.numel(), room, self._world)
        with self._explained():
            if packed:
                flight.room, message = room, pack_sparse(flat, room)
                flight.parts = [torch.empty_like(message) for _ in range(self._world)]
                flight.work = dist.all_gather(flight.parts, message, group=self._group, async_op=True)
            else:
                message = flat
                flight.parts = [message]
                flight.work = dist.all_reduce(message, group=self._group, async_op=True)
        self.bytes_sent += message.nbytes

    def _land(self) -> None:
        """Wait for every exchange, fill the buckets and, if all went well, take over the new state."""
        flights, self._flying = self._flying, []
        for flight in flights:
            if flight.work is not None:
                with self._explained():
                    flight.work.wait()
        for flight in flights:
            if not self._bad:
                self._deliver(flight)
            for bucket in flight.buckets:
                if self._bad:
                    bucket.buffer.fill_(0.0 if self._scaler is None else math.inf)
                bucket.promise.set_result(bucket.buffer)
        self.skipped += int(self._bad)
        self._state = self._state if self._bad else {**self._state, **self._next_state}
        self.round += 1
        self._next_state, self._bad = {}, False

    def _deliver(self, flight: _Flight) -> None:
        """Write the mean of what all ranks sent into the buckets."""
        sizes = [self._like[name].numel() for name in flight.used]
        if not flight.used:
            flat = torch.zeros(0)
        elif flight.masks is not None:
            flat = torch.zeros(sum(sizes), device=self._device)
            flat.masked_scatter_(_flatten(flight.masks), flight.parts[0])
        elif flight.room:
            flat = torch.zeros(sum(sizes), device=self._device)
            for part in flight.parts:  # in rank order, so that every rank adds alike
                flat += unpack_sparse(part, sum(sizes), flight.room)
        else:
            flat = flight.parts[0]
        mean = dict(zip(flight.used, torch.split(flat / self._world * self._scale(), sizes), strict=True))
        for bucket in flight.buckets:
            for name, view in bucket.views.items():
                view.copy_(mean[name].view(view.shape) if name in mean else torch.zeros_like(view))

    def _common_mask(self, grads: Grads) -> Masks:
        """Return the mask of this step's leader, a rank drawn at random; all ranks draw the same one."""
        leader = int(torch.randint(self._world, (1,), generator=derive_rng(self._lottery, "leader", self.round)))
        if leader == self._rank:
            packed = pack_masks(self.defense.propose(grads, self._state, self._step(None)))
            self.bytes_sent += packed.nbytes
        else:
            size = math.ceil(sum(g.numel() for g in grads.values()) / 8)
            packed = torch.empty(size, dtype=torch.uint8, device=self._device)
        with self._explained():
            dist.broadcast(packed, src=dist.get_global_rank(self._group, leader), group=self._group)
        return unpack_masks(packed, grads)

    def _agree(self, values: list[int]) -> list[int]:
        """Return the largest of each value over all ranks."""
        shared = torch.tensor(values, dtype=torch.int64, device=self._device)
        with self._explained():
            dist.all_reduce(shared, op=dist.ReduceOp.MAX, group=self._group)
        self.bytes_sent += shared.nbytes
        return [int(value) for value in shared.tolist()]

    def _touched(self, grad: Tensor) -> int:
        return int(bool(grad.any())) if self._may_be_unused else 1

    def _step(self, masks: Masks | None) -> Step:
        rng = derive_rng(self._seed, f"rank{self._rank}", self.round, device=self._device.type)
        return Step(rng=rng, round=self.round, mask=masks)

    def _scale(self) -> float:
        """Return the loss scale: residuals are kept in the units of the true gradient."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # what gloo and NCCL raise when a peer is gone or the group timed out
            raise EngineError(
                f"rank {self._rank} of {self._world} lost its peers in step {self.round}: a rank died, or the group's "
                f"timeout passed. Start all ranks again from their last checkpoint. ({error})"
            ) from error


def attach(model: DistributedDataParallel, defense: Defense, *, seed: int | None = None, scaler: Any = None) -> Guard:
    """Make `model` exchange protected gradients only, and return the guard that holds this rank's state.

    All ranks call this together, before the first backward, with the same defense. `scaler` is the
    `torch.amp.GradScaler` of the loop, if there is one: residuals are then kept in unscaled units, and a skipped step
    shows as infinity, so that the scaler lowers its scale.

    Raises:
        EngineError: `model` is not a DistributedDataParallel model.
        NeedError: the defense needs the batch, the model or per-example gradients, which a hook never sees.
    """
    if not isinstance(model, DistributedDataParallel):
        raise EngineError(_not_ddp(model))
    hidden = sorted(defense.needs & {"batch", "model", "per_example"})
    if hidden:
        raise NeedError(
            f"{defense.key()} needs {', '.join(hidden)}, but DDP hands a hook nothing but gradients: "
            "use it through Veil.protect in your own loop"
        )
    guard = Guard(model, defense, seed=seed, scaler=scaler)
    model.register_comm_hook(None, guard.hook)
    return guard


def _not_ddp(model: nn.Module) -> str:
    kind = type(model).__name__
    if kind.startswith(("FSDP", "FullySharded")):
        return (
            f"{kind} reduces gradients in shards before a hook could see this rank's own gradient, so nothing could "
            "be protected: use DistributedDataParallel"
        )
    return f"attach needs a model wrapped in DistributedDataParallel, got {kind}"


def _is_layerwise(defense: Defense) -> bool:
    if type(defense) is ErrorFeedback:
        return _is_layerwise(defense.inner)
    if type(defense) is Chain:
        return all(_is_layerwise(part) for part in defense.parts)
    return type(defense) in _LAYERWISE


def _flatten(tensors: Tensors) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors.values()])
