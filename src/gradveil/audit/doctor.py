"""Is the defense really on? A look at what left the process or at what a client keeps, not at its settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from .. import tree
from ..core import Defense, Grads, Payload, Step, Tensors
from ..errors import ConfigError, GradveilError, WireError
from ..veil import Veil
from ..wire import MAX_ENTRIES
from ..wire.frame import MAGIC, Values, read_frame

State = Literal["on", "off", "unclear"]
DENSE = 0.99  # share of entries sent from which nothing was pruned
FEW = 256  # tensors below this may be written plainly whatever their values
SLACK = 1.02  # how many times the expected entries may be sent: dead units tip a count


@dataclass(frozen=True)
class Part:
    """One tensor of a payload or of a residual."""

    name: str
    dtype: str
    entries: int
    share: float  # of entries that are not zero
    nbytes: int
    norm: float | None = None  # of a residual; a payload's values are not read


@dataclass(frozen=True)
class Examination:
    """What was found, and what it means."""

    kind: Literal["payload", "state"]
    state: State
    reasons: list[str]
    parts: list[Part]
    nbytes: int
    dense_bytes: int
    round: int | None = None  # age of the residual: uploads the client has made


def examine(source: Any, expected: Defense | None = None) -> Examination:
    """Return what a payload (its bytes, or the object), a `Veil`, or a file with either of them shows."""
    if isinstance(source, Payload):
        return examine_payload(source.body, expected)
    if isinstance(source, Veil):
        return examine_state(source.state_dict())
    if isinstance(source, bytes):
        return examine_payload(source, expected) if source.startswith(MAGIC) else examine_state(_tensors(source))
    if isinstance(source, str | Path):
        try:
            return examine(Path(source).read_bytes(), expected)
        except OSError as error:
            raise ConfigError(f"cannot read {source}: {error}") from error
    raise ConfigError(f"cannot examine a {type(source).__name__}: give a Payload, its bytes, a Veil, or a file")


def examine_payload(body: bytes, expected: Defense | None = None) -> Examination:
    """Return what a payload's frame shows; its checksum is verified, its values are not read.

    Sparsity shows, noise does not: a dense payload under a noise defense looks like an undefended one. With
    `expected` the entries sent per tensor are compared with what that defense sends of a gradient of this shape.
    """
    frame = read_frame(body)
    parts = [
        Part(
            entry.name,
            str(entry.kind.dtype).removeprefix("torch."),
            entry.numel,
            entry.sent / entry.numel if entry.numel else 0.0,
            entry.position_bytes + entry.value_bytes,
        )
        for entry in frame.entries
    ]
    dense = sum(entry.numel * entry.kind.size for entry in frame.entries)
    declared = sum(entry.numel for entry in frame.entries)
    sent = sum(entry.sent for entry in frame.entries) / max(declared, 1)
    whole = [part.name for part in parts if part.entries >= FEW and part.share >= DENSE]
    reasons = [f"{100 * sent:.1f} % of the entries were sent, in {len(body)} bytes ({dense} uncompressed)"]
    state: State
    if expected is not None and declared > MAX_ENTRIES:  # a few bytes can declare terabytes
        state, why = "unclear", [f"it declares {declared} entries, too many to try {expected.key()} on as many"]
    elif expected is not None:
        shapes = {entry.name: torch.empty(entry.shape, dtype=entry.kind.dtype) for entry in frame.entries}
        state, why = _matches({p.name: round(p.share * p.entries) for p in parts}, shapes, expected)
    elif {entry.values for entry in frame.entries if entry.numel >= FEW} == {Values.LEVELS}:
        state, why = "on", ["every value was rounded to one of a few levels"]
    elif sent >= DENSE:
        state, why = "off", ["nothing was pruned; if the defense is noise, this cannot be seen from a payload"]
    elif whole:
        state, why = (
            "unclear",
            [
                f"{', '.join(whole)} left whole, and units that never fire leave zeros in a bare gradient too: "
                "say with --expect which defense should be on"
            ],
        )
    else:
        state, why = "on", ["entries of every tensor were held back; whether that is enough, an audit must say"]
    return Examination("payload", state, reasons + why, parts, len(body), dense)


def _matches(sent: dict[str, int], shapes: Grads, expected: Defense) -> tuple[State, list[str]]:
    """Compare the counts with those of `expected` on a random gradient of the same shapes."""
    rng = torch.Generator().manual_seed(0)
    random = {name: torch.randn(t.shape, generator=rng).to(t.dtype) for name, t in shapes.items()}
    try:
        state = expected.init(random)
        step = Step(rng)
        if "mask" in expected.needs:
            step = Step(rng, mask=expected.propose(random, state, step))
        ours, _ = expected.apply(random, state, step)
    except GradveilError as error:
        return "unclear", [f"{expected.key()} cannot be tried without the client: {error}"]
    counts = {name: int(torch.count_nonzero(t)) for name, t in ours.items()}
    if all(counts[name] >= DENSE * t.numel() for name, t in shapes.items()):
        return "unclear", ["the expected defense sends every entry, so a payload cannot show whether it is on"]
    over = [name for name in sent if sent[name] > SLACK * counts[name] + 1]
    if over:
        name = over[0]
        return "off", [f"{name} sent {sent[name]} entries where the expected defense sends {counts[name]}"]
    return "on", ["no tensor sent more entries than the expected defense does"]


def examine_state(saved: Tensors) -> Examination:
    """Return what a client's saved state shows: the residual and its age."""
    if "round" not in saved:
        raise ConfigError("this is neither a payload nor the state of a Veil")
    age = int(saved["round"])
    held = {k.partition("residual.")[2]: t for k, t in saved.items() if k.startswith("state.") and "residual." in k}
    parts = [
        Part(
            name,
            str(t.dtype).removeprefix("torch."),
            t.numel(),
            int(torch.count_nonzero(t)) / max(t.numel(), 1),
            t.numel() * t.element_size(),
            float(t.double().norm()),
        )
        for name, t in held.items()
    ]
    norm = tree.global_norm(held)
    size = sum(part.nbytes for part in parts)
    state: State
    if not held:
        state, why = "unclear", "this defense keeps no residual: look at a payload"
    elif any(not bool(torch.isfinite(t).all()) for t in held.values()):
        state, why = "off", "the residual holds NaN or infinity: nothing it feeds can be trusted"
    elif age == 0:
        state, why = "unclear", "no upload was made yet; a first upload has nothing held back to hide behind"
    elif norm == 0:
        state, why = "off", f"after {age} uploads nothing is held back: error feedback is lost or never ran"
    else:
        state, why = "on", f"after {age} uploads the client holds back a residual of norm {norm:.3g}"
    return Examination("state", state, [why], parts, size, size, age)


def _tensors(raw: bytes) -> Tensors:
    try:
        return load(raw)
    except SafetensorError as error:
        raise WireError(f"this is neither a payload nor the state of a Veil: {error}") from error
