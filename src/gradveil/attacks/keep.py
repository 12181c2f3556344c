"""Searches that outlive a stop: whoever starts a long attack says where their state is kept.

As with `progress`, the place belongs to the caller's context and not to the attack, and every search inside it is kept
there, also through wrappers that search several times.
"""

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..files import write_tensors


@dataclass
class _Keeper:
    folder: Path
    every: float  # seconds
    searches: int = 0
    saved: float = field(default_factory=time.monotonic)


_keeper: ContextVar[_Keeper | None] = ContextVar("gradveil_keeper", default=None)


@contextmanager
def keep(folder: Path, every: float = 30.0) -> Iterator[None]:
    """Keep the state of searches run inside this context in `folder`, and go on from what lies there.

    Searches are known by their order, their start and their rules, not by what they are compared with: give each attack
    a folder of its own. Written every `every` seconds, and when a watcher stops the search.
    """
    token = _keeper.set(_Keeper(folder, every))
    try:
        yield
    finally:
        _keeper.reset(token)


class Search(NamedTuple):
    """The kept state of one search: some tensors, and how many steps they are away from the start."""

    keeper: _Keeper
    path: Path
    problem: str
    buffers: Sequence[Tensor]

    def load(self) -> tuple[int, bool]:
        """Fill the buffers with what was kept; return the steps done and whether that was the end, or (0, False)."""
        try:
            with safe_open(self.path, framework="pt") as file:
                about = file.metadata() or {}
                if about.get("problem") != self.problem:
                    return 0, False
                found = [file.get_tensor(str(i)) for i in range(len(self.buffers))]
        except (OSError, SafetensorError):
            return 0, False
        with torch.no_grad():
            for buffer, kept in zip(self.buffers, found, strict=True):
                buffer.copy_(kept)
        return int(about["done"]), about["ended"] == "yes"

    def save_if_due(self, done: int, *, ended: bool = False) -> None:
        """Save if the last time is long enough ago."""
        if time.monotonic() - self.keeper.saved >= self.keeper.every:
            self.save(done, ended=ended)

    def save(self, done: int, *, ended: bool = False) -> None:
        """Write the buffers, atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        about = {"problem": self.problem, "done": str(done), "ended": "yes" if ended else "no"}
        write_tensors(self.path, {str(i): buffer for i, buffer in enumerate(self.buffers)}, about)
        self.keeper.saved = time.monotonic()


def begin(rules: object, start: Sequence[Tensor], buffers: Sequence[Tensor]) -> Search | None:
    """Return where a search that begins now keeps its buffers; None if nobody asked for it."""
    keeper = _keeper.get()
    if keeper is None:
        return None
    keeper.searches += 1
    digest = hashlib.sha256(repr(rules).encode())
    for tensor in start:
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return Search(keeper, keeper.folder / f"{keeper.searches}.safetensors", digest.hexdigest(), buffers)
