"""What an audit is to do: the settings a person writes, and the objects they name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from .. import check, data, models
from ..attacks import ATTACKS
from ..core import Attack, Defense, LossFn, Tensors
from ..data import Dataset
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build, to_text
from ..training import Checkpoint, Settings, load_checkpoint
from ..training.feed import shards
from ..training.job import fitted, pick_device
from .report import COLUMNS, Column
from .verdict import BASELINE

# As strong after 200 steps on small convolutional networks as the published schedule after 2500 (docs/tutorial.md).
QUICK = "lr=0.2, decay='cosine', tv=0.05"
NAIVE = f"{QUICK}, masked='never', weighting='none'"
DEFAULT_ATTACKS = (
    f"naive=gradient_matching({NAIVE}, steps=200)",
    f"mask-aware=gradient_matching({QUICK}, steps=200)",
)
AS_LISTED = "photos"  # its first pictures are of different classes already, and in a known order


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Scope:
    """What an audit covers. The help texts are those of `gradveil audit --help` and of what `gradveil init` writes."""

    model: str = _option("cnn6", "lenet, cnn6, vgg11, resnet18, mlp, or package.module:factory.")
    weights: str = _option("", "Weights of the model: a safetensors file. Empty: freshly initialised.")
    data: str = _option("photos", "photos and digits need no download; cifar10, cifar100, or a folder of pictures.")
    pictures: int = _option(6, "How many private pictures to attack.")
    batch_size: int = _option(3, "Pictures in a client's batch, for the realistic column.")
    round: int = _option(4, "Uploads the client made before the attacked one, for the realistic column.")
    checkpoint: str = _option("", "A checkpoint of gradveil train: audit that run, with a client's real residual.")
    client: int = _option(0, "Which client of the checkpoint.")
    guard: bool = _option(False, "Judge by clients that refuse a manipulated model. Both cases are always reported.")
    accuracy_rounds: int = _option(60, "Rounds of training to measure accuracy under each defense; 0: do not.")
    budget: float = _option(0.0, "Minutes the audit may take; 0: no limit. What does not fit is reported as cut.")
    device: str = _option("auto", "cpu, cuda, cuda:1, or auto.")
    seed: int = _option(0, "Settles pictures, noise and the attackers' starting points.")

    def __post_init__(self) -> None:
        check.at_least(1, pictures=self.pictures, batch_size=self.batch_size)
        check.at_least(0, round=self.round, client=self.client, accuracy_rounds=self.accuracy_rounds, seed=self.seed)
        check.non_negative(budget=self.budget)
        if self.checkpoint and self.weights:
            raise ValueError("weights and checkpoint both name weights: give one of them")


@dataclass(frozen=True)
class Plan(Scope):
    """One audit: its scope, and what is tried."""

    defenses: tuple[str, ...] = _option((), "Such as dgp or mild=dual_prune(top=0.1). Empty: the usual ones.")
    attacks: tuple[str, ...] = _option((), "Such as inverting_gradients(steps=500). Empty: one naive, one adaptive.")


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
    tried = [(name, guard) for name in attacks for guard in (False, True)[: 1 + is_active(subject.attacks[name])]]
    defended = [name for name in subject.defenses if name != BASELINE]
    both = [Cell(column, BASELINE, *each) for column in COLUMNS for each in tried]
    return both + [Cell(column, name, *each) for column in COLUMNS for name in defended for each in tried]


def is_active(attack: Attack) -> bool:
    """Say whether the attack is one of a server that does not follow the protocol."""
    return "active" in attack.needs


def is_adaptive(name: str, subject: Subject) -> bool:
    """Say whether the attack uses what it knows about the defenses, in its search or in what it plants."""
    attack, data = subject.attacks[name], subject.victims
    if bool(getattr(attack, "adaptive", getattr(attack, "masked", "never") != "never")):
        return True
    plain = attack.fitted(None, data.mean, data.std)
    return any(attack.fitted(defense, data.mean, data.std) != plain for defense in subject.defenses.values())


def default_defenses() -> tuple[str, ...]:
    """Return what is audited when nobody says otherwise."""
    hardened = ("hardened",) if "hardened" in DEFENSES else ()
    return (BASELINE, "topk", "dgp", *hardened, "dp")


def subject(
    plan: Plan,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    defenses: Mapping[str, Defense] | None = None,
    attacks: Mapping[str, Attack] | None = None,
    loss_fn: LossFn = nn.functional.cross_entropy,
) -> Subject:
    """Return what the plan names; parts that are passed take the place of those it names."""
    saved = load_checkpoint(plan.checkpoint) if plan.checkpoint else None
    if saved is not None and plan.client >= len(saved.users):
        raise ConfigError(f"client must be below {len(saved.users)}, the users of the checkpoint, got {plan.client}")
    device = pick_device(plan.device)
    victims, private, public = _pictures(plan, saved, dataset)
    if model is None:
        name = saved.settings.model if saved else plan.model
        shape, classes = victims.input_shape, victims.num_classes
        model = models.build(name, num_classes=classes, input_shape=shape, seed=plan.seed)
        _load_weights(model, plan, saved)
    wanted = defenses or _named(DEFENSES, plan.defenses or _fallback(saved), "defense")
    wanted = {name: fitted(defense, victims) for name, defense in wanted.items()}
    return Subject(
        model=model.to(device),
        loss_fn=loss_fn,
        victims=victims,
        private=private,
        public=public,
        defenses={BASELINE: build(DEFENSES, BASELINE, "defense"), **wanted},
        attacks=dict(attacks or _named(ATTACKS, plan.attacks or DEFAULT_ATTACKS, "attack")),
        device=device,
        residuals=_residuals(plan, saved, wanted, victims),
        run=saved.settings if saved else None,
        run_round=saved.round if saved else None,
    )


def _fallback(saved: Checkpoint | None) -> tuple[str, ...]:
    return default_defenses() if saved is None else (BASELINE, saved.settings.defense)


def _named(table: Any, texts: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the objects in `texts`; `name=text` gives one a name of its own for the report."""
    found = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        own = bool(equals) and "(" not in name
        found[name.strip() if own else text] = build(table, rest if own else text, kind)
    return found


