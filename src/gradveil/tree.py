"""Functions on named tensors."""

import hashlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .core import Tensors
from .errors import GradientError


def tmap(fn: Callable[[Tensor], Tensor], tensors: Tensors) -> Tensors:
    """Apply `fn` to every tensor.

    >>> tmap(torch.neg, {"w": torch.ones(2)})
    {'w': tensor([-1., -1.])}
    """
    return {name: fn(tensor) for name, tensor in tensors.items()}


def zeros_like(tensors: Tensors) -> Tensors:
    """Return zeros of the same shapes and types."""
    return tmap(torch.zeros_like, tensors)


def add(a: Tensors, b: Tensors) -> Tensors:
    """Return a + b, key by key."""
    return {name: a[name] + b[name] for name in a}


def sub(a: Tensors, b: Tensors) -> Tensors:
    """Return a - b, key by key."""
    return {name: a[name] - b[name] for name in a}


def under(prefix: str, tensors: Tensors) -> Tensors:
    """Prefix every key with `prefix.`."""
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def only(prefix: str, tensors: Tensors) -> Tensors:
    """Return the tensors under `prefix.`, with the prefix taken off.

    >>> only("0", {"0.w": torch.ones(1), "1.w": torch.zeros(1)})
    {'w': tensor([1.])}
    """
    head = f"{prefix}."
    return {name.removeprefix(head): tensor for name, tensor in tensors.items() if name.startswith(head)}


def global_norm(tensors: Tensors) -> float:
    """Return the Euclidean norm of all entries together, accumulated in float64 across tensors."""
    squares = [float(torch.linalg.vector_norm(t.float())) ** 2 for t in tensors.values() if t.numel()]
    return float(sum(squares) ** 0.5)


def cosine(a: Tensors, b: Tensors) -> float:
    """Return the cosine of the angle between all entries of `a` and of `b`; 0 where either is zero."""
    product = sum(float((a[name] * b[name]).sum()) for name in a)
    norms = global_norm(a) * global_norm(b)
    return product / norms if norms else 0.0


def weighted_mean(trees: Sequence[Tensors], weights: Sequence[float]) -> Tensors:
    """Return the mean of several trees, weighted (by numbers of examples, say).

    >>> weighted_mean([{"w": torch.zeros(1)}, {"w": torch.ones(1)}], [1, 3])
    {'w': tensor([0.7500])}
    """
    if not trees or len(trees) != len(weights):
        raise ValueError(f"weighted_mean needs one weight per tree and at least one, got {len(trees)}, {len(weights)}")
    total = float(sum(weights))
    if total <= 0:
        raise ValueError(f"weights must add up to more than 0, got {total}")
    out = {name: tensor * (weights[0] / total) for name, tensor in trees[0].items()}
    for tree, weight in zip(trees[1:], weights[1:], strict=True):
        for name in out:
            out[name] = out[name].add_(tree[name], alpha=weight / total)
    return out


def digest(tensors: Tensors) -> str:
    """Return the first 16 hex digits of a SHA-256 over names, types, shapes and numbers.

    >>> digest({"w": torch.zeros(1)}) == digest({"w": torch.ones(1)})
    False
    """
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def require_finite(tensors: Tensors) -> None:
    """Raise `GradientError` naming the first tensor that is not dense floating point, or holds NaN or infinity."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise GradientError(f"{name} has type {tensor.dtype}; only floating-point gradients can be protected")
        if tensor.layout is not torch.strided:
            raise GradientError(f"{name} is sparse; only dense gradients can be protected (nn.Embedding: sparse=False)")
    sums = [tensor.sum(dtype=torch.float32) for tensor in tensors.values() if tensor.numel()]
    # A sum is not finite when one entry is not; a sum that merely overflowed is settled by the exact test below.
    if not sums or bool(torch.isfinite(torch.stack(sums)).all()):
        return
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise GradientError(f"{name} holds NaN or infinity: skip this batch (nothing was sent, no state changed)")
