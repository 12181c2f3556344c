"""The attacks, the table that names them, and the presets that carry a paper's settings."""

from collections.abc import Callable

from ..core import Attack, Knowledge, ThreatModel
from .analytic import LinearReadout
from .blind import Blind
from .imprint import Imprint
from .lowrank import LowRankCompletion
from .traps import TrapWeights


def missing(attack: Attack, threat: ThreatModel) -> list[Knowledge]:
    """Return what `attack` needs and `threat` does not grant: not empty means the attack is to be reported as skipped.

    >>> missing(Blind(), ThreatModel())
    []
    """
    return sorted(need for need in attack.needs if not threat.grants(need))


CLASSES: tuple[type[Attack], ...] = (
    Blind,
    LinearReadout,
    LowRankCompletion,
    Imprint,
    TrapWeights,
)
PRESETS: dict[str, Callable[..., Attack]] = {"rob": Imprint}
ATTACKS: dict[str, Callable[..., Attack]] = {**{c.key(): c for c in CLASSES}, **PRESETS}

__all__ = [
    "ATTACKS",
    "CLASSES",
    "PRESETS",
    "Blind",
    "Imprint",
    "LinearReadout",
    "LowRankCompletion",
    "TrapWeights",
    "missing",
]
