"""One protector for each family of defenses: what a defense does to one user, done to all at once."""

from ...core import Defense
from ...defenses import (
    ATS,
    AlignedDualPrune,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Hardened,
    Identity,
    Soteria,
    TopK,
)
from ..flat import Rows
from ..job import Job
from .base import Protector
from .each import Each
from .hardened import Noisy
from .pruning import Aligned, Band
from .soteria import HiddenColumns
from .stateless import Open, Transformed, White

__all__ = ["Protector", "protector_for"]


def protector_for(defense: Defense, rows: Rows, job: Job) -> Protector:
    """Return the fastest protector that does what `defense` does."""
    # Exact types: a subclass may do more than its parent.
    operator = defense.inner if type(defense) is ErrorFeedback else defense
    if type(operator) is Identity:
        return Open(defense, rows)
    if type(operator) is TopK or (type(operator) is DualPrune and operator.excess == "hold"):
        return Band(defense, operator, rows)
    if type(operator) is AlignedDualPrune:
        return Aligned(defense, operator, rows, job)
    if type(defense) is GaussianNoise and not defense.sent_only and rows.grads.is_cuda:
        return White(defense, rows, job)
    if type(defense) is ATS and rows.grads.is_cuda:
        return Transformed(defense, rows, job)
    if type(defense) is Soteria and defense.probes and rows.grads.is_cuda:
        return HiddenColumns(defense, rows, job)
    if type(defense) is Hardened:
        return Noisy(defense, rows, job)
    return Each(defense, rows, job)
