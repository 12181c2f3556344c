"""The pictures of several consecutive rounds, searched together."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import check
from ..core import Knowledge, Observation, Reconstruction
from ..errors import NeedError
from . import objectives
from .adaptive import Target
from .imitation import flat, forgets
from .labels import infer_labels
from .matching import GradientMatching
from .matching_cost import Comparison
from .optimise import minimise
from .rounds import OverRounds, history_of, uncovered
from .simulate import simulator
from .space import alike, box, device_of, start


@dataclass(frozen=True)
class Joint(OverRounds):
    """Simulate a client's error feedback over its last `rounds` rounds, and match all their uploads at once.

    What is sent of an entry is the sum of its gradients since it was sent before. Masks tell when that was, so every
    upload is a system of equations in the pictures of those rounds alone; no error travels from round to round as it
    does in a chain. The client need not be followed from its first round: of entries whose residual is unknown then,
    nothing is compared until they have been sent once. Returns the pictures of the last round; `info["earlier"]` holds
    those of the rounds before.
    """

    rounds: int = 3

    def __post_init__(self) -> None:
        check.at_least(1, rounds=self.rounds)
        if self.inner.optimizer != "adam" or self.inner.labels != "infer":
            raise ValueError("the joint attack needs an inner attack with optimizer='adam' and labels='infer'")

    @property
    def needs(self) -> frozenset[Knowledge]:
        return self.inner.needs | {"rounds", "defense"}

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        found: dict[int, Reconstruction] = {}
        windows = [self._window(one) for one in seen]
        for group in _clients_alike(windows):
            results = self._together([windows[i] for i in group], [rngs[i] for i in group])
            found |= dict(zip(group, results, strict=True))
        return [found[i] for i in range(len(seen))]

    def _window(self, seen: Observation) -> list[Observation]:
        """Return the last rounds, the first of them with the upload before it."""
        rounds = uncovered(history_of(seen))
        window = rounds[-self.rounds :]
        if window[0].round and not forgets(seen.defense):
            raise NeedError(f"this defense never forgets: follow it from round 0, not {window[0].round} (raise rounds)")
        before = rounds[-self.rounds - 1 : -self.rounds]
        return [replace(window[0], earlier=tuple(before)), *window[1:]]

    def _together(
        self, windows: Sequence[Sequence[Observation]], rngs: Sequence[torch.Generator]
    ) -> list[Reconstruction]:
        each, last = self.inner.restarts, windows[0][-1]
        rows = [window for window in windows for _ in range(each)]
        drawn = [rng for rng in rngs for _ in range(each)]
        begin = torch.stack(
            [torch.cat([start(one, self.inner.init, rng) for one in row]) for row, rng in zip(rows, drawn, strict=True)]
        )
        cost = JointCost(rows, self.inner)
        how = replace(self.inner.descent(), langevin=0.0, record=not any(any(c.responses) for c in cost.compare))
        found, losses, done = minimise(cost, [begin], how, (), box(last) if self.inner.box else None)
        best = losses.view(-1, each).argmin(1) + torch.arange(len(windows), device=losses.device) * each
        out = []
        for i in best.tolist():
            *earlier, now = found[0][i].split(last.num_examples)
            info = {"steps": done, "earlier": earlier}
            out.append(Reconstruction(now, cost.labels[-1][i], float(losses[i]), info))
        return out


class JointCost:
    """`self([x], progress)` for `x [N, T * B, ...]`, the candidates of T rounds of N clients; see `optimise.Cost`."""

    def __init__(self, rows: Sequence[Sequence[Observation]], attack: GradientMatching) -> None:
        columns = list(zip(*rows, strict=True))  # one per round
        device = device_of(rows[0][0])
        self.simulators = [simulator(column[0], split=attack.split) for column in columns]
        self.labels = [
            torch.stack([(infer_labels(one) if one.labels is None else one.labels).to(device) for one in column])
            for column in columns
        ]
        self.sent = [torch.stack([flat(one.grads) for one in column]) for column in columns]
        self.exact = forgets(rows[0][0].defense)
        clean = torch.stack([_residual_known(row[0]) for row in rows])
        self.compare, noisy = [], []
        for column, sent in zip(columns, self.sent, strict=True):
            aims = [attack.aim(replace(one, earlier=())) for one in column]
            aims = [_only(target, known) for target, known in zip(aims, clean, strict=True)]
            self.compare.append(Comparison(aims, attack.terms(column[0])))
            noisy.append([attack.smoothing(one, target) for one, target in zip(column, aims, strict=True)])
            clean = clean | (sent != 0)
        self.tv = torch.tensor(noisy, device=device).amax(0)

    def __call__(self, variables: Sequence[Tensor], progress: Tensor) -> tuple[Tensor, Tensor]:
        """Return what is minimised and the mean matching loss over the rounds, one value per row each."""
        x = variables[0]
        kept: Tensor | float = 0.0
        match = x.new_zeros(len(x))
        count = len(self.simulators)
        for t, now in enumerate(x.chunk(count, 1)):
            total = self.simulators[t](now, self.labels[t])[0] + kept
            match = match + self.compare[t](total) / count
            kept = torch.where(self.sent[t] != 0, 0.0, total) if self.exact else total - self.sent[t]
        smooth = self.tv * objectives.total_variation(x) if x.dim() >= 4 else 0.0
        return match + smooth, match


def _residual_known(first: Observation) -> Tensor:
    """Return the entries whose residual is zero for certain before this round."""
    nothing = torch.zeros_like(flat(first.grads), dtype=torch.bool)
    if first.round == 0:
        return ~nothing
    return flat(first.earlier[0].grads) != 0 if first.earlier else nothing


def _only(target: Target, known: Tensor) -> Target:
    weight = known.to(target.sent.dtype) if target.weight is None else target.weight * known
    return replace(target, sent=target.sent * known, weight=weight)


def _clients_alike(windows: Sequence[Sequence[Observation]]) -> list[list[int]]:
    """Return the indices of clients grouped so that their models agree in every round."""
    keys: list[tuple[int, ...]] = [()] * len(windows)
    for t in range(max(map(len, windows))):
        there = [i for i, window in enumerate(windows) if len(window) > t]
        for k, part in enumerate(alike([windows[i][t] for i in there])):
            for j in part:
                keys[there[j]] += (k,)
    return [[i for i, key in enumerate(keys) if key == wanted] for wanted in dict.fromkeys(keys)]
