"""Every contract of gradveil, and no maths: read this file first.

Data moves one way::

    batch -> gradient -> Defense.apply -> wire -> Payload -> wire -> mean -> model
                                                     |
                                                     +-> observe -> Attack.run -> scores -> report

A `Defense` is a frozen dataclass with pure functions: state goes in and comes out. The one mutable object is the
client's shell, `gradveil.Veil`. An `Attack` sees an `Observation`, which has no field that could hold private inputs.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from .errors import NeedError

Tensors = dict[str, Tensor]  # keys in the order of `named_parameters()`
Grads = Tensors
State = Tensors  # flat, like a state_dict; wrappers prefix the keys of what they wrap
Masks = dict[str, Tensor]  # bool, one per parameter
LossFn = Callable[[Tensor, Tensor], Tensor]  # outputs, labels -> scalar (mean over the batch)
Spec = dict[str, Any]  # {"name": ..., **fields}: plain data that rebuilds an object

Need = Literal["model", "batch", "per_example", "mask"]
Knowledge = Literal["labels", "defense", "statistics", "prior", "active", "rounds"]


class Batch(NamedTuple):
    """Private examples as the model receives them."""

    inputs: Tensor  # [N, ...]
    labels: Tensor  # [N]


@dataclass(frozen=True)
class Step:
    """What a client knows while it protects one update; it never leaves the client."""

    rng: torch.Generator
    round: int = 0
    model: nn.Module | None = None
    batch: Batch | None = None
    mask: Masks | None = None  # the common positions of an aligned round
    num_examples: int | None = None  # how many examples this gradient is the mean of
    largest: Tensors | None = None  # of each tensor, the RMS of what the largest example holds in that mean, if known

    def require_model(self, who: str) -> nn.Module:
        """Return the model or say who needs it."""
        if self.model is None:
            raise NeedError(f"{who} needs the model: pass model=... to Veil.seal")
        return self.model

    def require_batch(self, who: str) -> Batch:
        """Return the batch or say who needs it."""
        if self.batch is None:
            raise NeedError(f"{who} needs the private batch: pass batch=... to Veil.seal")
        return self.batch

    def require_count(self, who: str) -> int:
        """Return how many examples the gradient is of, or say who needs it."""
        if self.num_examples is None:
            raise NeedError(f"{who} must know how many examples a gradient is of, and was not told")
        return self.num_examples

    def require_mask(self, who: str) -> Masks:
        """Return the common mask or say who needs it."""
        if self.mask is None:
            raise NeedError(f"{who} needs the round's common mask: pass mask=... to Veil.seal")
        return self.mask


class Named:
    """Gives a class the name under which tables, configurations and reports know it."""

    @classmethod
    def key(cls) -> str:
        """Return the class name in snake_case: `DualPrune` is `dual_prune`."""
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()


class Defense(ABC, Named):
    """Turns a gradient into what may leave the client. Subclasses are frozen dataclasses.

    `apply` never changes its arguments and keeps keys, shapes, dtypes and device. A defense that acts elsewhere
    overrides `prepare_model` (all parties build that model once) or `prepare_batch` (before the forward pass).
    """

    @property
    def needs(self) -> frozenset[Need]:
        """What `apply` must find in the step besides the gradient."""
        return frozenset()

    @property
    def noisy(self) -> bool:
        """Whether noise is added that error feedback would send back next round."""
        return False

    @property
    def weighs_examples(self) -> bool:
        """Whether `apply` makes use of `Step.largest`, which costs the client one more gradient."""
        return False

    def init(self, params: Grads) -> State:
        """Return the state before the first round."""
        return {}

    @abstractmethod
    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        """Return what may be sent, and the next state."""

    def feed_back(self, grads: Grads, residual: Grads, state: State, step: Step) -> tuple[Grads, Grads, State]:
        """Return (sent, next residual, next state) for the gradient plus the residual.

        The default adds, applies and subtracts; an operator overrides it where one fused pass is faster.
        """
        total = {name: grad + residual[name] for name, grad in grads.items()}
        sent, state = self.apply(total, state, step)
        # The residual may be wider than the gradient; what the cast takes from a sent value is held back too.
        cast = {name: sent[name].to(grad.dtype) for name, grad in grads.items()}
        return cast, {name: total[name] - cast[name] for name in total}, state

    def take_back(self, sent: Grads, state: State, *, newest: bool = False) -> State:
        """Return the state as if `sent` had never been delivered; needs a residual to put it in.

        `newest` says that nothing was sent since. A tensor that did arrive may be given as zeros.
        """
        raise NeedError(f"{self.key()} keeps no residual, so an upload cannot be taken back: wrap it in ErrorFeedback")

    def residual(self, state: State) -> Grads | None:
        """Return the error-feedback residual held in `state`, if this defense keeps one."""
        return None

    def propose(self, grads: Grads, state: State, step: Step) -> Masks:
        """Return the common positions this client proposes for an aligned round."""
        raise NeedError(f"{self.key()} has no aligned rounds: use AlignedDualPrune")

    def fitted(self, mean: tuple[float, ...], std: tuple[float, ...]) -> "Defense":
        """Return this defense set up for the data's normalisation, where it works on pixels and was given none."""
        return self

    def prepare_model(self, model: nn.Module) -> nn.Module:
        """Return the model all parties train under this defense."""
        return model

    def prepare_batch(self, batch: Batch, step: Step) -> Batch:
        """Return the batch the gradient is computed on."""
        return batch


