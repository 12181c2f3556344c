"""A run in one safetensors file: tensors in the body, plain data as JSON in its header. No pickle."""

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from .. import tree
from ..core import Tensors
from ..errors import ConfigError, StateError
from ..files import write_tensors
from .settings import MAY_CHANGE, Settings

FORMAT = "gradveil training 1"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after `round` rounds.

    `model` is a state_dict (parameters and the common buffers), `users[u]` is what `Veil.load_state_dict` takes, and
    `local[u]` holds a user's own buffers where BatchNorm statistics stay local.
    """

    round: int
    settings: Settings
    model: Tensors
    momentum: Tensors
    users: list[Tensors]
    local: list[Tensors] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)  # of the data's splits


def save_checkpoint(path: str | Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint, atomically: a kill at any moment leaves the old file or the new one."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {**tree.under("model", checkpoint.model), **tree.under("momentum", checkpoint.momentum)}
    for kind, parts in (("user", checkpoint.users), ("local", checkpoint.local)):
        for i, part in enumerate(parts):
            tensors |= tree.under(f"{kind}.{i}", part)
    header = {
        "round": checkpoint.round,
        "settings": asdict(checkpoint.settings),
        "users": len(checkpoint.users),
        "digests": checkpoint.digests,
    }
    # A clone, because safetensors refuses views that share memory.
    own = {name: t.detach().to("cpu", memory_format=torch.contiguous_format, copy=True) for name, t in tensors.items()}
    write_tensors(path, own, {"format": FORMAT, "run": json.dumps(header)})


def load_checkpoint(path: str | Path) -> Checkpoint:
    """Return the run saved in `path`, on the CPU: weights, every user's veil state, the round and the settings.

    An audit in mid-training takes a user's real residual from here::

        saved = load_checkpoint("runs/x/checkpoint.safetensors")
        model.load_state_dict(saved.model)
        veil = Veil(defense, gradients.parameters(model), client="3")
        veil.load_state_dict(saved.users[3])
    """
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise StateError(f"cannot read the checkpoint {path}: {error}") from error
    if metadata.get("format") != FORMAT:
        raise StateError(f"{path} is not a training checkpoint of this version ({FORMAT})")
    header = json.loads(metadata["run"])
    local = [tree.only(f"local.{i}", tensors) for i in range(header["users"])]
    return Checkpoint(
        round=header["round"],
        settings=Settings(**header["settings"]),
        model=tree.only("model", tensors),
        momentum=tree.only("momentum", tensors),
        users=[tree.only(f"user.{i}", tensors) for i in range(header["users"])],
        local=local if any(local) else [],
        digests=header.get("digests", {}),
    )


def require_same(saved: Checkpoint, wanted: Settings, digests: dict[str, str]) -> None:
    """Raise `ConfigError` if a run was saved under settings, or on data, that make its continuation another run."""
    for f in fields(Settings):
        old, new = getattr(saved.settings, f.name), getattr(wanted, f.name)
        if f.name not in MAY_CHANGE and old != new:
            raise ConfigError(f"the checkpoint was written with {f.name} = {old!r}, not {new!r}: choose another folder")
    if saved.digests and saved.digests != digests:  # the root may change, not what lies there
        raise ConfigError(f"the checkpoint was written on another copy of {wanted.data}: choose another folder")
