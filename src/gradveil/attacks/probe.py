"""Finding out what a known defense prunes, by letting it prune a gradient whose ranks are known."""

import torch

from ..core import Batch, Defense, Step
from ..errors import GradveilError

ENTRIES = 10_000


def pruned_shares(defense: Defense) -> tuple[float, float, float]:
    """Return the shares of a tensor removed from the top and from the bottom by magnitude, and the share sent between.

    (0, 0, 1) where the defense prunes nothing, or cannot be tried without a client.

    >>> from gradveil.defenses import dgp, top_k
    >>> pruned_shares(dgp()), pruned_shares(top_k())
    ((0.05, 0.75, 1.0), (0.0, 0.8, 1.0))
    """
    ladder = torch.arange(ENTRIES, 0, -1, dtype=torch.float32)
    grads = {"w": ladder[None] if "per_example" in defense.needs else ladder}
    step = Step(torch.Generator().manual_seed(0), batch=Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)))
    try:
        state = defense.init({"w": ladder})
        if "mask" in defense.needs:
            step = Step(step.rng, mask=defense.propose(grads, state, step))
        sent, _ = defense.apply(grads, state, step)
    except (GradveilError, ValueError):
        return 0.0, 0.0, 1.0
    ranks = sent["w"].nonzero()
    if not len(ranks):
        return 0.0, 0.0, 1.0
    first, last = int(ranks[0]), int(ranks[-1]) + 1
    return first / ENTRIES, (ENTRIES - last) / ENTRIES, len(ranks) / (last - first)
