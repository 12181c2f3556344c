"""Named tensors side by side in one row, so that one kernel serves all of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import select
from ..core import Tensors
from ..select import gpu

ALIGN = 64  # entries; rows of several users then start at an address every kernel likes


class Layout:
    """Where each tensor lies in a row.

    With `channels_last` the entries of a convolution lie in the order a GPU wants them, and ties between magnitudes
    are broken in that order.
    """

    def __init__(self, like: Tensors, *, channels_last: bool = False) -> None:
        self.shapes = {name: tuple(t.shape) for name, t in like.items()}
        self.sizes = [t.numel() for t in like.values()]
        self.total = sum(self.sizes)
        self.length = -(-self.total // ALIGN) * ALIGN
        self._channels_last = channels_last

    def rows(self, count: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return `[count, length]` zeros."""
        return torch.zeros(count, self.length, device=device, dtype=dtype)

    def segments(self, row: Tensor) -> list[Tensor]:
        """Return the part of each tensor, flat, sharing memory with the row."""
        return list(torch.split(row[: self.total], self.sizes))

    def views(self, row: Tensor) -> Tensors:
        """Return the tensors in their shapes, sharing memory with the row."""
        return {
            name: self._shaped(part, shape)
            for (name, shape), part in zip(self.shapes.items(), self.segments(row), strict=True)
        }

    def write(self, row: Tensor, tensors: Tensors) -> None:
        """Copy tensors into a row."""
        for name, view in self.views(row).items():
            view.copy_(tensors[name])

    def _shaped(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self._channels_last and len(shape) == 4:
            out, channels, height, width = shape
            return part.view(out, height, width, channels).permute(0, 3, 1, 2)
        return part.view(shape)


@dataclass(frozen=True)
class Rows:
    """The gradients of all users, one row each, and how a row is laid out."""

    grads: Tensor  # [users, length]
    layout: Layout

    @property
    def users(self) -> int:
        """How many rows there are."""
        return len(self.grads)

    def scratch(self) -> Tensor:
        """Return zeros of the same shape."""
        return torch.zeros_like(self.grads)

    def segments(self, rows: Tensor) -> list[Tensor]:
        """Return every tensor of every user, flat."""
        return [part for row in rows for part in self.layout.segments(row)]


class InPlace:
    """Selection that overwrites its tensors; on a GPU at fixed addresses, without waiting, in one launch.

    `mean` is a row for the average over `clients` whose tensors follow each other: on a GPU `average` writes that, and
    leaves the tensors as they are.
    """

    def __init__(
        self,
        tensors: list[Tensor],
        bands: list[tuple[int, int]],
        residuals: list[Tensor] | None = None,
        mean: Tensor | None = None,
        clients: int = 1,
    ) -> None:
        self._tensors, self._bands, self._residuals = tensors, bands, residuals
        self._selector = None
        if tensors[0].is_cuda and gpu.AVAILABLE:
            held = residuals or tensors
            self._selector = gpu.Selector(tensors, residuals, tensors, held, bands, mean, clients)
        self.averages = self._selector is not None and mean is not None
        self._graphs: dict[Callable[[], None], torch.cuda.CUDAGraph] = {}

    def __call__(self) -> None:
        if self._selector is not None:
            self._launch(self._selector.run)
        elif self._residuals is None:
            torch._foreach_copy_(self._tensors, select.prune(self._tensors, self._bands))
        else:
            sent, held = select.prune_with_feedback(self._tensors, self._residuals, self._bands)
            torch._foreach_copy_(self._tensors, sent)
            torch._foreach_copy_(self._residuals, held)

    def average(self) -> None:
        """Write the mean and the residuals; only where `averages` says so."""
        assert self._selector is not None
        self._launch(self._selector.run_mean)

    def require_finite(self) -> None:
        """Raise `GradientError` if a selection so far met NaN or infinity."""
        if self._selector is not None:
            self._selector.require_finite()

    def _launch(self, work: Callable[[], None]) -> None:
        if work in self._graphs:
            self._graphs[work].replay()
            return
        work()  # compiles the kernels, which recording them does not
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        self._graphs[work] = graph
