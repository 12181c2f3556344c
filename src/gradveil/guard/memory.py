"""What a client remembers of the models it was sent: their structure, and a few numbers of every weight."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core import Tensors
from ..errors import StateError

REMEMBERED = 16  # models that a new one is compared with
SKETCH = 64  # numbers kept of each weight matrix from round to round
COLUMNS = 16  # of it that they are made of


@dataclass(frozen=True)
class Seen:
    """What a client remembers of the last model it accepted: its structure and a few numbers of every weight."""

    structure: tuple[str, ...]
    seed: int  # settles which entries the sketch reads
    sketches: Tensor  # [models, tensors, SKETCH], the newest last
    inspected: Tensor  # [tensors, SKETCH] when the weights were last looked at

    def state_dict(self) -> Tensors:
        """Return this memory as tensors."""
        text = torch.frombuffer(bytearray("\n".join(self.structure).encode()), dtype=torch.uint8)
        seed = torch.tensor(self.seed)
        return {"structure": text, "seed": seed, "sketches": self.sketches, "inspected": self.inspected.clone()}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Tensor]) -> Self:
        """Rebuild the memory; raises `StateError` if it is none."""
        if saved.keys() != {"structure", "seed", "sketches", "inspected"}:
            raise StateError("the guard's memory is incomplete: restore the state file, or delete its guard entries")
        text = bytes(saved["structure"].tolist()).decode()
        return cls(tuple(text.split("\n")), int(saved["seed"]), saved["sketches"].cpu(), saved["inspected"].cpu())


def fingerprint(model: nn.Module | Tensors) -> tuple[str, ...]:
    """Return the structure of a model: every module with its settings, every parameter and buffer with its shape.

    >>> fingerprint(nn.Linear(2, 3))
    (': Linear(in_features=2, out_features=3, bias=True)', 'weight [3, 2] float32', 'bias [3] float32')
    """
    modules, tensors = [], list(model.items()) if isinstance(model, dict) else []
    if isinstance(model, nn.Module):
        modules = [f"{name}: {type(m).__name__}({m.extra_repr()})" for name, m in model.named_modules()]
        tensors = [*model.named_parameters(), *model.named_buffers()]
    return (*modules, *(f"{n} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in tensors))


def tensors_of(model: nn.Module | Tensors) -> Tensors:
    """Return a model's parameters by name."""
    return dict(model.named_parameters()) if isinstance(model, nn.Module) else model


def watched(model: nn.Module | Tensors) -> Tensors:
    """Return the weights a swapped layer would show in, and the biases whose thresholds would sort pictures."""
    tensors = {name: t.detach() for name, t in tensors_of(model).items()}
    return {
        name: t
        for name, t in tensors.items()
        if t.ndim >= 2 or (name.endswith("bias") and tensors.get(f"{name[:-4]}weight", t).ndim == 2)
    }


def changes(old: Tensor, new: Tensor) -> list[float]:
    """Return the relative change of every tensor; 0 for one that was and is zero, infinite where it cannot be told."""
    old, new = old.double(), new.double()  # the squares of float32 overflow, and NaN would pass every limit
    size = torch.maximum(old.norm(dim=1), new.norm(dim=1)).clamp_min(torch.finfo(torch.float32).tiny)
    changes: list[float] = ((new - old).norm(dim=1) / size).nan_to_num(nan=math.inf).tolist()
    return changes


def sketch(weights: Tensors, seed: int) -> Tensor:
    """Return `[tensors, SKETCH]`: signed sums over all rows of a few secret columns, which no planted row can avoid."""
    rng = torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (COLUMNS * max(map(len, weights.values()), default=0),), generator=rng) * 2.0 - 1
    sums = []
    for t in weights.values():
        rows = t.reshape(len(t), -1)
        columns = torch.randint(rows.shape[1], (min(COLUMNS, rows.shape[1]),), generator=rng)
        picked = rows.index_select(1, columns.to(t.device)).double().flatten()
        picked = picked * signs[: len(picked)].to(t.device)
        sums.append(F.pad(picked, (0, -len(picked) % SKETCH)).view(-1, SKETCH).sum(0))
    return torch.stack(sums).cpu() if sums else torch.zeros(0, SKETCH, dtype=torch.float64)


def difference(now: tuple[str, ...], pinned: tuple[str, ...]) -> str:
    """Say in words where two structures differ first."""
    added = [line for line in now if line not in set(pinned)]
    missing = [line for line in pinned if line not in set(now)]
    return f"it adds {added[0]!r}" if added else f"it lacks {missing[0]!r}" if missing else "the order differs"
