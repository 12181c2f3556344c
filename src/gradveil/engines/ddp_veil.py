"""One rank's side of a DDP step: buckets come in, are protected and exchanged, and go back as the mean of all ranks."""

import hashlib
import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from .. import tree
from ..core import Defense, Grads, Masks, State, Step, Tensors
from ..defenses import AlignedDualPrune, DualPrune, Identity, TopK
from ..errors import EngineError, GradientError, NeedError, StateError
from ..secret import system_seed
from ..shares import Watch
from ..veil import Veil, derive_rng
from .ddp_exchange import Exchange, Transit
from .fit import parts_of

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
    """Buckets whose protected values are on their way; without a transit if the step is void."""

    buckets: list[_Bucket]
    names: list[str]  # of the parameters, in order
    transit: Transit | None = None


class RankVeil:
    """A defense at work inside a DDP model; made by `ddp.attach`.

    Guarantees: what a rank hands to a collective is the output of `defense.apply`, in aligned rounds also a mask, and
    three kinds of counts (is it finite, was it used, how many values). All ranks end a step with equal gradients. If
    any rank's gradient holds NaN or infinity, the step has no effect on any rank: no residual changes, all gradients
    are zero (infinite, if a gradient scaler waits for that sign) and `skipped` grows by one. A step that breaks off, by
    an exception here or elsewhere in backward, is the last: this rank cannot know what its peers made of it, so every
    later forward, backward and `state_dict` raises `EngineError`. Does not hide a rank's message from the other ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        defense: Defense,
        *,
        num_examples: int | None = None,
        seed: int | None = None,
        scaler: Any = None,
        follow: bool = False,
    ) -> None:
        params = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
        self.defense, self.num_examples = defense, num_examples
        self.round = 0
        self.skipped = 0
        self._names = {id(p): name for name, p in params.items()}  # by parameter: DDP rebuilds its buckets
        self._like = {name: torch.zeros(p.shape, device=p.device) for name, p in params.items()}
        self._peers = Exchange(model.process_group, next(iter(self._like.values())).device)
        self._scaler = scaler
        self._watch = Watch(model.module) if follow else None
        self._seeded = seed is not None
        self._seed = system_seed() if seed is None else seed
        draw = secrets.randbits(31) if seed is None else seed & 0x7FFFFFFF
        mine = _digest(defense)
        self._lottery, most, least = self._peers.agree([draw, mine, -mine])
        if most != -least:
            raise EngineError(
                "the ranks attach different defenses, and one of them may send bare gradients: use one for all"
            )
        self._state: State = defense.init(self._like)
        self._layerwise = all(type(part) in _LAYERWISE for part in parts_of(defense))
        self._may_be_unused = model.find_unused_parameters
        self._waiting: list[_Bucket] = []
        self._flying: list[_Flight] = []
        self._next_state: State = {}
        self._bad = False
        self._broken = False  # an exception came out of the hook

    @property
    def residual(self) -> Grads | None:
        """What this rank has held back so far, if the defense keeps it."""
        return self.defense.residual(self._state)

    @property
    def bytes_sent(self) -> int:
        """What this rank has handed to collectives so far."""
        return self._peers.bytes_sent

    def state_dict(self) -> Tensors:
        """Return this rank's state as tensors (never the seed); every rank saves its own."""
        self.refuse_if_broken()
        return {
            **tree.under("state", self._state),
            "round": torch.tensor(self.round),
            "lottery": torch.tensor(self._lottery),
            "rank": torch.tensor([self._peers.rank, self._peers.world]),
        }

    def load_state_dict(self, saved: Tensors) -> None:
        """Continue from this rank's `state_dict`; raises `StateError` and changes nothing if it does not fit."""
        owner = saved.get("rank", torch.tensor([])).tolist()
        if owner != [self._peers.rank, self._peers.world]:
            raise StateError(
                f"this is rank {self._peers.rank} of {self._peers.world}, the state is of (rank, world) = {owner}: "
                "each rank loads the file it saved"
            )
        probe = Veil(self.defense, self._like)
        probe.load_state_dict(saved)
        self._state = tree.only("state", probe.state_dict())
        self.round, self._lottery = probe.round, int(saved["lottery"])
        if not self._seeded:
            self._seed = probe._seed  # fresh, as in `Veil.load_state_dict`

    def rehearse(self) -> None:
        """Run the defense once on zeros, so that whatever it lacks is said before training starts."""
        mask = self.defense.propose(self._like, self._state, self._step(None)) if self._aligned else None
        try:
            self.defense.apply(self._like, self._state, self._step(mask))
        except NeedError as error:
            raise NeedError(f"{error} (in DDP: ddp.attach(..., num_examples=...))") from error

    # register_comm_hook compares these very annotations, and wants the argument called `bucket`.
    def hook(self, _: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        """Protect one bucket; DDP calls this during backward, in the order of the buckets."""
        if self._broken or bucket.index() == 0:
            self.refuse_if_broken()
        self._broken = True  # until this bucket is dealt with, whatever is raised meanwhile
        promise = self._take(bucket)
        self._broken = False
        return promise

    def _take(self, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
        buffer = bucket.buffer()
        if buffer.is_sparse:
            raise GradientError("sparse gradients cannot be protected: nn.Embedding(..., sparse=False)")
        names = [self._names[id(p)] for p in bucket.parameters()]
        promise: Future[Tensor] = Future(devices=[buffer.device] if buffer.is_cuda else None)
        self._waiting.append(_Bucket(buffer, dict(zip(names, bucket.gradients(), strict=True)), promise))
        if self._layerwise or bucket.is_last():
            self._launch(self._waiting)
            self._waiting = []
        if bucket.is_last():
            self._land()
        return promise

    def refuse_if_broken(self, *_: object) -> None:
        """Raise `EngineError` if the last step never came to its end; runs before every forward."""
        if self._broken or self._waiting or self._flying:
            raise EngineError(
                f"step {self.round} broke off on rank {self._peers.rank}, and the other ranks may have used what it "
                "sent: nothing more is sent or saved. Start all ranks again from their last checkpoint"
            )

    def _launch(self, buckets: list[_Bucket]) -> None:
        """Protect these buckets and start their exchange."""
        self._peers.step = self.round
        scale = self._scale()
        views = {name: view for bucket in buckets for name, view in bucket.views.items()}
        grads = {name: views[name].float() / scale for name in self._like if name in views}
        finite = all(bool(torch.isfinite(g).all()) for g in grads.values())
        largest = self._largest(views)
        untold = finite and largest is None and self._watch is not None
        news = [int(not finite), int(untold), *(self._touched(g) for g in grads.values())]
        bad, untold_somewhere, *touched = self._peers.agree(news)
        flight = _Flight(buckets, list(grads))
        self._flying.append(flight)
        self._bad = self._bad or bool(bad)
        if self._bad:
            return
        if untold_somewhere:
            raise NeedError(
                "single examples cannot be followed through this model: it holds layers of unknown kinds or uses a "
                "weight twice, or its loop changes gradients. ddp.attach(..., follow=False) does without"
            )
        masks = self._common_mask(grads) if self._aligned else None
        sent, state = self.defense.apply(grads, self._state, self._step(masks, largest))
        unused = {name for name, seen in zip(grads, touched, strict=True) if not seen}
        if unused:
            sent, state = self._hold_back(unused, sent, state)
        self._next_state |= state
        flight.transit = self._peers.start(_flatten(sent), None if masks is None else _flatten(masks))

    def _hold_back(self, unused: set[str], sent: Grads, state: State) -> tuple[Grads, State]:
        """Keep what was to be sent for parameters no rank used: DDP leaves their grad at None and would drop it."""
        lost = {name: g if name in unused else torch.zeros_like(g) for name, g in sent.items()}
        if self.defense.residual(state) is not None:
            state = self.defense.take_back(lost, state, newest=True)
        return tree.sub(sent, lost), state

    def _land(self) -> None:
        """Wait for every exchange, fill the buckets and, if all went well, take over the new state."""
        flights, self._flying = self._flying, []
        means = [self._peers.finish(flight.transit) for flight in flights if flight.transit is not None]
        if self._bad:
            for flight in flights:
                for bucket in flight.buckets:
                    bucket.buffer.fill_(0.0 if self._scaler is None else math.inf)
        else:
            for flight, mean in zip(flights, means, strict=True):
                self._deliver(flight, mean * self._scale())
            self._state = {**self._state, **self._next_state}
        self.skipped += int(self._bad)
        self.round += 1
        self._next_state, self._bad = {}, False
        for flight in flights:
            for bucket in flight.buckets:
                bucket.promise.set_result(bucket.buffer)

    def _deliver(self, flight: _Flight, mean: Tensor) -> None:
        sizes = [self._like[name].numel() for name in flight.names]
        pieces = dict(zip(flight.names, torch.split(mean, sizes), strict=True))
        for bucket in flight.buckets:
            for name, view in bucket.views.items():
                view.copy_(pieces[name].view(view.shape))

    def _common_mask(self, grads: Grads) -> Masks:
        """Return the mask of this step's leader, a rank drawn at random; all ranks draw the same one."""
        draw = derive_rng(self._lottery, "leader", self.round)
        leader = int(torch.randint(self._peers.world, (1,), generator=draw))
        own = self.defense.propose(grads, self._state, self._step(None)) if leader == self._peers.rank else None
        return self._peers.common_mask(leader, own, grads)

    @property
    def _aligned(self) -> bool:
        return "mask" in self.defense.needs

    def _touched(self, grad: Tensor) -> int:
        return int(bool(grad.any())) if self._may_be_unused else 1

    def _largest(self, grads: Grads) -> Tensors | None:
        """Return the largest share of one example in every tensor, if they are followed and can be told."""
        found = None if self._watch is None else self._watch.largest(grads)
        return None if found is None else {name: share / self._scale() for name, share in found.items()}

    def _step(self, masks: Masks | None, largest: Tensors | None = None) -> Step:
        rng = derive_rng(self._seed, f"rank{self._peers.rank}", self.round, device=self._peers.device.type)
        return Step(rng=rng, round=self.round, mask=masks, num_examples=self.num_examples, largest=largest)

    def _scale(self) -> float:
        """Return the loss scale: residuals are kept in the units of the true gradient."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())


def _digest(defense: Defense) -> int:
    """Return what ranks compare: a number that equal defenses have in common in every process."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(defense))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _flatten(tensors: Tensors) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tensors.values()])
