"""The defenses, the table that names them, and the presets that carry a paper's settings."""

from collections.abc import Callable

from ..core import Defense
from .aligned import AlignedDualPrune
from .combine import Chain, ErrorFeedback, Identity
from .noise import GaussianNoise
from .prune import DualPrune, RandomK, TopK


def dgp(top: float = 0.05, bottom: float = 0.75, rounding: str = "floor") -> Defense:
    """Dual gradient pruning as published: per tensor, both ends removed, with error feedback."""
    return ErrorFeedback(DualPrune(top, bottom, rounding))


def adgp(keep: float = 0.2, top: float = 0.05) -> Defense:
    """Aligned dual gradient pruning as published, with error feedback."""
    return ErrorFeedback(AlignedDualPrune(keep, top))


def top_k(keep: float = 0.2) -> Defense:
    """Top-k sparsification with error feedback, as in the paper's accuracy runs."""
    return ErrorFeedback(TopK(keep))


CLASSES: tuple[type[Defense], ...] = (
    Identity,
    DualPrune,
    TopK,
    RandomK,
    AlignedDualPrune,
    GaussianNoise,
    ErrorFeedback,
    Chain,
)
PRESETS: dict[str, Callable[..., Defense]] = {"none": Identity, "dgp": dgp, "adgp": adgp, "topk": top_k}
DEFENSES: dict[str, Callable[..., Defense]] = {**{c.key(): c for c in CLASSES}, **PRESETS}

__all__ = [
    "CLASSES",
    "DEFENSES",
    "PRESETS",
    "AlignedDualPrune",
    "Chain",
    "DualPrune",
    "ErrorFeedback",
    "GaussianNoise",
    "Identity",
    "RandomK",
    "TopK",
    "adgp",
    "dgp",
    "top_k",
]
