"""Protect shared gradients, attack them to see what they give away, and report it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .core import (
    Attack,
    Batch,
    Defense,
    Health,
    Observation,
    Payload,
    Reconstruction,
    Step,
    ThreatModel,
)
from .defenses import (
    AlignedDualPrune,
    Chain,
    DualPrune,
    ErrorFeedback,
    GaussianNoise,
    Hardened,
    Identity,
    Quantize,
    RandomK,
    TopK,
    adgp,
    dgp,
    top_k,
)
from .gate import observe
from .gradients import gradient, local_update, per_example_gradient
from .guard import Guard
from .veil import Veil, unseal

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .audit import Report, audit


def __getattr__(name: str) -> Any:
    """Import the audit and the like when first asked for: clients that only protect gradients never pay for them."""
    if name in ("attacks", "data", "metrics", "models", "training"):
        return import_module(f".{name}", __name__)
    if name in ("Report", "audit"):
        module = import_module(".audit", __name__)
        return module if name == "audit" else module.Report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "AlignedDualPrune",
    "Attack",
    "Batch",
    "Chain",
    "Defense",
    "DualPrune",
    "ErrorFeedback",
    "GaussianNoise",
    "Guard",
    "Hardened",
    "Health",
    "Identity",
    "Observation",
    "Payload",
    "Quantize",
    "RandomK",
    "Reconstruction",
    "Report",
    "Step",
    "ThreatModel",
    "TopK",
    "Veil",
    "adgp",
    "audit",
    "dgp",
    "gradient",
    "local_update",
    "observe",
    "per_example_gradient",
    "top_k",
    "unseal",
]
