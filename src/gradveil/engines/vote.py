"""One common mask out of several proposals: no single client decides which positions everybody sends.

The paper lets one random client choose the mask and names a hostile one as the weak point. A proposal of the wrong
size is easy to refuse; one of the right size that points at the least useful positions is not, because honest clients
agree on little more than half of their positions. So several clients propose, and per tensor the positions with the
most votes win. `docs/flower.md` has the measurement: with one hostile proposer among five, the mask still captures
more of the others' energy than a single honest client's mask does.
"""

from collections.abc import Sequence

import torch

from .. import select
from ..core import Masks


def vote(proposals: Sequence[Masks], rng: torch.Generator) -> Masks:
    """Return, per tensor, as many positions as each proposal holds: those with the most votes, ties drawn at random.

    >>> say = [{"w": torch.tensor([1, 1, 0, 0]) > 0}, {"w": torch.tensor([1, 1, 0, 0]) > 0},
    ...        {"w": torch.tensor([0, 0, 1, 1]) > 0}]
    >>> vote(say, torch.Generator())["w"]
    tensor([ True,  True, False, False])
    """
    if not proposals:
        raise ValueError("vote needs at least one proposal")
    scores = []
    for name, first in proposals[0].items():
        score = 1 + torch.rand(first.shape, generator=rng) / 2  # lots weigh less than a vote; nothing scores zero
        for proposal in proposals:
            score += proposal[name]
        scores.append(score)
    bands = [(0, int(torch.count_nonzero(first))) for first in proposals[0].values()]
    return {name: kept != 0 for name, kept in zip(proposals[0], select.prune(scores, bands), strict=True)}
