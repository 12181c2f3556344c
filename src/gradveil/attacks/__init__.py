"""The attacks, the table that names them, and the presets that carry a paper's settings.

Which file is what:

- attacks: `analytic`, `lowrank`, `rgap` solve equations; `matching`, `generative`, `rounds`, `joint` search; `imprint`,
  `spotlight`, `traps`, `fishing` plant; `blind` is the floor
- what an attacker finds out about an upload: `imitation`, `adaptive`, `bypass`, `received`, `pruning`, `averaging`;
  `labels` and `label_search`
- what a search is made of: `matching_cost` over `objectives` (`fused` on a GPU), `simulate` with `layers` and
  `normalise`, `optimise` with `lbfgs`, `cma`, `space`, `memory`; what a solver is made of: `completion`, `stages`
- for who waits: `progress`, `keep`
"""

from collections.abc import Callable

from ..core import Attack, Knowledge, ThreatModel
from .analytic import LinearReadout
from .blind import Blind
from .fishing import Fishing
from .generative import GGL
from .imprint import Imprint
from .joint import Joint
from .lowrank import LowRankCompletion
from .matching import GradientMatching
from .presets import (
    deep_leakage,
    eased_matching,
    gi_paper,
    improved_deep_leakage,
    inverting_gradients,
    see_through_gradients,
)
from .progress import Progress, watch
from .rgap import RGAP
from .rounds import Chained, RepeatedRounds
from .spotlight import OwnSpotlight, Spotlight
from .traps import TrapWeights


def missing(attack: Attack, threat: ThreatModel) -> list[Knowledge]:
    """Return what `attack` needs and `threat` does not grant: not empty means the attack is to be reported as skipped.

    >>> missing(Blind(), ThreatModel())
    []
    """
    return sorted(need for need in attack.needs if not threat.grants(need))


CLASSES: tuple[type[Attack], ...] = (
    Blind,
    GradientMatching,
    RepeatedRounds,
    Chained,
    Joint,
    LinearReadout,
    LowRankCompletion,
    Imprint,
    TrapWeights,
    RGAP,
    GGL,
    Spotlight,
    OwnSpotlight,
    Fishing,
)
PRESETS: dict[str, Callable[..., Attack]] = {
    "inverting_gradients": inverting_gradients,
    "eased_matching": eased_matching,
    "gi_paper": gi_paper,
    "see_through_gradients": see_through_gradients,
    "deep_leakage": deep_leakage,
    "improved_deep_leakage": improved_deep_leakage,
    "rob": Imprint,
}
ATTACKS: dict[str, Callable[..., Attack]] = {**{c.key(): c for c in CLASSES}, **PRESETS}

__all__ = [
    "ATTACKS",
    "CLASSES",
    "GGL",
    "PRESETS",
    "RGAP",
    "Blind",
    "Chained",
    "Fishing",
    "GradientMatching",
    "Imprint",
    "Joint",
    "LinearReadout",
    "LowRankCompletion",
    "OwnSpotlight",
    "Progress",
    "RepeatedRounds",
    "Spotlight",
    "TrapWeights",
    "deep_leakage",
    "eased_matching",
    "gi_paper",
    "improved_deep_leakage",
    "inverting_gradients",
    "missing",
    "see_through_gradients",
    "watch",
]
