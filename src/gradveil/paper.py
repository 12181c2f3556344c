"""The figures the DGP paper prints, for setting beside our own."""

import json
from functools import cache
from importlib import resources
from typing import Any

MODELS = {"lenet": "LeNetZhu", "vgg11": "VGG11", "resnet18": "ResNet18", "cnn6": "CNN6"}  # our names: the paper's
ROUNDS_PER_EPOCH = 157  # 50,000 pictures, 10 users, batches of 32


@cache
def tables() -> dict[str, Any]:
    """Return every printed table, setting and derived value; read-only."""
    text = resources.files("gradveil").joinpath("assets/paper_tables.json").read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def column(defense: str) -> str:
    """Return what the paper calls a defense: ours, but for none at all."""
    return "baseline" if defense == "none" else defense


def communication_mib(model: str, defense: str) -> float | None:
    """Return the printed MiB of one exchange (the caption says epoch), or None where the paper has no cell.

    >>> communication_mib("resnet18", "dgp"), communication_mib("resnet18", "outpost"), communication_mib("mlp", "dgp")
    (52.216, 52.216, None)
    """
    table = tables()["tables"]["communication_cost_mb"]
    row: dict[str, float] = table.get(MODELS.get(model, ""), {})
    name = column(defense)
    return row.get(table["same_as"].get(name, name))


def computation_seconds(model: str, defense: str) -> float | None:
    """Return the printed seconds per epoch spent on choosing coordinates, or None where the paper has no cell."""
    row: dict[str, float] = tables()["tables"]["computation_cost_s"].get(MODELS.get(model, ""), {})
    return row.get(defense)
