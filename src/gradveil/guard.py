"""The client's own look at the model it was sent, before any gradient is computed on it.

A malicious server can put a layer into the model, or set the weights of an existing one, so that single pictures come
out of the gradient whole. Two looks catch that: the structure must be the one the user defined, and no layer may have
weights that only serve to sort pictures into bins. `tests/test_guard.py` holds the attacks it must catch and the
models it must let pass.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import check
from .errors import GuardError

SAMPLED_ROWS = 512  # rows looked at per layer: a planted layer needs many, and the cost grows with the square


@dataclass(frozen=True)
class Finding:
    """Something in one layer that honest training does not produce."""

    layer: str
    reason: str

    def __str__(self) -> str:
        return f"{self.layer}: {self.reason}"


@dataclass(frozen=True)
class Guard:
    """Refuses a manipulated model.

    `pinned` is `fingerprint(model)` of the user's own definition; None pins nothing and leaves the look at the
    weights. Guarantees: a model with other modules, shapes or hyperparameters than the pinned one is refused. Does
    not guarantee that every malicious weight is found: a careful server can hide a weaker trap, which is why the
    defense behind the guard must hold as well.
    """

    pinned: tuple[str, ...] | None = None
    repeated: float = 0.05  # share of rows parallel to another row
    dead: float = 0.25  # share of rows that no input can make fire
    gain: float = 100.0  # largest row or column norm over the median one

    def __post_init__(self) -> None:
        check.fraction(repeated=self.repeated, dead=self.dead)
        check.positive(gain=self.gain)

    def check(self, model: nn.Module) -> None:
        """Raise `GuardError` if the model must not be given a gradient."""
        if self.pinned is not None:
            require_structure(model, self.pinned)
        findings = self.inspect(model)
        if findings:
            raise GuardError(
                "the model looks manipulated, no gradient is computed on it: "
                + "; ".join(map(str, findings[:3]))
                + ". If this is your own design, pass guard=None to Veil"
            )

    def inspect(self, model: nn.Module) -> list[Finding]:
        """Return what looks planted in the weights, layer by layer."""
        found = []
        first = True
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
                reason = self._reason(module, first)
                first = False
                if reason:
                    found.append(Finding(name or type(module).__name__, reason))
        return found

    @torch.no_grad()
    def _reason(self, module: nn.Module, first: bool) -> str | None:
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        rows = weight.detach().flatten(1).float()
        if rows.shape[0] < 8 or rows.shape[1] < 8:
            return None  # too small to sort pictures, and too small to judge
        parallel = _parallel_share(rows)
        if parallel > self.repeated:
            return f"{parallel:.0%} of its rows are copies of one another up to a factor (an imprint)"
        for word, norms in (("row", rows.norm(dim=1)), ("column", rows.norm(dim=0))):
            middle = float(norms.median())
            if middle > 0 and float(norms.max()) > self.gain * middle:
                return f"one {word} is {float(norms.max()) / middle:.0f} times as large as the median one (a decoy)"
        if isinstance(bias, Tensor):
            # No input within four standard deviations can lift such a row above zero.
            dead = float((bias.detach().float() < -4 * rows.abs().sum(1)).float().mean())
            if dead > self.dead:
                return f"{dead:.0%} of its rows can never fire"
        if first and isinstance(module, nn.Linear) and _is_trap(rows):
            return "the negative half of every row mirrors the positive half (trap weights)"
        return None


def fingerprint(model: nn.Module) -> tuple[str, ...]:
    """Return the structure of a model: every module with its settings, every parameter and buffer with its shape.

    >>> fingerprint(nn.Linear(2, 3))
    (': Linear(in_features=2, out_features=3, bias=True)', 'weight [3, 2] float32', 'bias [3] float32')
    """
    modules = [f"{name}: {type(m).__name__}({m.extra_repr()})" for name, m in model.named_modules()]
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return (*modules, *(f"{n} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for n, t in tensors))


def require_structure(model: nn.Module, pinned: tuple[str, ...]) -> None:
    """Raise `GuardError` unless the model has exactly the pinned structure."""
    now = fingerprint(model)
    if now == pinned:
        return
    added = [line for line in now if line not in set(pinned)]
    missing = [line for line in pinned if line not in set(now)]
    what = f"it adds {added[0]!r}" if added else f"it lacks {missing[0]!r}" if missing else "the order differs"
    raise GuardError(f"the model is not the one you defined ({what}): no gradient is computed on it")


def _parallel_share(rows: Tensor) -> float:
    """Return the share of rows that equal another one up to a factor; all-zero rows do not count."""
    if rows.shape[0] > SAMPLED_ROWS:
        step = rows.shape[0] / SAMPLED_ROWS
        rows = rows[(torch.arange(SAMPLED_ROWS, device=rows.device) * step).long()]
    norms = rows.norm(dim=1)
    alive = norms > 1e-12 * norms.max().clamp_min(1e-30)
    units = rows[alive] / norms[alive, None]
    if len(units) < 2:
        return 0.0
    cosine = (units @ units.T).abs()
    cosine.fill_diagonal_(0)
    return float((cosine.amax(1) > 0.9999).sum()) / rows.shape[0]


def _is_trap(rows: Tensor) -> bool:
    """Say whether the sorted negative weights of a row are the sorted positive ones times one factor, row after row."""
    odd = 0
    chosen = rows[:: max(1, rows.shape[0] // 32)][:32]
    for row in chosen:
        positive, negative = row[row > 0].sort().values, (-row[row < 0]).sort().values
        n = min(len(positive), len(negative))
        if n < 8 or abs(len(positive) - len(negative)) > 1:
            continue
        ratio = positive[-n:] / negative[-n:]
        upper = ratio[n // 2 :]
        odd += float(upper.std() / upper.mean()) < 1e-3
    return odd > len(chosen) // 2