def _load_weights(model: nn.Module, plan: Plan, saved: Checkpoint | None) -> None:
    if saved is None and not plan.weights:
        return
    try:
        state = saved.model if saved else load_file(plan.weights)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the weights {plan.weights}: {error}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(f"the weights do not fit the model {plan.model}: {error}") from error


def _residuals(
    plan: Plan, saved: Checkpoint | None, defenses: Mapping[str, Defense], data: Dataset
) -> dict[str, Tensors]:
    """Return the client's saved state for each defense that is the one it trained under."""
    if saved is None:
        return {}
    own = to_text(fitted(build(DEFENSES, saved.settings.defense, "defense"), data))
    return {name: saved.users[plan.client] for name, d in defenses.items() if to_text(d) == own}


def _pictures(plan: Plan, saved: Checkpoint | None, dataset: Dataset | None) -> tuple[Dataset, Dataset, Dataset]:
    """Return victims, the client's other pictures, and public ones: three sets that share no picture."""
    uploads = -(-plan.pictures // plan.batch_size)
    wanted = max(plan.pictures, uploads * plan.batch_size)
    rng = torch.Generator().manual_seed(plan.seed)
    if saved is not None and dataset is None:
        own, rest = _shard(plan, saved)
        victims, others = own, own
    elif dataset is not None:
        victims = others = rest = dataset
    else:
        victims, others = data.load(plan.data, split="test"), data.load(plan.data, split="train")
        rest = others
    order = torch.arange(len(victims)) if victims.name == AS_LISTED else torch.randperm(len(victims), generator=rng)
    if len(victims) < wanted:
        raise ConfigError(f"{wanted} pictures are to be attacked but {plan.data} has {len(victims)}: ask for fewer")
    chosen, left = order[:wanted], order[wanted:]
    if others is not victims:
        left = torch.randperm(len(others), generator=rng)
    half = len(left) // 2
    if not half:
        raise ConfigError(f"{plan.data} has no pictures left to fill a residual and to guess from: add some")
    private = others.subset(left[:half])
    public = others.subset(left[half:]) if rest is others else rest
    return victims.subset(chosen), private, public


def _shard(plan: Plan, saved: Checkpoint) -> tuple[Dataset, Dataset]:
    """Return the client's own pictures of a training run, and everybody's test pictures."""
    settings = saved.settings
    root = settings.root or None
    train = data.load(settings.data, split="train", root=root)
    parts = shards(train, settings)
    return train.subset(parts[plan.client]), data.load(settings.data, split="test", root=root)
