"""The cost of candidates: how badly their gradients fit the upload, and how little they look like pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..capture import full_precision
from . import objectives
from .adaptive import Target
from .simulate import Simulator

BAND_FROM = 0.2  # share of the steps after which the band counts: before, a candidate's sizes mean little
GROUP_FROM = 0.25  # and after which the candidates of one upload draw together
USUAL_START = 0.25  # cosine distance of noise on a fresh LeNet: the usual weights of the total variation suit that


Labels = Tensor | Callable[[Tensor], Tensor]  # fixed, or made from what is searched along with the pictures


@dataclass(frozen=True)
class Terms:
    """What is added up, and with which weights."""

    objective: str = "cosine"
    normalise: bool = True
    band: float = 0.0
    bn: float = 0.0
    l2: float = 0.0
    group: float = 0.0
    siblings: int = 1  # neighbouring rows that attack the same upload
    unit: float = 1.0  # how many gradients an upload holds: a distance counts in gradients, as its weights expect
    tv_first: float = 1.0  # times the weight of the total variation at the first step, which falls to 1 by the last


class Comparison:
    """`self(mine)` is the distance of each row of gradients `[N, P]` to its target."""

    def __init__(self, targets: Sequence[Target], terms: Terms) -> None:
        self.terms = terms
        self.sent = torch.stack([t.sent for t in targets])
        self.length = objectives.length_of(self.sent)
        self.weight = _stack([t.weight for t in targets], 1.0, self.sent)
        self.responses = [t.response for t in targets]
        self.masked = torch.tensor([t.weight is not None for t in targets], device=self.sent.device)[:, None]

    def __call__(self, mine: Tensor) -> Tensor:
        """Return `[N]` distances."""
        seen = self._defended(mine) if any(self.responses) else mine
        if self.terms.objective == "cosine":
            return objectives.cosine(seen, self.sent, self.length, self.weight)
        distance = objectives.l2(seen, self.sent, self.terms.normalise, self.weight)
        return distance if self.terms.normalise else distance / self.terms.unit**2

    def _defended(self, mine: Tensor) -> Tensor:
        """Return the values a client would have sent, with the slope of those it had.

        Rounding has no slope of its own, so the candidate's passes straight through. An entry that the candidate's own
        selection drops counts as zero; in a masked comparison it did arrive, so there it stays as it is.
        """
        with torch.no_grad():
            rows = zip(self.responses, mine, strict=True)
            sent = torch.stack([row if respond is None else respond(row) for respond, row in rows])
        rounded = mine + (sent - mine).detach()
        return torch.where(sent != 0, rounded, torch.where(self.masked, mine, 0.0))


class MatchingCost:
    """`self(variables, progress)` for rows of candidates; see `optimise.Cost`.

    Variables are the candidates `[N, B, ...]` and, where `labels` is a function, what it turns into labels.
    """

    def __init__(
        self, simulate: Simulator, targets: Sequence[Target], tv: Sequence[float], labels: Labels, terms: Terms
    ) -> None:
        self.simulate, self.labels, self.terms = simulate, labels, terms
        self.compare = Comparison(targets, terms)
        sent = self.compare.sent
        self.tv = torch.tensor(tv, device=sent.device) if any(tv) else None
        self.low = _stack([t.low for t in targets], 0.0, sent)
        self.high = _stack([t.high for t in targets], 0.0, sent)

    def __call__(self, variables: Sequence[Tensor], progress: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is minimised and the matching loss inside it, one value per row each."""
        x, terms = variables[0], self.terms
        mine, gap = self.simulate(x, self.labels if isinstance(self.labels, Tensor) else self.labels(variables[1]))
        match = total = self.compare(mine)
        if self.tv is not None and x.dim() >= 4:
            easing = terms.tv_first ** (1 - progress)
            total = total + self.tv * easing * objectives.total_variation(x)
        if terms.l2:
            total = total + terms.l2 * 0.5 * x.square().flatten(1).mean(1)
        if gap is not None:
            total = total + terms.bn * gap
        if self.low is not None and self.high is not None:
            inside = objectives.band_violation(mine, self.low, self.high).square().sum(1)
            energy = self.compare.sent.square().sum(1).clamp_min(objectives.FLOOR**2)
            total = total + terms.band * (progress >= BAND_FROM) * inside / energy
        if terms.group:
            total = total + terms.group * (progress >= GROUP_FROM) * self._apart(x)
        return total, match

    def smooth_by_start(self, variables: Sequence[Tensor]) -> None:
        """Weigh the total variation by the matching loss of these candidates, at most as it is weighed now."""
        with torch.no_grad(), full_precision():
            match = self(variables, torch.zeros((), device=variables[0].device))[1]
        if self.tv is not None:
            self.tv = self.tv * (match / USUAL_START).clamp(max=1.0)

    def _apart(self, x: Tensor) -> Tensor:
        together = x.view(-1, self.terms.siblings, *x.shape[1:])
        return (together - together.mean(1, keepdim=True)).view_as(x).square().flatten(1).mean(1)


def _stack(parts: Sequence[Tensor | None], default: float, like: Tensor) -> Tensor | None:
    if all(part is None for part in parts):
        return None
    return torch.stack([torch.full_like(like[0], default) if part is None else part for part in parts])
