"""What the page shows, worked out before the template: plain values, no markup."""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from . import words
from .report import COLUMNS, Column, DefenseInfo, Judgement, Report, Row
from .verdict import BASELINE, against_floor, best_floor

CHART = {"width": 460, "height": 300, "left": 52, "right": 20, "top": 18, "bottom": 46}


def build(report: Report) -> dict[str, Any]:
    """Return the template's context."""
    overall = [j for j in report.judgements if j.column is None]
    return {
        "report": report,
        "headline": words.headline(report),
        "summary": words.summary(report),
        "tiles": tiles(report),
        "verdicts": [verdict_line(report, j) for j in overall],
        "wall": [wall(report, column) for column in COLUMNS],
        "charts": charts(report),
        "rows": [table_row(report, row) for row in report.rows],
        "layers": layers(report),
        "costs": [cost(report, d) for d in report.defenses],
        "fast": fast(report),
    }


def strip(report: Report, judgement: Judgement, column: Column) -> dict[str, Any] | None:
    """Return a defense's strongest attack as dots between 0 and 1, with the blind guess as a mark."""
    row = None if judgement.worst_attack is None else report.find(column, judgement.defense, judgement.worst_attack)
    if row is None or judgement.worst is None:
        return None
    return {
        "dots": [_clip(v) for v in row.scores.get("ssim", []) if math.isfinite(v)],
        "mean": _clip(judgement.worst),
        "floor": _clip(judgement.floor or 0.0),
        "attack": judgement.worst_attack,
    }


def verdict_line(report: Report, overall: Judgement) -> dict[str, Any]:
    """Return one line of the verdict table."""
    parts = {column: report.judgement(overall.defense, column) for column in COLUMNS}
    return {
        "defense": overall.defense,
        "label": words.label(overall.defense),
        "judgement": overall,
        "sentence": words.explain(overall),
        "columns": [
            {"name": column, "judgement": part, "strip": strip(report, part, column)} for column, part in parts.items()
        ],
    }


def tiles(report: Report) -> dict[str, Any] | None:
    """Return one picture under every defense, as the strongest attack rebuilt it in the worst case.

    The picture is the one the attacks on the bare gradient rebuilt best: what is at stake, not an average.
    """
    control = report.judgement(BASELINE, "diagnostic") if any(d.name == BASELINE for d in report.defenses) else None
    row = control and control.worst_attack and report.find("diagnostic", BASELINE, control.worst_attack)
    if not row or not row.pictures:
        return None
    leads = [_or_low(v) - floor for v, floor in zip(row.scores["ssim"], row.floor, strict=True)]
    place = max(range(len(leads)), key=leads.__getitem__)
    shown = []
    for defense in report.defenses:
        best = _best_at(report, defense.name, place)
        verdict = report.judgement(defense.name).verdict
        shown.append({"label": words.label(defense.name), "verdict": verdict, "row": best, "place": place})
    original = report.originals[report.column("diagnostic").pictures[place]]
    return {"original": original, "shown": shown}


def _best_at(report: Report, defense: str, place: int) -> Row | None:
    rows = [r for r in report.rows if r.column == "diagnostic" and r.defense == defense and len(r.pictures) > place]
    return max(rows, key=lambda r: _or_low(r.scores["ssim"][place]), default=None)


def wall(report: Report, column: Column) -> dict[str, Any]:
    """Return the picture wall of one column: originals, then every defense and attack."""
    info = report.column(column)
    groups = []
    for defense in report.defenses:
        found = (report.find(column, defense.name, attack.name) for attack in report.attacks)
        rows = [row for row in found if row is not None]
        groups.append(
            {
                "label": words.label(defense.name),
                "judgement": report.judgement(defense.name, column),
                "rows": [{"row": row, "cells": _cells(row, info.pictures)} for row in rows],
            }
        )
    guess, floor = best_floor(report, column)
    return {"info": info, "words": words.COLUMN_WORDS[column], "groups": groups, "guess": guess, "floor": floor}


