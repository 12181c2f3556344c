"""The two scales: the paper's settings, and small ones that show in minutes on a CPU that every table runs."""

from dataclasses import dataclass, field, replace
from typing import Any

from ..training import Settings
from .cells import AttackCell, CostCell, TrainingCell

NAIVE = "masked='never', weighting='none', reapply='never'"  # the attacker most papers measure
SMALL = ("lenet", "cnn6")
# How tables call an attacker: (text for build, whether it is told the defense). The words in braces are the scale's.
ATTACKERS = {
    "ig": (f"inverting_gradients({{match}}, {NAIVE})", False),
    "gi": (f"gi_paper({{match}}, {NAIVE})", False),
    "rob": ("imprint(bins={bins})", False),
    "rgap": ("rgap(masked=False)", False),
    "ig+mask": ("inverting_gradients({adaptive})", True),
    "gi+mask": ("gi_paper({adaptive})", True),
    "ig+eased": ("eased_matching({eased})", True),  # a schedule of our own, stronger on most LeNets
    "ig+band": ("inverting_gradients({adaptive}, band=0.05)", True),
    "ig+coarse": ("inverting_gradients({adaptive}, coarse=8)", True),  # few unknowns: finds form under much noise
    "ig+chain": ("chained(inverting_gradients({adaptive}))", True),
    "rob+fit": ("imprint(bins={bins})", True),
    "spotlight": ("spotlight(batch=1)", True),
    "rgap+mask": ("rgap(masked=True)", True),
    "ggl": ("ggl({ggl})", True),
    "ggl+short": ("ggl({ggl_short})", True),  # a longer search fits the noise
    "ggl+all": ("ggl({ggl_all})", True),  # of a large batch, every picture at once
    "ggl+blind": ("ggl(search='none')", False),  # what the label alone paints
}
ADAPTED = {"ig": "ig+mask", "gi": "gi+mask", "rob": "rob+fit", "rgap": "rgap+mask"}
# Defenses whose text is not their name. Attacks meet Outpost with its gate open: shut, it is no defense at all.
# Hardened sends nothing until it has mixed 32 examples: `hardened1` is its mechanism on one example, the harder case.
TEXTS = {
    "hardened1": "hardened(examples=1)",
    "topk5": "topk(keep=0.05)",
    "dgp-nofeedback": "dual_prune",
    "adgp-nofeedback": "aligned_dual_prune",
}
SMALL_POLICY = "ats(policy='21-13-3+7-4-15')"
ESTIMATED = "soteria(probes=1)"  # in training: its exact scores would take an H200 18 hours for 100 epochs of ResNet18


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
    dear_pictures: int  # where a picture costs minutes: chained attacks, several local steps
    rob_batches: int
    match: str  # settings of the matching attacks the paper ran
    adaptive: str  # of those it did not run
    eased: str
    ggl: str
    ggl_short: str
    ggl_all: str
    mix: int  # pictures in such a batch
    bins: int
    training: dict[str, Any]
    weights: dict[str, Any]  # settings of the training behind attacks on trained models
    epochs: tuple[int, ...]  # after which such a model is attacked
    cost: dict[str, int]
    deep_side: int  # of the pictures for the cost of deep models
    generator: dict[str, int] | None  # settings of a throw-away generator for GGL; None: the recorded one
    switches: dict[str, Any] = field(default_factory=dict)  # what the paper leaves open, where a line does not say it

    @property
    def explained(self) -> str:
        """The note, and what stands for what the headings name."""
        note = ", ".join([self.note, *(f"{name} {value}" for name, value in self.switches.items())])
        if not self.stand_ins:
            return f"{note}."
        models = ", ".join(f"{used} in place of {meant}" for meant, used in self.stand_ins.items())
        return f"{note}. Whatever the headings say: {models}, {self.data} in place of CIFAR."

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
        elif attack == "ig+chain" or (fields.get("local_steps", 1) > 1 and not fields.get("in_turn")):
            count = self.dear_pictures
        fields.setdefault("data", self.data)
        for name, value in self.switches.items():
            if name != "rounds" or "local_steps" not in fields:  # FedAvg clients are attacked at their first upload
                fields.setdefault(name, value)
        return AttackCell(
            attack=attack,
            attack_text=text.format(**vars(self)),
            defense=defense,
            defense_text=fields.pop("defense_text", None) or attacked_text(defense, model),
            model=model,
            pictures=-(-count // batch) * batch,
            adaptive=adaptive,
            batch_size=batch,
            **fields,
        )

    def told(self, cell: AttackCell) -> AttackCell | None:
        """Return the cell of the same attack by somebody who knows the defense; None if there is nothing to know."""
        attack = ADAPTED.get(cell.attack)
        if attack is None or cell.defense == "none":
            return None
        text, adaptive = ATTACKERS[attack]
        return replace(cell, attack=attack, attack_text=text.format(**vars(self)), adaptive=adaptive)

    def train(self, defense: str, model: str = "resnet18", text: str | None = None, **fields: Any) -> TrainingCell:
        """Return the cell of a training run."""
        model = self.stand_ins.get(model, model)
        special = {"soteria": ESTIMATED} | ({"ats": SMALL_POLICY} if model in SMALL else {})
        text = text or {**TEXTS, **special}.get(defense, defense)
        chosen = {"model": model, "data": self.data, **self.training, **fields}
        return TrainingCell(defense, Settings(defense=text, **chosen))

    def price(self, defense: str, model: str) -> CostCell:
        """Return the cell of a cost."""
        return CostCell(defense, model, **self.cost, side=32 if model in SMALL else self.deep_side)


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
    dear_pictures=4,
    rob_batches=10,
    match="steps=2500",
    adaptive="steps=1000",  # enough for SSIM 0.98 through DGP
    eased="steps=1000",
    ggl="",
    ggl_short="steps=150, restarts=2, pool=32",
    ggl_all="steps=400, restarts=1, pool=8, lr=0.1",
    mix=32,
    bins=200,
    training={
        "users": 10,
        "batch_size": 32,
        "epochs": 100,
        "engine": "fast",
        "precision": "bf16",
        "eval_every": 4,
        "checkpoint_every": 4000,
    },
    weights={"users": 10, "batch_size": 32, "engine": "fast", "precision": "bf16"},
    epochs=(1, 10, 100),
    cost={"users": 10, "batch_size": 32, "rounds": 3},
    deep_side=32,
    generator=None,
)
QUICK = Scale(
    name="quick",
    note="QUICK SCALE: small models, few pictures, few steps, hardly any training. It shows that the table runs; "
    "its figures are not results and do not compare with the paper's",
    stand_ins={"resnet18": "cnn6", "vgg11": "lenet"},
    data="photos",
    data100="photos",
    pictures=2,
    rgap_pictures=1,
    dear_pictures=1,
    rob_batches=1,
    match="steps=100, lr=0.2, decay='cosine', tv=0.05",
    adaptive="steps=100, lr=0.2, decay='cosine', tv=0.05",
    eased="steps=100",
    ggl="steps=5, restarts=1, pool=4",
    ggl_short="steps=5, restarts=1, pool=4",
    ggl_all="steps=5, restarts=1, pool=4",
    mix=2,
    bins=100,
    training={"users": 2, "batch_size": 16, "rounds": 6, "eval_every": 10**6, "checkpoint_every": 0, "data": "digits"},
    weights={"users": 2, "batch_size": 16, "augment": "none"},
    epochs=(1, 2),
    cost={"users": 2, "batch_size": 2, "rounds": 1},
    deep_side=4,
    generator={"steps": 5, "batch": 8, "latent": 16, "width": 16},
)
SCALES = {"full": FULL, "quick": QUICK}