@dataclass(frozen=True)
class Payload:
    """All that crosses the wire for one upload."""

    body: bytes
    num_examples: int
    round: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes that are sent."""
        return len(self.body)


@dataclass(frozen=True)
class ThreatModel:
    """What the attacker is granted. The defense is public by default: hiding it is not a defense."""

    labels: bool = False
    defense: bool = True
    statistics: bool = True  # BatchNorm running statistics of the model
    prior: bool = False  # public pictures or a generator trained on them
    active: bool = False  # may change the model it sends to the client
    rounds: bool = False  # keeps what the same client sent before

    def grants(self, need: Knowledge) -> bool:
        """Say whether the attacker has `need`."""
        return bool(getattr(self, need))


@dataclass(frozen=True)
class Observation:
    """Everything a server sees of one upload. No field can hold the private inputs."""

    grads: Grads  # decoded from the bytes that arrived; 0 where nothing was sent
    model: nn.Module  # the attacker's own copy, in the mode the client used
    loss_fn: LossFn
    input_shape: tuple[int, ...]  # of one example
    num_examples: int
    num_classes: int
    mean: tuple[float, ...] = (0.0,)  # public normalisation: model input = (pixels - mean) / std
    std: tuple[float, ...] = (1.0,)
    labels: Tensor | None = None
    defense: Defense | None = None
    prior: Any = None  # a generator (latent, label -> pixels) or public pictures [M, C, H, W] in 0..1
    local_steps: int = 1
    local_lr: float | None = None  # of an update, weights before minus after; None: the gradient itself was sent
    round: int = 0
    earlier: tuple["Observation", ...] = ()  # the same client's previous uploads, oldest first


class Reconstruction(NamedTuple):
    """An attacker's guess, in model-input space. The number of guesses may differ from the number of examples."""

    inputs: Tensor  # [R, ...]
    labels: Tensor | None = None  # [R]
    loss: float = float("nan")  # the attacker's own objective, never a comparison with the truth
    info: dict[str, Any] = {}  # noqa: RUF012  (read-only remarks, such as steps done)


class Attack(ABC, Named):
    """Turns an observation into a guess at the private inputs. Subclasses are frozen dataclasses."""

    @property
    def needs(self) -> frozenset[Knowledge]:
        """What the threat model must grant, or the attack is reported as skipped."""
        return frozenset()

    @property
    def adaptive(self) -> bool:
        """Whether the search uses what it knows about the defense."""
        return False

    @abstractmethod
    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        """Attack one upload."""

    def run_many(self, seen: list[Observation], rngs: list[torch.Generator]) -> list[Reconstruction]:
        """Attack several uploads; override where doing them together is faster."""
        return [self.run(one, rng) for one, rng in zip(seen, rngs, strict=True)]

    def fitted(self, defense: Defense | None, mean: tuple[float, ...], std: tuple[float, ...]) -> "Attack":
        """Return this attack set up for what is public before the round: the defense if granted, the normalisation.

        An active attack that plants something chooses its layout here; call it before `plant`, and use what it
        returns for `plant` and `run` alike.
        """
        return self

    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        """Return the model an active server sends to the client instead of `model`."""
        return model

    def blind(self) -> "Attack | None":
        """Return this attacker with labels but without the gradient, if it has a guess even so: its own floor."""
        return None


class Metric(NamedTuple):
    """A score per example: `fn(guess, truth) -> [N]`, both `[N, C, H, W]` in 0..1."""

    fn: Callable[[Tensor, Tensor], Tensor]
    leak: Literal["high", "low"]  # which end means that more was recovered


@dataclass(frozen=True)
class Health:
    """What error feedback did in one step; a residual that keeps growing shows here."""

    gamma: float  # share of the energy of gradient + residual that was held back
    residual_norm: float
    sent_norm: float
    density: float  # share of coordinates sent
    per_layer: dict[str, float] = field(default_factory=dict)  # density of each tensor
