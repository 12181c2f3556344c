"""What defines a training run. The help texts are those of `gradveil train --help`."""

from dataclasses import dataclass
from itertools import pairwise

from .. import check
from ..config import option

PAPER_RATES = {"lenet": "0.1, 50:0.01, 70:0.005"}
PAPER_RATES_OTHERS = "0.01, 70:0.005"
MAY_CHANGE = frozenset({"root", "device", "epochs", "rounds", "eval_every", "checkpoint_every", "wire_every", "delta"})


@dataclass(frozen=True)
class Settings:
    """One collaborative training run (Algorithm 2 of the DGP paper, and FedAvg). The defaults are the paper's."""

    model: str = option("lenet", "lenet, cnn6, vgg11, resnet18, mlp, or package.module:factory.")
    data: str = option("digits", "cifar10, cifar100, digits, photos, or a folder with one sub-folder per class.")
    root: str = option("", "Where the dataset's files lie; empty: the usual places.")
    defense: str = option(
        "dgp",
        "What protects each upload, such as none, hardened, dgp, adgp, topk or dual_prune(top=0.1). dgp and adgp "
        "do not withstand an attacker who compares only the entries that arrived.",
    )
    algorithm: str = option("fedsgd", "fedsgd: users send a gradient. fedavg: they send what local steps changed.")
    local_steps: int = option(1, "Local steps of a user in a round (fedavg only).")
    users: int = option(10, "Number of users.")
    participants: int = option(0, "Users drawn at random for each round; 0: all of them.")
    alpha: float = option(0.0, "Spread each class over the users by Dirichlet(alpha); 0: same distribution for all.")
    batch_size: int = option(32, "Pictures in a user's batch; a user with fewer uses all it has.")
    epochs: int = option(100, "Passes over the training set by all users together.")
    rounds: int = option(0, "Stop after this many rounds instead; 0: as the epochs say.")
    lr: str = option("paper", "Learning rate, such as '0.1, 50:0.01' (0.01 from epoch 50), or the paper's.")
    weigh_examples: bool = option(
        False,
        "Let the noise of hardened follow the largest share of one example, as Veil.protect does (reference engine, "
        "fedsgd only; every user computes its gradients twice, the second time one by one).",
    )
    momentum: float = option(0.9, "Momentum of the server, on the average of what arrived.")
    weight_decay: float = option(0.0, "Weight decay of the server (fedsgd only).")
    augment: str = option("auto", "none, crop, or crop_flip; auto: crop_flip, but none for digits.")
    batchnorm: str = option(
        "average",
        "BatchNorm running statistics after a round: average (over the participants), first (those of the "
        "lowest-numbered participant), or local (kept by each user, averaged only to evaluate).",
    )
    precision: str = option(
        "float32", "float32, tf32 (GPU only), or bf16 (autocast; weights and residuals stay float32)."
    )
    engine: str = option("auto", "reference, fast, or auto: fast on a GPU if the run allows it.")
    device: str = option("auto", "cpu, cuda, cuda:1, or auto.")
    deterministic: bool = option(False, "Only repeatable GPU kernels; slower. On a CPU runs always repeat exactly.")
    eval_every: int = option(1, "Evaluate on the test split after this many epochs, and at the end.")
    wire_every: int = option(0, "Fast engine: encode real payloads every so many rounds; 0: once an epoch.")
    checkpoint_every: int = option(500, "Write a checkpoint after this many rounds; 0: only at the end.")
    seed: int = option(0, "Settles the initial weights, who holds what, the batches and the noise.")
    size: int = option(0, "Side of the pictures in pixels; 0: as the data are, folders 32.")
    delta: float = option(1e-5, "Where the defense is differentially private, state epsilon at this delta.")

    def __post_init__(self) -> None:
        check.one_of(("fedsgd", "fedavg"), algorithm=self.algorithm)
        check.one_of(("auto", "none", "crop", "crop_flip"), augment=self.augment)
        check.one_of(("average", "first", "local"), batchnorm=self.batchnorm)
        check.one_of(("float32", "tf32", "bf16"), precision=self.precision)
        check.one_of(("auto", "reference", "fast"), engine=self.engine)
        check.at_least(1, local_steps=self.local_steps, users=self.users, batch_size=self.batch_size)
        check.at_least(1, epochs=self.epochs, eval_every=self.eval_every)
        check.at_least(0, size=self.size, participants=self.participants, rounds=self.rounds, seed=self.seed)
        check.at_least(0, wire_every=self.wire_every, checkpoint_every=self.checkpoint_every)
        check.non_negative(alpha=self.alpha, weight_decay=self.weight_decay)
        check.fraction(momentum=self.momentum, delta=self.delta)
        check.positive(delta=self.delta)
        if self.seed >= 2**63:
            raise ValueError(f"seed must be below 2**63, got {self.seed}")
        if self.participants > self.users:
            raise ValueError(f"participants must be at most users, got {self.participants} of {self.users}")
        if self.algorithm == "fedsgd" and self.local_steps != 1:
            raise ValueError(f"local_steps is {self.local_steps}, but fedsgd takes one: set algorithm to fedavg")
        if self.algorithm == "fedavg" and self.weigh_examples:
            raise ValueError("weigh_examples looks at single gradients, which fedavg has not: set algorithm to fedsgd")
        if self.algorithm == "fedavg" and self.weight_decay:
            raise ValueError("weight_decay acts on the server's gradient: with fedavg set it to 0")
        self.schedule()

    @property
    def invited(self) -> int:
        """How many users take part in a round."""
        return self.participants or self.users

    def schedule(self) -> tuple[tuple[int, float], ...]:
        """Return (first epoch, learning rate) pairs, epochs counted from 0.

        >>> Settings(model="resnet18").schedule()
        ((0, 0.01), (70, 0.005))
        """
        text = self.lr
        if text == "paper":
            text = PAPER_RATES.get(self.model.partition("(")[0], PAPER_RATES_OTHERS)
        steps = []
        for part in text.split(","):
            start, _, rate = part.rpartition(":")
            try:
                steps.append((int(start or 0), float(rate)))
            except ValueError:
                raise ValueError(f"lr must look like 0.1 or '0.1, 50:0.01', got {self.lr!r}") from None
            check.positive(lr=steps[-1][1])
        if steps[0][0] != 0 or any(a[0] >= b[0] for a, b in pairwise(steps)):
            raise ValueError(f"lr must start at epoch 0 and its epochs must rise, got {self.lr!r}")
        return tuple(steps)

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch, counted from 0."""
        return [rate for start, rate in self.schedule() if start <= epoch][-1]
