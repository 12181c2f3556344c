"""What of an upload was sent, where noise on everything covers what was left out."""

from dataclasses import replace

import torch

from ..core import Observation
from .imitation import understand

CAUTION = 1.5  # times the size up to which an entry may be noise alone: an exact solver suffers more from one equation
# that is wrong than from many that are missing, and of a million entries some exceed any usual bound


def received(seen: Observation) -> Observation:
    """Return the upload with zeros where nothing was sent, as far as the defense is known.

    A tensor of which nothing would be left stays as it arrived, noise and all.
    """
    does = understand(seen).behaviour or {}
    grads = {}
    for name, g in seen.grads.items():
        floor = does[name].floor if name in does else 0.0
        sent = g.abs() > CAUTION * floor
        grads[name] = torch.where(sent, g, 0.0) if bool(sent.any()) else g
    return replace(seen, grads=grads)
