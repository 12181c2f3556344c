"""The two scales: the paper's settings, and small ones that show in minutes on a CPU that every table runs."""

from dataclasses import dataclass
from typing import Any

from ..training import Settings
from .cells import AttackCell, CostCell, TrainingCell

NAIVE = "masked='never', weighting='none', reapply='never'"  # the attacker most papers measure
SMALL = ("lenet", "cnn6")
# How tables call an attacker: (text for build, whether it is told the defense). {steps} is the scale's.
ATTACKERS = {
    "ig": (f"inverting_gradients(steps={{steps}}, {NAIVE})", False),
    "gi": (f"gi_paper(steps={{steps}}, {NAIVE})", False),
    "rob": ("imprint(bins={bins})", False),
    "rgap": ("rgap(masked=False)", False),
    "ig+mask": ("inverting_gradients(steps={steps})", True),
    "gi+mask": ("gi_paper(steps={steps})", True),
    "ig+band": ("inverting_gradients(steps={steps}, band=0.05)", True),
    "ig+chain": ("chained(inverting_gradients(steps={steps}))", True),
    "ig+repeat": ("repeated_rounds(inverting_gradients(steps={steps}))", True),
    "rob+fit": ("imprint(bins={bins})", True),
    "rgap+mask": ("rgap(masked=True)", True),
    "ggl": ("ggl", True),
}
ADAPTED = {"ig": "ig+mask", "gi": "gi+mask", "rob": "rob+fit", "rgap": "rgap+mask"}
# Defenses whose text is not their name. Attacks meet Outpost with its gate open: shut, it is no defense at all.
TEXTS = {"topk5": "topk(keep=0.05)", "dgp-nofeedback": "dual_prune", "adgp-nofeedback": "aligned_dual_prune"}
SMALL_POLICY = "ats(policy='21-13-3+7-4-15')"


@dataclass(frozen=True)
class Scale:
    """How large everything is."""

    name: str
    note: str  # stands in every output
    stand_ins: dict[str, str]  # the paper's model: the model used
    data: str
    data100: str
    pictures: int
    rgap_pictures: int
    rob_batches: int
    steps: int
    deep_steps: int
    bins: int
    training: dict[str, Any]
    weights: dict[str, Any]  # settings of the training behind attacks on trained models
    epochs: tuple[int, ...]  # after which such a model is attacked
    cost: dict[str, int]

    def attack(self, attack: str, defense: str, model: str = "resnet18", **fields: Any) -> AttackCell:
        """Return the cell of an attacker by its name in tables."""
        text, adaptive = ATTACKERS[attack]
        model = self.stand_ins.get(model, model)
        batch = fields.pop("batch_size", 9 if attack.startswith("rob") else 1)
        count = self.pictures
        if attack.startswith("rob"):
            count = self.rob_batches * batch
        elif attack.startswith("rgap"):
            count = self.rgap_pictures
        fields.setdefault("data", self.data)
        return AttackCell(
            attack=attack,
            attack_text=text.format(steps=self.steps if model in SMALL else self.deep_steps, bins=self.bins),
            defense=defense,
            defense_text=fields.pop("defense_text", None) or attacked_text(defense, model),
            model=model,
            pictures=-(-count // batch) * batch,
            adaptive=adaptive,
            batch_size=batch,
            **fields,
        )

    def train(self, defense: str, model: str = "resnet18", text: str | None = None, **fields: Any) -> TrainingCell:
        """Return the cell of a training run."""
        small = model in SMALL
        text = text or TEXTS.get(defense) or (SMALL_POLICY if defense == "ats" and small else defense)
        chosen = {"model": self.stand_ins.get(model, model), "data": self.data, **self.training, **fields}
        return TrainingCell(defense, Settings(defense=text, **chosen))

    def price(self, defense: str, model: str) -> CostCell:
        """Return the cell of a cost."""
        return CostCell(defense, model, **self.cost)


def attacked_text(defense: str, model: str) -> str:
    """Return the text of a defense as attacks meet it."""
    if defense == "outpost":
        return "outpost(always=True)"
    if defense == "ats" and model in SMALL:
        return SMALL_POLICY
    return TEXTS.get(defense, defense)


FULL = Scale(
    name="full",
    note="the paper's settings",
    stand_ins={},
    data="cifar10",
    data100="cifar100",
    pictures=20,
    rgap_pictures=20,
    rob_batches=20,
    steps=2500,
    deep_steps=2500,
    bins=200,
    training={"users": 10, "batch_size": 32, "epochs": 100},
    weights={"users": 10, "batch_size": 32},
    epochs=(1, 10, 100),
    cost={"users": 10, "batch_size": 32, "rounds": 3},
)
QUICK = Scale(
    name="quick",
    note="QUICK SCALE: small models, few pictures, few steps, hardly any training. It shows that the table runs; "
    "its figures are not results and do not compare with the paper's",
    stand_ins={"resnet18": "lenet"},
    data="photos",
    data100="photos",
    pictures=2,
    rgap_pictures=1,
    rob_batches=1,
    steps=60,
    deep_steps=2,
    bins=100,
    training={"users": 2, "batch_size": 16, "rounds": 6, "eval_every": 10**6, "checkpoint_every": 0, "data": "digits"},
    weights={"users": 2, "batch_size": 16, "augment": "none"},
    epochs=(1, 2),
    cost={"users": 2, "batch_size": 2, "rounds": 1},
)
SCALES = {"full": FULL, "quick": QUICK}
