"""L-BFGS without line search for many independent rows at once, as `torch.optim.LBFGS` does it for one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CURVED = 1e-10  # a pair below this product carries no curvature and is left out
FLAT = 1e-9  # smaller steps or slopes than this end a row


class RowLbfgs:
    """One iteration per call for all rows; a row that ended, or was given up, stays where it is."""

    def __init__(
        self,
        cost: Callable[[Sequence[Tensor], Tensor], tuple[Tensor, Tensor]],
        start: Sequence[Tensor],
        lr: float,
        steps: int,
        history: int = 100,
    ) -> None:
        self.cost, self.lr, self.steps, self.history = cost, lr, steps, history
        self.shapes = [v.shape for v in start]
        self.flat = torch.cat([v.detach().flatten(1) for v in start], 1)
        rows = self.flat.shape[0]
        self.active = torch.ones(rows, dtype=torch.bool, device=self.flat.device)
        self.pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # step, change of slope, 1 / product (0: left out)
        self.scale = torch.ones(rows, 1, device=self.flat.device)
        self.done = 0
        self.losses, self.slope = self._evaluate()
        self.best, self.best_losses = self.flat.clone(), self.losses.clone()

    @property
    def variables(self) -> list[Tensor]:
        """The best iterate of each row: without line search the last one may be far off."""
        sizes = [int(torch.Size(s[1:]).numel()) for s in self.shapes]
        return [part.view(shape) for part, shape in zip(self.best.split(sizes, 1), self.shapes, strict=True)]

    def give_up(self, rows: Tensor) -> None:
        """Let these rows rest."""
        self.active &= ~rows

    def __call__(self) -> None:
        """Take one step."""
        direction = self._direction()
        first = self.lr / self.slope.abs().sum(1, keepdim=True).clamp_min(self.lr)  # as torch: at most lr / |slope|_1
        length = first if self.done == 0 else torch.full_like(first, self.lr)
        move = torch.where(self.active[:, None], direction * length, 0.0).nan_to_num_(0.0, 0.0, 0.0)
        before_losses, before_slope = self.losses, self.slope
        self.flat = self.flat + move
        self.done += 1
        losses, slope = self._evaluate()
        self.losses = torch.where(self.active, losses, before_losses)
        self.slope = torch.where(self.active[:, None], slope, before_slope)
        self._remember(move, self.slope - before_slope)
        better = self.losses < self.best_losses
        self.best = torch.where(better[:, None], self.flat, self.best)
        self.best_losses = torch.where(better, self.losses, self.best_losses)
        self.active &= move.abs().amax(1) > FLAT
        self.active &= self.slope.abs().amax(1) > FLAT

    def _evaluate(self) -> tuple[Tensor, Tensor]:
        sizes = [int(torch.Size(s[1:]).numel()) for s in self.shapes]
        flat = self.flat.detach().requires_grad_()
        variables = [part.view(shape) for part, shape in zip(flat.split(sizes, 1), self.shapes, strict=True)]
        total, match = self.cost(variables, torch.tensor(self.done / self.steps, device=flat.device))
        return match.detach(), torch.autograd.grad(total.sum(), flat)[0]

    def _remember(self, step: Tensor, change: Tensor) -> None:
        product = (step * change).sum(1, keepdim=True)
        curved = product > CURVED
        inverse = torch.where(curved, 1 / product, 0.0)
        self.scale = torch.where(curved, product / change.square().sum(1, keepdim=True), self.scale)
        self.pairs = [*self.pairs, (step, change, inverse)][-self.history :]

    def _direction(self) -> Tensor:
        q, weights = -self.slope, []
        for step, change, inverse in reversed(self.pairs):
            weight = (step * q).sum(1, keepdim=True) * inverse
            q = q - weight * change
            weights.append(weight)
        q = q * self.scale
        for (step, change, inverse), weight in zip(self.pairs, reversed(weights), strict=True):
            q = q + step * (weight - (change * q).sum(1, keepdim=True) * inverse)
        return q
