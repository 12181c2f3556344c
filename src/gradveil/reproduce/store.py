"""Where results lie: one JSON file for each cell, and a strip of pictures beside it."""

import io
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .. import record
from ..data import is_original
from ..errors import ConfigError
from .cells import Cell, key

OTHER_COPY = "other-copy"  # folder of results on copies of a dataset that are not the original
STRIP = 20  # pictures in a strip at most
NEEDED = {  # kind of result -> what pages and resuming read of it, whatever else it holds
    "attack": ("cell", "definition", "environment", "seed", "n", "scores", "transformed_scores", "floor", "distance"),
    "training": ("settings", "environment", "status", "accuracy", "curve"),
    "cost": ("cell", "environment", "seed", "mib", "paper_mib", "defense_seconds", "encode_seconds"),
    "reason": ("experiment", "lines"),
}


def path_of(folder: Path, place: str, cell: Cell) -> Path:
    """Return where the result of a cell lies; `place` is the name of a scale, or `OTHER_COPY`."""
    return folder / place / f"{key(cell)}.json"


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result, atomically; what is not a finite number becomes null."""
    record.write_json(path, plain(result))


def load(path: Path) -> dict[str, Any]:
    """Return the result in a file; raises `ConfigError` for a file that holds something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the result {path}: {error}") from error
    kind = found.get("kind") if isinstance(found, dict) else None
    if not isinstance(kind, str) or kind not in NEEDED:
        wanted = f"a JSON object whose kind is one of {', '.join(NEEDED)}"
        got = f"kind {kind!r}" if isinstance(found, dict) else type(found).__name__
        raise ConfigError(f"{path} is no result: expected {wanted}, got {got}; take it away to run its cell again")
    lacking = [name for name in NEEDED[kind] if name not in found]
    if lacking:
        raise ConfigError(f"the {kind} result {path} lacks {', '.join(lacking)}: take it away to run its cell again")
    return dict(found)


def of_all_seeds(folder: Path, scale: str, cell: Cell) -> Iterator[dict[str, Any]]:
    """Yield the results of a cell and of the same cell with other seeds, in the order of the seeds."""
    found = (folder / scale).glob(f"{cell.stem}_seed*.json")
    yield from sorted((load(path) for path in found), key=lambda result: int(result["seed"]))


def on_original(result: dict[str, Any]) -> bool:
    """Say whether a result is of the dataset as published, or of none; the first results do not say, and are not."""
    described = result["settings"] if result["kind"] == "training" else result["cell"]
    return is_original(described.get("data", ""), result.get("digests", {}))


def plain(value: Any) -> Any:
    """Return plain data in which no number is infinite or NaN, and floats have six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def strip_bytes(pictures: Tensor) -> bytes:
    """Return pictures `[N, C, H, W]` in 0..1 side by side as WebP, twenty at most."""
    row = torch.cat(list(pictures[:STRIP].detach().cpu().nan_to_num(nan=0.5).clamp(0, 1)), dim=2)
    levels = (row.expand(3, -1, -1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    handle = io.BytesIO()
    Image.fromarray(levels).save(handle, "WEBP", quality=85)
    return handle.getvalue()


def save_strip(path: Path, pictures: Tensor) -> None:
    """Write reconstructions as a strip, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_bytes(strip_bytes(pictures))
    scratch.replace(path)