def _cells(row: Row, pictures: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "png": png,
            "original": pictures[i],
            "ssim": row.scores["ssim"][i],
            "scores": {name: values[i] for name, values in row.scores.items()},
            "identified": bool(row.identified and row.identified[i]),
        }
        for i, png in enumerate(row.pictures)
    ]


def table_row(report: Report, row: Row) -> dict[str, Any]:
    """Return one line of the table of every attack."""
    test = against_floor(report, row)
    means = {name: _mean(row.scores.get(name, [])) for name in report.metrics}
    return {
        "row": row,
        "means": means,
        "best": test.best if test else None,
        "lead": test.lead if test else None,
        "beats": None if test is None else test.beats,
        "why": test.why if test else row.note,
        "identified": fmean(row.identified) if row.identified else None,
        "contrast": _mean(row.contrast),
    }


def charts(report: Report) -> list[dict[str, Any]]:
    """Return the two panels: leakage against bytes, and against accuracy where it was measured."""
    panels = []
    shares = {d.name: _upload(d).bytes_sent / _upload(d).bytes_dense for d in report.defenses if d.uploads}
    if shares:
        panels.append(
            _panel(report, "Bytes sent, share of the bare gradient", shares, (0.0, max(1.05, *shares.values())))
        )
    accuracy = {d.name: d.accuracy for d in report.defenses if d.accuracy is not None}
    if accuracy:
        low = max(0.0, math.floor((min(accuracy.values()) - 0.05) * 10) / 10)
        panels.append(_panel(report, "Test accuracy after training under the defense", accuracy, (low, 1.0)))
    return panels


def _panel(report: Report, title: str, xs: dict[str, float], span: tuple[float, float]) -> dict[str, Any]:
    low, high = span
    width = CHART["width"] - CHART["left"] - CHART["right"]
    height = CHART["height"] - CHART["top"] - CHART["bottom"]

    def across(value: float) -> float:
        return CHART["left"] + width * (value - low) / (high - low)

    def down(value: float) -> float:
        return CHART["top"] + height * (1 - _clip(value))

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
        wide = 7 * min(len(point["label"]), 24)
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


def layers(report: Report) -> dict[str, Any] | None:
    """Return the matrix of layers and defenses in the everyday case."""
    shown = [(d, _upload(d)) for d in report.defenses if d.uploads]
    if not shown:
        return None
    names = [layer.name for layer in shown[0][1].layers]
    lines = []
    for name in names:
        found = [next((x for x in upload.layers if x.name == name), None) for _, upload in shown]
        lines.append({"name": name, "entries": next(x.entries for x in found if x), "cells": found})
    return {"defenses": [words.label(d.name) for d, _ in shown], "lines": lines, "column": shown[0][1].column}


def cost(report: Report, defense: DefenseInfo) -> dict[str, Any]:
    """Return what one defense costs."""
    upload = _upload(defense) if defense.uploads else None
    attack_seconds = sum(row.seconds for row in report.rows if row.defense == defense.name)
    return {"defense": defense, "label": words.label(defense.name), "upload": upload, "attack_seconds": attack_seconds}


def fast(report: Report) -> dict[str, Any] | None:
    """Return the fast score, one line per defense."""
    if report.fast is None:
        return None
    lines = [
        {"label": words.label(r.defense), "readable": _mean(r.readable), "each": r.readable, "bound": _mean(r.bound)}
        for r in report.fast.risks
    ]
    return {"lines": lines, "score": report.fast}


def _upload(defense: DefenseInfo) -> Any:
    return next((u for u in defense.uploads if u.column == "realistic"), defense.uploads[0])


def _mean(values: Iterable[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return fmean(finite) if finite else None


def _clip(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _or_low(value: float) -> float:
    return value if math.isfinite(value) else -1.0
