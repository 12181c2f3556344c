"""On a GPU: recording a step as a graph, so that thousands of tiny kernels are launched as one, in full precision."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

log = logging.getLogger(__name__)

WARM_UPS = 3  # steps before recording, so that libraries have chosen their kernels and workspaces


@contextmanager
def full_precision() -> Iterator[None]:
    """Compute in true float32: TF32 keeps ten bits of a gradient, and an attack lives on the others."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


def captured(step: Callable[[], None], buffers: Sequence[Tensor]) -> Callable[[], None]:
    """Return a function that does what `step` does, as one graph launch; `step` itself where recording fails.

    `step` must work in place on tensors that stay where they are. `buffers` are all it changes: they are put back
    after the warm-up, so that recording leaves no trace.
    """
    saved = [b.detach().clone() for b in buffers]
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
    except RuntimeError as reason:  # an operation that cannot be recorded, such as a copy to the CPU
        if isinstance(reason, torch.cuda.OutOfMemoryError):
            raise
        log.warning("the step cannot be recorded as a CUDA graph, running it eagerly: %s", reason)
        torch.cuda.synchronize()
        graph = None
    finally:
        for buffer, old in zip(buffers, saved, strict=True):
            buffer.detach().copy_(old)
    return step if graph is None else graph.replay
