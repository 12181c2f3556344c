"""One optimisation loop for many independent problems at once: each row of the variables is a problem of its own."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..capture import captured, full_precision
from . import keep, progress
from .lbfgs import RowLbfgs

# variables, share of the steps done (0-d) -> what is minimised [N], the matching loss inside it [N]
Cost = Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]]

BETAS = (0.9, 0.999)
EPS = 1e-8
LOOK_EVERY = 50  # steps between two checks for an early stop: each check waits for the GPU
DIVERGED = 10.0  # a row is given up when its loss passes this multiple of where it began
WARM_UP = 50  # steps of rising rate before a cosine decay


@dataclass(frozen=True)
class Descent:
    """How to go down."""

    optimizer: str = "adam"
    lr: float = 0.1
    steps: int = 2500
    signed: bool = True
    decay: str = "step"
    langevin: float = 0.0
    stop: float = 0.0
    siblings: int = 1  # this many neighbouring rows attack the same upload; one of them arriving is enough
    record: bool = True  # on a GPU, as a CUDA graph; a cost that reads values on the CPU cannot be recorded


def rate(step: int, how: Descent) -> float:
    """Return the learning rate of a step counted from 0.

    >>> [round(rate(t, Descent(steps=2500)), 4) for t in (0, 936, 937, 1562, 2189)]
    [0.1, 0.1, 0.01, 0.001, 0.0001]
    """
    if how.decay == "step":
        drops = sum(step >= math.floor(how.steps / share) for share in (2.667, 1.6, 1.142))
        return how.lr * 0.1**drops
    if how.decay == "cosine":
        warm = min(1.0, (step + 1) / min(WARM_UP, max(how.steps // 10, 1)))
        return how.lr * warm * 0.5 * (1 + math.cos(math.pi * step / how.steps))
    return how.lr


class Adam:
    """One Adam step per call, in place, on buffers that never move: it can be recorded as a CUDA graph."""

    def __init__(self, cost: Cost, start: Sequence[Tensor], box: tuple[Tensor, Tensor] | None, how: Descent) -> None:
        self.cost, self.box, self.how = cost, box, how
        self.variables = [v.detach().clone() for v in start]
        self.moments = [(torch.zeros_like(v), torch.zeros_like(v)) for v in start]
        device = start[0].device
        self.lr = torch.zeros((), device=device)
        self.step = torch.zeros((), device=device)
        self.noise = torch.zeros_like(start[0])
        self.losses = torch.zeros(start[0].shape[0], device=device)

    @property
    def buffers(self) -> list[Tensor]:
        """All that a step changes."""
        return [*self.variables, *(m for pair in self.moments for m in pair), self.step, self.losses]

    def __call__(self) -> None:
        """Take one step."""
        variables = [v.requires_grad_() for v in (v.detach() for v in self.variables)]
        total, match = self.cost(variables, self.step / self.how.steps)
        slopes = torch.autograd.grad(total.sum(), variables)
        with torch.no_grad():
            self.step += 1
            self.losses.copy_(match)
            for slope, v, (first, second) in zip(slopes, self.variables, self.moments, strict=True):
                self._update(slope.sign() if self.how.signed else slope, v, first, second)
            if self.how.langevin:
                self.variables[0].add_(self.noise * (self.lr * self.how.langevin))
            if self.box is not None:
                self.variables[0].copy_(torch.clamp(self.variables[0], *self.box))

    def prepare(self, step: int, rngs: Sequence[torch.Generator]) -> None:
        """Set what a step takes from outside: its rate and its noise."""
        self.lr.fill_(rate(step, self.how))
        if self.how.langevin:
            drawn = [torch.randn(v.shape, generator=r, device=r.device) for v, r in zip(self.noise, rngs, strict=True)]
            self.noise.copy_(torch.stack(drawn))

    def _update(self, slope: Tensor, v: Tensor, first: Tensor, second: Tensor) -> None:
        first.lerp_(slope, 1 - BETAS[0])
        second.mul_(BETAS[1]).addcmul_(slope, slope, value=1 - BETAS[1])
        mean = first / (1 - BETAS[0] ** self.step)
        spread = (second / (1 - BETAS[1] ** self.step)).sqrt_().add_(EPS)
        v.sub_(mean.div_(spread).mul_(self.lr))


def minimise(
    cost: Cost,
    start: Sequence[Tensor],
    how: Descent,
    rngs: Sequence[torch.Generator] = (),
    box: tuple[Tensor, Tensor] | None = None,
) -> tuple[list[Tensor], Tensor, int]:
    """Return the last iterate, its matching loss per row (infinite where it is not finite) and the steps done.

    Rows never influence each other unless `cost` makes them. `rngs` (one per row) feed the Langevin noise only.
    """
    with full_precision():
        rows: Adam | RowLbfgs
        if how.optimizer == "lbfgs":
            rows = RowLbfgs(cost, start, how.lr, how.steps)
            done = _descend(rows, rows, how, ())
        else:
            rows = Adam(cost, start, box, how)
            record = how.record and start[0].is_cuda
            # Noise that was drawn would not be drawn again.
            kept = None if how.langevin else keep.begin(how, start, rows.buffers)
            done = _descend(rows, captured(rows, rows.buffers) if record else rows, how, rngs, kept)
        with torch.no_grad():
            _, losses = cost(rows.variables, torch.ones((), device=start[0].device))
    return rows.variables, torch.where(losses.isfinite(), losses, torch.inf), done


def _descend(
    rows: Adam | RowLbfgs,
    advance: Callable[[], None],
    how: Descent,
    rngs: Sequence[torch.Generator],
    kept: keep.Search | None = None,
) -> int:
    """Take all steps that are left, or stop where nothing is left to do; return how many were taken in all."""
    first = None
    before, ended = kept.load() if kept else (0, False)
    if ended:
        return before
    for done in range(before + 1, how.steps + 1):
        if isinstance(rows, Adam):
            rows.prepare(done - 1, rngs)
        advance()
        if progress.due(done, how.steps):
            _tell(rows, done, how, kept)
        if isinstance(rows, RowLbfgs):
            first = rows.losses.clone() if first is None else first
            rows.give_up((rows.losses > DIVERGED * first) | ~rows.losses.isfinite())
        look = done % LOOK_EVERY == 0
        ended = done == how.steps or (look and _finished(rows, how))
        if kept and (look or ended):
            kept.save_if_due(done, ended=ended)
        if ended:
            return done
    return how.steps


def _tell(rows: Adam | RowLbfgs, done: int, how: Descent, kept: keep.Search | None) -> None:
    try:
        progress.tell(done, how.steps, rows.losses, rows.variables[0])
    except BaseException:  # the watcher stops the attack
        if kept:
            kept.save(done)
        raise


def _finished(rows: Adam | RowLbfgs, how: Descent) -> bool:
    solved = rows.losses < how.stop
    over = solved if isinstance(rows, Adam) else solved | ~rows.active
    settled = solved.view(-1, how.siblings).any(1) | over.view(-1, how.siblings).all(1)
    return bool(settled.all())
