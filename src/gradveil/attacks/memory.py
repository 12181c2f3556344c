"""How many candidates are tried together: as many as the memory takes."""

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from ..core import Observation

Upload = TypeVar("Upload")
Result = TypeVar("Result")
log = logging.getLogger(__name__)

CPU_BYTES = 2**30  # working memory of one group of candidates on a CPU; beyond it, going on in turns is as fast
COPIES = 8  # vectors as long as the gradient that one candidate needs


def candidates_within(room: int, seen: Observation) -> int:
    """Return how many candidates for an upload fit into so many bytes; at least one."""
    return max(room // (COPIES * 4 * sum(g.numel() for g in seen.grads.values())), 1)


def in_halves(attack: Callable[[Sequence[Upload]], list[Result]], uploads: Sequence[Upload]) -> list[Result]:
    """Attack uploads together, or in halves where the memory of the GPU does not do."""
    try:
        return attack(uploads)
    except torch.cuda.OutOfMemoryError:
        if len(uploads) == 1:
            raise
    torch.cuda.empty_cache()  # out of the handler: there the error still holds what did not fit
    log.info("%d uploads do not fit the GPU together: attacking them in halves", len(uploads))
    half = len(uploads) // 2
    return [*in_halves(attack, uploads[:half]), *in_halves(attack, uploads[half:])]
