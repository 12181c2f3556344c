"""The charts of the page as coordinates: leakage against what a defense costs."""

import math
from typing import Any

from . import words
from .report import Report

CHART = {"width": 460, "height": 310, "left": 52, "right": 20, "top": 28, "bottom": 46}


def build(report: Report) -> list[dict[str, Any]]:
    """Return the two panels: leakage against bytes, and against accuracy where it was measured."""
    panels = []
    shares = {d.name: u.bytes_sent / u.bytes_dense for d in report.defenses if (u := d.everyday)}
    if shares:
        panels.append(
            _panel(report, "Bytes sent, share of the uncompressed gradient", shares, (0.0, max(1.05, *shares.values())))
        )
    accuracy = {d.name: d.accuracy for d in report.defenses if d.accuracy is not None}
    if accuracy:
        low = max(0.0, math.floor((min(accuracy.values()) - 0.05) * 10) / 10)
        panels.append(_panel(report, "Accuracy of a small test network trained under it", accuracy, (low, 1.0)))
    return panels


def _panel(report: Report, title: str, xs: dict[str, float], span: tuple[float, float]) -> dict[str, Any]:
    low, high = span
    width = CHART["width"] - CHART["left"] - CHART["right"]
    height = CHART["height"] - CHART["top"] - CHART["bottom"]

    def across(value: float) -> float:
        return CHART["left"] + width * (value - low) / (high - low)

    def down(value: float) -> float:
        return CHART["top"] + height * (1 - clip(value))

    points = []
    for name, x in xs.items():
        j = report.judgement(name)
        if j.worst is None:
            continue
        points.append(
            {"name": name, "label": words.label(name), "j": j, "value": x, "x": across(x), "y": down(j.worst)}
        )
    _place_labels(points)
    floors = [j.floor for j in report.judgements if j.column is None and j.floor is not None]
    step = 0.25 if high - low > 0.5 else 0.1
    ticks = [low + i * step for i in range(int((high - low) / step + 1e-9) + 1)]
    return {
        "title": title,
        "points": points,
        "size": CHART,
        "floor": down(max(floors)) if floors else None,
        "xticks": [{"at": across(t), "text": f"{100 * t:.0f} %"} for t in ticks],
        "yticks": [{"at": down(t), "text": f"{t:g}"} for t in (0.0, 0.25, 0.5, 0.75, 1.0)],
    }


def _place_labels(points: list[dict[str, Any]]) -> None:
    """Put each label beside its point, on the first side and height that is clear of other labels and points."""
    taken = [(p["x"] - 8, p["y"] - 8, p["x"] + 8, p["y"] + 8) for p in points]
    for i, point in enumerate(points):
        wide = 8 * min(len(point["label"]), 24)
        sides = ("end", "start") if point["x"] + 12 + wide > CHART["width"] else ("start", "end")
        for shift, anchor in ((s, a) for s in (0, -14, 14, -28, 28, -42, 42) for a in sides):
            x, y = point["x"] + (12 if anchor == "start" else -12), point["y"] + 4 + shift
            box = (x, y - 11, x + wide, y + 3) if anchor == "start" else (x - wide, y - 11, x, y + 3)
            if not any(_overlap(box, other) for j, other in enumerate(taken) if j != i):
                break
        taken.append(box)
        point |= {"label_x": x, "label_y": y, "anchor": anchor}


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def clip(value: float) -> float:
    """Return the value, or the end of 0 to 1 that it is beyond."""
    return min(max(value, 0.0), 1.0)
