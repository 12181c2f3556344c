"""How long an audit will still take, from what its attacks took so far."""

import time
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from .plan import Cell
from .report import Column


class Event(NamedTuple):
    """How far the audit is."""

    stage: str
    done: int  # cells finished
    total: int
    step: int = 0  # of the attack that runs
    steps: int = 0
    seconds_left: float | None = None
    attack_seconds_left: float | None = None


class Pace:
    """The clock of one audit."""

    def __init__(self) -> None:
        self._took: dict[tuple[Column, str], float] = {}
        self._began = time.monotonic()
        self._step = 0

    def finished(self, cell: Cell, seconds: float) -> None:
        """Remember what an attack took."""
        self._took[cell.column, cell.attack] = seconds

    def cost(self, cell: Cell) -> float | None:
        """Return what this attack took before, in this column if it ran there."""
        other = [seconds for (_, attack), seconds in self._took.items() if attack == cell.attack]
        return self._took.get((cell.column, cell.attack), max(other, default=None))

    def left(self, cells: Sequence[Cell], step: int, steps: int) -> tuple[float | None, float | None]:
        """Return the seconds left for all open cells, of which the first runs, and for the attack that runs.

        An attack that goes through its steps several times starts anew each time.
        """
        now = time.monotonic()
        if step <= self._step:
            self._began = now
        self._step = step
        costs = [self.cost(cell) for cell in cells]
        own = None
        if step and costs:
            whole = (now - self._began) * steps / step
            own = whole * (1 - step / steps)
            costs[0] = max(whole, costs[0] or 0.0)
        known = [cost for cost in costs if cost is not None]
        if not known:
            return None, own
        done = (costs[0] or 0.0) * step / steps if steps and costs else 0.0
        return sum(fmean(known) if cost is None else cost for cost in costs) - done, own
