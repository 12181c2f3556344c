"""What an audit is to do: the settings a person writes, and the objects they name."""

from dataclasses import dataclass, field

import torch
from torch import nn

from .. import check
from ..config import option
from ..core import Attack, Defense, LossFn, Tensors
from ..data import Dataset
from ..training import Settings
from .report import COLUMNS, Column
from .verdict import BASELINE

DEFAULT_DEFENSES = (BASELINE, "topk", "dgp", "hardened", "dp")
QUICK = "tv_first=30.0"  # few steps want more smoothing at first
NAIVE = f"{QUICK}, masked='never', weighting='none'"
DEFAULT_ATTACKS = (
    f"naive=eased_matching({NAIVE}, steps=200)",
    f"mask-aware=eased_matching({QUICK}, steps=200)",
    # Under noise the coarse form comes back first; longer searches fit the noise.
    "coarse=gradient_matching(lr=0.2, decay='cosine', tv=0.05, coarse=8, steps=60)",
)
# Where there is a generator of such pictures. Under noise it finds what no other search does.
SEARCH = "generator=ggl(steps=150, restarts=2, pool=32)"


@dataclass(frozen=True)
class Scope:
    """What an audit covers. The help texts are those of `gradveil audit --help` and of what `gradveil init` writes."""

    model: str = option("cnn6", "lenet, cnn6, vgg11, resnet18, mlp, or package.module:factory.")
    weights: str = option("", "Weights of the model: a safetensors file. Empty: freshly initialised.")
    data: str = option("photos", "photos and digits need no download; cifar10, cifar100, or a folder of pictures.")
    size: int = option(0, "Side of the pictures in pixels; 0: as the data are, folders 32.")
    mean: str = option(
        "", "Mean the model's inputs are normalised with, such as 0.49,0.48,0.45. Empty: the data's own."
    )
    std: str = option("", "Standard deviation they are normalised with, such as 0.25,0.24,0.26. Empty: the data's own.")
    pictures: int = option(6, "How many private pictures to attack.")
    batch_size: int = option(3, "Pictures in a client's batch, for the realistic column.")
    round: int = option(4, "Uploads the client made before the attacked one, for the realistic column.")
    checkpoint: str = option("", "A checkpoint of gradveil train: audit that run, with a client's real residual.")
    client: int = option(0, "Which client of the checkpoint.")
    generator: str = option(
        "", "A file of `gradveil generator train` for attacks to search. Empty: for cifar10 one that comes along."
    )
    guard: bool = option(False, "Judge by clients that refuse a manipulated model. Both cases are always reported.")
    accuracy_rounds: int = option(60, "Rounds of training to measure accuracy under each defense; 0: do not.")
    budget: float = option(0.0, "Minutes the audit may take; 0: no limit. What does not fit is reported as cut.")
    device: str = option("auto", "cpu, cuda, cuda:1, or auto.")
    seed: int = option(0, "Settles pictures, noise and the attackers' starting points.")

    def __post_init__(self) -> None:
        check.at_least(1, pictures=self.pictures, batch_size=self.batch_size)
        check.at_least(0, round=self.round, client=self.client, accuracy_rounds=self.accuracy_rounds, seed=self.seed)
        check.at_least(0, size=self.size)
        check.non_negative(budget=self.budget)
        if bool(self.mean) != bool(self.std):
            raise ValueError("mean and std belong together: give both or neither")
        if self.checkpoint and self.weights:
            raise ValueError("weights and checkpoint both name weights: give one of them")


@dataclass(frozen=True)
class Plan(Scope):
    """One audit: its scope, and what is tried."""

    defenses: tuple[str, ...] = option((), "Such as dgp or mild=dual_prune(top=0.1). Empty: the usual ones.")
    attacks: tuple[str, ...] = option(
        (),
        "Such as inverting_gradients(steps=500). Empty: one naive, one adaptive, one for coarse forms, and one that "
        "searches a generator where there is one.",
    )


@dataclass(frozen=True, eq=False)
class Subject:
    """What is audited: a model, a client's pictures, and everything tried on them."""

    model: nn.Module
    loss_fn: LossFn
    victims: Dataset  # the pictures under attack
    private: Dataset  # the client's other pictures: they fill its residual
    public: Dataset  # the same kind of pictures, known to everybody: blind guesses and line-ups
    defenses: dict[str, Defense]
    attacks: dict[str, Attack]
    device: torch.device
    residuals: dict[str, Tensors] = field(default_factory=dict)  # veil states of a real run, by defense
    run: Settings | None = None  # of that run
    run_round: int | None = None  # how far it was
    prior: nn.Module | None = None  # a generator for attacks that search one; without, they get public pictures


@dataclass(frozen=True)
class Cell:
    """One attack on one defense in one column."""

    column: Column
    defense: str
    attack: str
    guarded: bool = False


def cells(subject: Subject) -> list[Cell]:
    """Return every cell, the most telling first: a budget that runs out takes the last ones.

    The bare gradient comes first, because without it nothing can be judged; then the worst case, then everyday. An
    active attack is tried on clients without and with a guard.
    """
    attacks = sorted(subject.attacks, key=lambda name: not is_adaptive(name, subject))
    guards = {name: (False, True) if is_active(attack) else (False,) for name, attack in subject.attacks.items()}
    tried = [(name, guarded) for name in attacks for guarded in guards[name]]
    defended = [name for name in subject.defenses if name != BASELINE]
    both = [Cell(column, BASELINE, *each) for column in COLUMNS for each in tried]
    return both + [Cell(column, name, *each) for column in COLUMNS for name in defended for each in tried]


def is_active(attack: Attack) -> bool:
    """Say whether the attack is one of a server that does not follow the protocol."""
    return "active" in attack.needs


def is_adaptive(name: str, subject: Subject) -> bool:
    """Say whether the attack uses what it knows about the defenses, in its search or in what it plants."""
    attack, data = subject.attacks[name], subject.victims
    if attack.adaptive:
        return True
    plain = attack.fitted(None, data.mean, data.std)
    return any(attack.fitted(defense, data.mean, data.std) != plain for defense in subject.defenses.values())


def default_attacks(generator: bool = False) -> tuple[str, ...]:
    """Return what is tried when nobody says otherwise, with or without a generator of such pictures."""
    return (*DEFAULT_ATTACKS, SEARCH) if generator else DEFAULT_ATTACKS
