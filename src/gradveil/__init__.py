"""Protect shared gradients, attack them to see what they give away, and report it."""

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
    Identity,
    RandomK,
    TopK,
    adgp,
    dgp,
    top_k,
)
from .gate import observe
from .gradients import gradient, local_update, per_example_gradient
from .veil import Veil, unseal

__version__ = "0.1.0"

__all__ = [
    "AlignedDualPrune",
    "Attack",
    "Batch",
    "Chain",
    "Defense",
    "DualPrune",
    "ErrorFeedback",
    "GaussianNoise",
    "Health",
    "Identity",
    "Observation",
    "Payload",
    "RandomK",
    "Reconstruction",
    "Step",
    "ThreatModel",
    "TopK",
    "Veil",
    "adgp",
    "dgp",
    "gradient",
    "local_update",
    "observe",
    "per_example_gradient",
    "top_k",
    "unseal",
]
