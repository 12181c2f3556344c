"""What one result file is about: an attack, a training run, or a cost."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from .. import check
from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..spec import build, to_spec
from ..training import Settings


@dataclass(frozen=True)
class AttackCell:
    """One attacker against one defense on one model.

    What the paper leaves open is a field: `labels` given or inferred, `rounds` of error feedback behind the attacked
    upload, `epochs` the attacked model was trained for (0: freshly initialised), the `mode` of the client's BatchNorm.
    """

    attack: str  # the name in tables
    attack_text: str
    defense: str
    defense_text: str
    model: str
    data: str
    pictures: int
    seed: int = 0
    adaptive: bool = False  # whether the attacker is told the defense
    batch_size: int = 1
    rounds: int = 0
    labels: str = "given"
    epochs: int = 0
    local_steps: int = 1
    in_turn: bool = False  # every local step takes its own share of the batch instead of all of it
    one_label: bool = False  # all pictures of a batch share their label, as a client with skewed data may have it
    mode: Literal["eval", "train"] = "eval"

    def __post_init__(self) -> None:
        check.at_least(1, pictures=self.pictures, batch_size=self.batch_size, local_steps=self.local_steps)
        check.at_least(0, rounds=self.rounds, epochs=self.epochs, seed=self.seed)
        check.one_of(("given", "inferred"), labels=self.labels)
        check.one_of(("eval", "train"), mode=self.mode)
        if self.pictures % self.batch_size:
            raise ValueError(f"pictures must fill whole batches of {self.batch_size}, got {self.pictures}")
        if self.in_turn and self.batch_size % self.local_steps:
            raise ValueError(f"batches of {self.batch_size} cannot be shared out over {self.local_steps} local steps")

    @property
    def stem(self) -> str:
        """The file's name but for the seed: what is not as usual is named."""
        plain = 9 if self.attack.startswith("rob") else 1
        extras = {
            f"batch{self.batch_size}": self.batch_size != plain,
            f"round{self.rounds}": self.rounds,
            "inferred": self.labels == "inferred",
            f"epochs{self.epochs}": self.epochs,
            f"local{self.local_steps}": self.local_steps > 1,
            "inturn": self.in_turn,
            "onelabel": self.one_label,
            "trainmode": self.mode == "train",
        }
        names = [self.attack, self.defense, _word(self.model), self.data]
        return "_".join(names + [name for name, wanted in extras.items() if wanted])


@dataclass(frozen=True)
class TrainingCell:
    """A training run, known by its settings."""

    defense: str
    settings: Settings

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.settings.seed

    @property
    def stem(self) -> str:
        """The file's name but for the seed."""
        s = self.settings
        names = ["train", self.defense, _word(s.model), s.data]
        names += [f"alpha{s.alpha:g}"] if s.alpha else []
        names += [f"local{s.local_steps}"] if s.algorithm == "fedavg" else []
        return "_".join(names)


@dataclass(frozen=True)
class CostCell:
    """Bytes and seconds of one defense on one model."""

    defense: str
    model: str
    users: int
    batch_size: int
    rounds: int
    side: int = 32  # of the pictures; the deep models have the same parameters for any
    seed: int = 0

    @property
    def stem(self) -> str:
        """The file's name but for the seed."""
        return f"cost_{self.defense}_{self.model}"


def definition(cell: AttackCell) -> dict[str, Any]:
    """Return attack and defense with every field: a default that changes later makes it another cell."""
    return completed({"attack": cell.attack_text, "defense": cell.defense_text})


def completed(known: dict[str, Any]) -> dict[str, Any]:
    """Return a definition with every field there is now; one that came later had its default."""
    attack, defense = build(ATTACKS, known["attack"], "attack"), build(DEFENSES, known["defense"], "defense")
    plain: dict[str, Any] = json.loads(json.dumps({"attack": to_spec(attack), "defense": to_spec(defense)}))
    return plain


Cell = AttackCell | TrainingCell | CostCell


def key(cell: Cell) -> str:
    """Return the name of the cell's result file, without its ending."""
    return f"{cell.stem}_seed{cell.seed}"


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "", text.lower())
