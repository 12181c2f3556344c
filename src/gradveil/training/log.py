"""Where the rounds go: JSON lines always, TensorBoard if it is installed."""

import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .. import record
from ..errors import StateError
from .rounds import Round

CURVES = ("loss", "accuracy", "bytes_up", "bytes_down", "residual_ratio", "gamma", "lr")


class Log:
    """Appends rounds to `metrics.jsonl`; lines of rounds that a kill undid are cut off when a run continues."""

    def __init__(self, folder: Path, next_round: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        kept = [line for line in read_rounds(path) if line["index"] < next_round] if next_round else []
        record.write_text(path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = path.open("a", encoding="utf-8")
        self._board: Any = _tensorboard(folder, next_round)

    def write(self, rounds: Sequence[Round]) -> None:
        """Append rounds."""
        for one in rounds:
            values = {name: value for name, value in asdict(one).items() if value is not None}
            self._file.write(json.dumps(values) + "\n")
            if self._board is not None:
                for name in CURVES:
                    if name in values:
                        self._board.add_scalar(name, values[name], one.index)
        self._file.flush()

    def settle(self) -> None:
        """Return when all lines are on the disk: a checkpoint must never be ahead of them."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_rounds(path: Path) -> list[dict[str, Any]]:
    """Return the rounds in a file of JSON lines; a last line that a kill cut short is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    try:
        return [json.loads(line) for line in lines[:-1] if line]
    except ValueError as error:
        raise StateError(f"{path} is damaged, a line of it is not JSON: {error}") from error


def _tensorboard(folder: Path, next_round: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    # What a kill undid is hidden there too, instead of being drawn twice.
    return SummaryWriter(str(folder / "tensorboard"), purge_step=next_round or None)
