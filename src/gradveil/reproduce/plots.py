"""The paper's figures that are plots, drawn from recorded results."""

import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .cells import AttackCell, TrainingCell
from .entry import Entry
from .figures import figures_of, results_of
from .tables import DISTANCE, FEEDBACK

SCORES = {"psnr": "PSNR", "mse": "MSE", "plain_ssim": "SSIM", "lpips": "LPIPS"}
MARKERS = {"top-k": "o", "DGP": "^"}
DATA = "gradveil data"  # the key under which a picture says what it was drawn from

Points = dict[str, dict[str, dict[str, list[float]]]]  # by model, then pruning, then what is plotted
Curves = dict[str, dict[str, list[tuple[float, float]]]]  # by model and data, then defense: epochs and accuracies


def distances(lines: Sequence[Entry], folder: Path, scale: str) -> Points:
    """Return every score, and the relative gradient distance it came from."""
    points: Points = {}
    for entry in lines:
        found = figures_of(entry, results_of(folder, scale, entry)) if entry.part.startswith(DISTANCE) else {}
        if found and isinstance(entry.cell, AttackCell):
            kind = "DGP" if entry.label.startswith("DGP") else "top-k"
            series = points.setdefault(entry.cell.model, {}).setdefault(kind, {})
            for name in ("distance", *(score for score in SCORES if score in found)):
                series.setdefault(name, []).append(found[name].mean)
    return points


def accuracies(lines: Sequence[Entry], folder: Path, scale: str) -> Curves:
    """Return the accuracy curve of every training run of the figure, of the first seed.

    Lines of other parts are left out: their runs differ in more than model, data and defense. The curve of a run that
    diverged before its first evaluation is empty.
    """
    curves: Curves = {}
    for entry in lines:
        if entry.part == FEEDBACK and isinstance(entry.cell, TrainingCell):
            panel = f"{entry.cell.settings.model}, {entry.cell.settings.data}"
            for result in results_of(folder, scale, entry)[:1]:
                curve = [(p["epoch"], 100 * p["accuracy"]) for p in result["curve"]]
                curves.setdefault(panel, {})[entry.cell.defense] = curve
    return curves


def draw_distances(points: Points) -> bytes:
    """Return the plot of `distances` as PNG."""
    from matplotlib.figure import Figure

    plot = Figure(figsize=(11, 3), layout="constrained")
    shown = [name for name in SCORES if all(name in s for kinds in points.values() for s in kinds.values())]
    axes = plot.subplots(1, len(shown), squeeze=False)[0]
    for axis, name in zip(axes, shown, strict=True):
        for number, (model, kinds) in enumerate(points.items()):
            for kind, series in kinds.items():
                style = {"marker": MARKERS[kind], "color": f"C{number}", "label": f"{model}, {kind}"}
                axis.scatter(series["distance"], series[name], **style)
        axis.set(xlabel="relative gradient distance", ylabel=SCORES[name])
    axes[0].legend(fontsize="small")
    return _png(plot, points)


def draw_accuracies(curves: Curves) -> bytes:
    """Return the plot of `accuracies` as PNG, one panel for each model and dataset."""
    from matplotlib.figure import Figure

    plot = Figure(figsize=(11, 3.5), layout="constrained")
    defenses = dict.fromkeys(defense for lines in curves.values() for defense in lines)
    colors = {defense: f"C{i}" for i, defense in enumerate(defenses)}
    handles = {}
    for axis, (panel, lines) in zip(plot.subplots(1, len(curves), squeeze=False)[0], curves.items(), strict=True):
        for defense, curve in lines.items():
            epochs, values = [epoch for epoch, _ in curve], [value for _, value in curve]
            (handles[defense],) = axis.plot(epochs, values, marker=".", color=colors[defense])
        axis.set(title=panel, xlabel="epoch", ylabel="test accuracy, %")
    plot.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return _png(plot, curves)


def digest(data: Points | Curves) -> str:
    """Return what a picture drawn from `data` says under `DATA`."""
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()


def _png(plot: Any, data: Points | Curves) -> bytes:
    handle = io.BytesIO()
    plot.savefig(handle, format="png", dpi=110, metadata={DATA: digest(data), "Software": None})
    return handle.getvalue()
