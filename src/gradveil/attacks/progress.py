"""How an attack tells whoever watches how far it is: a bar, a live page, a log.

Attacks are plain frozen data, so the watcher is not a field of theirs: it belongs to the caller's context, and every
attack started inside it reports there, also through wrappers such as an audit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from torch import Tensor

from .. import check


class Progress(NamedTuple):
    """Where an optimisation is."""

    step: int  # steps done
    total: int  # steps planned
    loss: float  # the attacker's own matching loss, mean over the pictures under attack
    losses: Tensor  # [N], one per candidate batch
    inputs: Tensor  # [N, B, ...] the candidates now, in model-input space


class _Watcher(NamedTuple):
    tell: Callable[[Progress], None]
    every: int


_watcher: ContextVar[_Watcher | None] = ContextVar("gradveil_watcher", default=None)


@contextmanager
def watch(tell: Callable[[Progress], None], every: int = 50) -> Iterator[None]:
    """Call `tell` every `every` steps, and at the last one, of each attack run inside this context.

    An exception raised by `tell` stops the attack: that is how a caller cancels one.
    """
    check.at_least(1, every=every)
    token = _watcher.set(_Watcher(tell, every))
    try:
        yield
    finally:
        _watcher.reset(token)


def due(step: int, total: int) -> bool:
    """Say whether somebody wants to know about this step; reading the loss costs a wait for the GPU."""
    watcher = _watcher.get()
    return watcher is not None and (step % watcher.every == 0 or step == total)


def tell(step: int, total: int, losses: Tensor, inputs: Tensor) -> None:
    """Report to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is not None:
        losses = losses.detach().clone()
        watcher.tell(Progress(step, total, float(losses.mean()), losses, inputs.detach().clone()))
