"""The defenses, the table that names them, and the presets that carry a paper's settings."""

from collections.abc import Callable

from ..core import Defense
from .aligned import AlignedDualPrune
from .ats import ATS
from .combine import Chain, ErrorFeedback, Identity
from .correlated import CorrelatedNoise, correlated_epsilon, gaussian_epsilon, strategy_sensitivity
from .dp import ClipNoise, DPNoise, epsilon
from .hardened import Hardened
from .noise import GaussianNoise
from .outpost import Outpost
from .precode import PRECODE
from .prune import DualPrune, RandomK, TopK
from .quantize import Quantize
from .soteria import Soteria


def dgp(top: float = 0.05, bottom: float = 0.75, rounding: str = "floor") -> Defense:
    """Dual gradient pruning as published: per tensor, both ends removed, with error feedback.

    Warning: it does not withstand an attacker who masks its own gradient with the positions that arrived.

    Compose: after what changes the gradient for good (Soteria), before noise: `Chain(dgp(), noise)`. It brings its
    own ErrorFeedback, so it does not belong inside another.
    """
    return ErrorFeedback(DualPrune(top, bottom, rounding))


def adgp(keep: float = 0.2, top: float = 0.05) -> Defense:
    """Aligned dual gradient pruning as published, with error feedback; needs the round's common mask.

    Warning: it does not withstand an attacker who masks its own gradient with the positions that arrived.

    Compose: like `dgp`; noise behind it would leave the mask unless it goes to sent entries only.
    """
    return ErrorFeedback(AlignedDualPrune(keep, top))


def top_k(keep: float = 0.2) -> Defense:
    """Top-k sparsification with error feedback, as in the paper's accuracy runs.

    Compose: like `dgp`. `TopK` alone forgets what it drops.
    """
    return ErrorFeedback(TopK(keep))


CLASSES: tuple[type[Defense], ...] = (
    Identity,
    DualPrune,
    TopK,
    RandomK,
    AlignedDualPrune,
    GaussianNoise,
    Quantize,
    Hardened,
    DPNoise,
    ClipNoise,
    CorrelatedNoise,
    Soteria,
    ATS,
    PRECODE,
    Outpost,
    ErrorFeedback,
    Chain,
)
# The paper's line-up under the paper's names and settings; a class stands for itself where its defaults are those.
PRESETS: dict[str, Callable[..., Defense]] = {
    "none": Identity,
    "dgp": dgp,
    "adgp": adgp,
    "topk": top_k,
    "dp": GaussianNoise,
    "soteria": Soteria,
    "ats": ATS,
    "precode": PRECODE,
    "outpost": Outpost,
}
DEFENSES: dict[str, Callable[..., Defense]] = {**{c.key(): c for c in CLASSES}, **PRESETS}

__all__ = [
    "ATS",
    "CLASSES",
    "DEFENSES",
    "PRECODE",
    "PRESETS",
    "AlignedDualPrune",
    "Chain",
    "ClipNoise",
    "CorrelatedNoise",
    "DPNoise",
    "DualPrune",
    "ErrorFeedback",
    "GaussianNoise",
    "Hardened",
    "Identity",
    "Outpost",
    "Quantize",
    "RandomK",
    "Soteria",
    "TopK",
    "adgp",
    "correlated_epsilon",
    "dgp",
    "epsilon",
    "gaussian_epsilon",
    "strategy_sensitivity",
    "top_k",
]
