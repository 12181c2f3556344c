"""Exact selection of a band of magnitudes, layer by layer.

`plain` states the rule and is the oracle; `cpu` and `gpu` find the same entries without sorting.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import GradientError
from . import cpu, gpu
from .plain import band, band_mask

__all__ = ["band", "band_mask", "prune", "prune_with_feedback"]

Bands = Sequence[tuple[int, int]]  # (entries removed at the top, entries sent) of each tensor
_HALVES = (torch.float16, torch.bfloat16)


def prune(values: Sequence[Tensor], bands: Bands) -> list[Tensor]:
    """Return each tensor with everything outside its band set to zero; `GradientError` if one is not finite."""
    if _all(values, "cpu", (torch.float32, *_HALVES)):
        # A half-precision number is a float32 number, so the order of magnitudes is the same.
        flat = [v.detach().reshape(-1).float().numpy() for v in values]
        sent, finite = cpu.prune(flat, bands)
        _require(finite)
        return [torch.from_numpy(s).view(v.shape).to(v.dtype) for s, v in zip(sent, values, strict=True)]
    if _on_gpu(values):
        return gpu.prune(values, bands)
    _require([bool(torch.isfinite(v).all()) for v in values])
    return [torch.where(band_mask(v, *b), v, torch.zeros_like(v)) for v, b in zip(values, bands, strict=True)]


def prune_with_feedback(
    values: Sequence[Tensor], residuals: Sequence[Tensor], bands: Bands
) -> tuple[list[Tensor], list[Tensor]]:
    """Return (sent, next residual) of value + residual. Sent keeps the value's type, the residual its own.

    What rounding to a smaller type takes from a sent value stays in the residual, so nothing is lost.
    """
    if _all([*values, *residuals], "cpu", (torch.float32,)):
        flat = [[t.detach().reshape(-1).numpy() for t in tensors] for tensors in (values, residuals)]
        sent, held, finite = cpu.prune_with_feedback(flat[0], flat[1], bands)
        _require(finite)
        shapes = [v.shape for v in values]
        return _shaped(sent, shapes), _shaped(held, shapes)
    if _on_gpu([*values, *residuals]):
        return gpu.prune_with_feedback(values, residuals, bands)
    totals = [v.to(r.dtype) + r for v, r in zip(values, residuals, strict=True)]
    cast = [s.to(v.dtype) for s, v in zip(prune(totals, bands), values, strict=True)]
    return cast, [t - s.to(t.dtype) for t, s in zip(totals, cast, strict=True)]


def _shaped(arrays: Sequence[cpu.Floats], shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [torch.from_numpy(a).view(shape) for a, shape in zip(arrays, shapes, strict=True)]


def _all(tensors: Sequence[Tensor], device: str, dtypes: tuple[torch.dtype, ...]) -> bool:
    return all(t.device.type == device and t.dtype in dtypes for t in tensors)


def _on_gpu(tensors: Sequence[Tensor]) -> bool:
    return gpu.AVAILABLE and len(tensors) > 0 and _all(tensors, "cuda", (torch.float32,))


def _require(finite: Sequence[bool]) -> None:
    if not all(finite):
        raise GradientError(
            f"gradient tensor {list(finite).index(False)} holds NaN or infinity, or its sum with the residual does: "
            "skip this batch (nothing was sent, no state changed)"
        )
