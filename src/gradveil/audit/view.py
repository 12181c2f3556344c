"""What the page shows, worked out before the template: plain values, no markup."""

import math
from collections.abc import Iterable
from statistics import fmean
from typing import Any

from . import charts, summary, words
from .report import COLUMNS, Column, DefenseInfo, Judgement, Report, Row
from .verdict import BASELINE, against_floor, best_floor, counted, counts


def build(report: Report) -> dict[str, Any]:
    """Return the template's context."""
    overall = [j for j in report.judgements if j.column is None]
    return {
        "report": report,
        "headline": summary.headline(report),
        "leaks": summary.what_leaks(report),
        "advice": summary.advice(report),
        "method": summary.method(report),
        "tiles": tiles(report),
        "verdicts": [verdict_line(report, j) for j in overall],
        "wall": [wall(report, column) for column in COLUMNS],
        "active": active(report),
        "charts": charts.build(report),
        "rows": [table_row(report, row) for row in report.rows],
        "layers": layers(report),
        "costs": [cost(d) for d in report.defenses],
        "fast": fast(report),
    }


def strip(report: Report, judgement: Judgement, column: Column) -> dict[str, Any] | None:
    """Return a defense's strongest attack as dots between 0 and 1, with the blind guess as a mark."""
    if judgement.worst_attack is None or judgement.worst is None:
        return None
    row = counted(report, column, judgement.defense, judgement.worst_attack)
    if row is None:
        return None
    return {
        "dots": [charts.clip(v) for v in row.scores.get("ssim", []) if math.isfinite(v)],
        "mean": charts.clip(judgement.worst),
        "floor": charts.clip(judgement.floor or 0.0),
        "attack": judgement.worst_attack,
    }


def verdict_line(report: Report, overall: Judgement) -> dict[str, Any]:
    """Return one line of the verdict table."""
    parts = {column: report.judgement(overall.defense, column) for column in COLUMNS}
    return {
        "defense": overall.defense,
        "label": words.label(overall.defense),
        "judgement": overall,
        "sentence": summary.explain(overall),
        "columns": [
            {"name": column, "judgement": part, "strip": strip(report, part, column)} for column, part in parts.items()
        ],
    }


def tiles(report: Report) -> dict[str, Any] | None:
    """Return one picture under every defense, as the strongest attack rebuilt it in the worst case.

    The picture is the one the attacks on the bare gradient rebuilt best: what is at stake, not an average.
    """
    control = report.judgement(BASELINE, "diagnostic") if any(d.name == BASELINE for d in report.defenses) else None
    row = counted(report, "diagnostic", BASELINE, control.worst_attack) if control and control.worst_attack else None
    if row is None or not row.pictures:
        return None
    leads = [_or_low(v) - floor for v, floor in zip(row.scores["ssim"], row.floor, strict=True)]
    place = max(range(len(leads)), key=leads.__getitem__)
    shown = []
    for defense in report.defenses:
        rows = [r for r in report.rows if r.column == "diagnostic" and r.defense == defense.name and counts(report, r)]
        best = max(
            (r for r in rows if len(r.pictures) > place), key=lambda r: _or_low(r.scores["ssim"][place]), default=None
        )
        nothing = "nothing was sent" if any(r.status == "refused" for r in rows) else "no result"
        verdict = report.judgement(defense.name).verdict
        label = words.label(defense.name)
        shown.append({"label": label, "verdict": verdict, "row": best, "place": place, "nothing": nothing})
    original = report.originals[report.column("diagnostic").pictures[place]]
    return {"original": original, "shown": shown, "blind": row.floor[place]}


def wall(report: Report, column: Column) -> dict[str, Any]:
    """Return the picture wall of one column: originals, then every defense and attack."""
    info = report.column(column)
    groups = []
    for defense in report.defenses:
        rows = [
            {"row": row, "name": attack_label(report, row), "cells": _cells(row, info.pictures)}
            for attack in report.attacks
            for guarded in (False, True)
            if (row := report.find(column, defense.name, attack.name, guarded=guarded)) is not None
        ]
        groups.append(
            {
                "label": words.label(defense.name),
                "judgement": report.judgement(defense.name, column),
                "rows": rows,
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


def attack_label(report: Report, row: Row) -> str:
    """Return an attack's name; of an active one also whether the client had a guard."""
    active = any(attack.active for attack in report.attacks if attack.name == row.attack)
    return f"{row.attack}, {'with' if row.guarded else 'without'} the guard" if active else row.attack


def active(report: Report) -> list[dict[str, Any]]:
    """Return what each active attack gets from clients without and with a guard, one line per defense."""
    return [
        {
            "attack": attack.name,
            "label": words.label(defense.name),
            "cells": [
                _outcome(report, report.find(column, defense.name, attack.name, guarded=guarded))
                for column in COLUMNS
                for guarded in (False, True)
            ],
        }
        for attack in report.attacks
        if attack.active
        for defense in report.defenses
    ]


def _outcome(report: Report, row: Row | None) -> dict[str, str]:
    """Return the result of a row in a few words, and the verdict they are coloured by."""
    if row is None:
        return {"kind": "incomplete", "text": "did not run"}
    if row.status == "refused":
        return {"kind": "holds", "text": "refused: nothing was sent"}
    test = against_floor(report, row)
    if test is None:
        return {"kind": "incomplete", "text": row.status}
    passed = "the guard saw nothing; " if row.guarded else ""
    what = "reads pictures" if test.beats else "no better than guessing"
    return {"kind": "leaks" if test.beats else "holds", "text": f"{passed}{what}, SSIM {words.number(test.mean)}"}


def table_row(report: Report, row: Row) -> dict[str, Any]:
    """Return one line of the table of every attack."""
    test = against_floor(report, row)
    scored = test if row.scores else None
    means = {name: _mean(row.scores.get(name, [])) for name in report.metrics}
    return {
        "row": row,
        "name": attack_label(report, row),
        "means": means,
        "best": scored.best if scored else None,
        "lead": scored.lead if scored else None,
        "beats": None if test is None else test.beats,
        "why": scored.why if scored else row.note,
        "identified": fmean(row.identified) if row.identified else None,
        "contrast": _mean(row.contrast),
    }


def layers(report: Report) -> dict[str, Any] | None:
    """Return the matrix of layers and defenses in the everyday case."""
    shown = [(d, upload) for d in report.defenses if (upload := d.everyday)]
    if not shown:
        return None
    names = [layer.name for layer in shown[0][1].layers]
    lines = []
    for name in names:
        found = [next((x for x in upload.layers if x.name == name), None) for _, upload in shown]
        lines.append({"name": name, "entries": next(x.entries for x in found if x), "cells": found})
    return {"defenses": [words.label(d.name) for d, _ in shown], "lines": lines, "column": shown[0][1].column}


def cost(defense: DefenseInfo) -> dict[str, Any]:
    """Return what one defense costs."""
    return {"defense": defense, "label": words.label(defense.name), "upload": defense.everyday}


def fast(report: Report) -> dict[str, Any] | None:
    """Return the fast score, one line per defense."""
    if report.fast is None:
        return None
    lines = [
        {"label": words.label(r.defense), "readable": _mean(r.readable), "each": r.readable, "bound": _mean(r.bound)}
        for r in report.fast.risks
    ]
    return {"lines": lines, "score": report.fast}


def _mean(values: Iterable[float]) -> float | None:
    finite = [v for v in values if math.isfinite(v)]
    return fmean(finite) if finite else None


def _or_low(value: float) -> float:
    return value if math.isfinite(value) else -1.0
