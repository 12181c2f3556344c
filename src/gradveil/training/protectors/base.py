"""What a protector is: one defense over the gradients of all users at once.

It owns the users' defense states. `step` may overwrite the gradients and returns what is sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from ... import tree
from ...core import Batch, Defense, Masks, State
from ..flat import Rows


class Protector(ABC):
    """One defense for all users."""

    def __init__(self, defense: Defense, rows: Rows) -> None:
        self.defense = defense
        self.rows = rows
        self.mask: Masks | None = None  # of the last aligned round

    def prepare(self, round_: int, batches: Sequence[Batch]) -> Sequence[Batch]:
        """Return the batches the gradients are to be computed on."""
        return batches

    @abstractmethod
    def step(self, round_: int, batches: Sequence[Batch]) -> Tensor:
        """Protect the gradients of a round; return `[users, length]`."""

    def average(self, round_: int, batches: Sequence[Batch], shares: Tensor | None) -> Tensor:
        """Protect the gradients of a round; return only the mean, with these weights `[users, 1]` if any."""
        sent = self.step(round_, batches)
        return sent.mean(0) if shares is None else (sent * shares).sum(0)

    def states(self) -> list[State]:
        """Return the defense state of every user."""
        return [{} for _ in range(self.rows.users)]

    def load(self, states: Sequence[State]) -> None:  # noqa: B027  (most protectors have no state)
        """Continue from `states`."""

    def residual(self, user: int) -> Tensor | None:
        """Return what is held back for a user, as a row."""
        return None

    def require_finite(self) -> None:  # noqa: B027  (only selection on a GPU reports late)
        """Raise `GradientError` if a gradient since the last call was not finite."""


class Feedback(Protector):
    """A protector that may hold residuals."""

    def __init__(self, defense: Defense, rows: Rows, feedback: bool) -> None:
        super().__init__(defense, rows)
        self.held = rows.scratch() if feedback else None

    def states(self) -> list[State]:
        if self.held is None:
            return super().states()
        return [tree.under("residual", self.rows.layout.views(row)) for row in self.held]

    def load(self, states: Sequence[State]) -> None:
        if self.held is not None:
            for row, state in zip(self.held, states, strict=True):
                self.rows.layout.write(row, tree.only("residual", state))

    def residual(self, user: int) -> Tensor | None:
        return None if self.held is None else self.held[user]
