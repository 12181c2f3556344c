"""Finding out what a known defense prunes, by letting it prune a gradient whose ranks are known."""

import torch
from torch import Tensor

from ..core import Batch, Defense, Step
from ..errors import GradveilError

ENTRIES = 10_000
FLOOR = 5.0  # typical differences of two runs beyond which an entry is not noise alone


def pruned_shares(defense: Defense) -> tuple[float, float, float]:
    """Return the shares of a tensor removed from the top and from the bottom by magnitude, and the share sent between.

    (0, 0, 1) where the defense prunes nothing, or cannot be tried without a client.

    >>> from gradveil.defenses import dgp, top_k
    >>> pruned_shares(dgp()), pruned_shares(top_k())
    ((0.05, 0.75, 1.0), (0.0, 0.8, 1.0))
    """
    try:
        sent = _sent(defense, 0)
        if bool(sent.all()):  # noise may cover what was removed: what two runs mostly differ by
            floor = FLOOR * float((sent - _sent(defense, 1)).abs().median())
            sent = torch.where(sent.abs() > floor, sent, 0.0) if floor < 1 else sent
    except (GradveilError, ValueError):
        return 0.0, 0.0, 1.0
    ranks = sent.nonzero()
    if not len(ranks):
        return 0.0, 0.0, 1.0
    first, last = int(ranks[0]), int(ranks[-1]) + 1
    return first / ENTRIES, (ENTRIES - last) / ENTRIES, len(ranks) / (last - first)


def _sent(defense: Defense, seed: int) -> Tensor:
    """Return what is sent of a ladder from `ENTRIES` down to 1."""
    ladder = torch.arange(ENTRIES, 0, -1, dtype=torch.float32)
    grads = {"w": ladder[None] if "per_example" in defense.needs else ladder}
    step = Step(torch.Generator().manual_seed(seed), batch=Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)))
    state = defense.init({"w": ladder})
    if "mask" in defense.needs:
        step = Step(step.rng, mask=defense.propose(grads, state, step))
    return defense.apply(grads, state, step)[0]["w"]
