"""Report to HTML and Markdown. Both are pure functions; the HTML needs nothing but itself."""

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, select_autoescape

from . import summary, view, words
from .report import COLUMNS, Report


@cache
def asset(name: str) -> str:
    """Return a file of the `templates` folder."""
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


@cache
def environment() -> Environment:
    """Return the template environment: every value is escaped, a missing one is an error."""
    env = Environment(
        loader=FunctionLoader(asset),
        autoescape=select_autoescape(enabled_extensions=("html", "j2"), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "number": words.number,
        "percent": words.percent,
        "size": words.size,
        "duration": words.duration,
        "label": words.label,
    }
    env.globals |= {
        "metric_words": words.METRIC_WORDS,
        "guess_words": words.GUESS_WORDS,
        "column_names": words.COLUMN_NAMES,
    }
    return env


def policy(script: str) -> str:
    """Return a content security policy that runs this script, no other, and fetches nothing."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )


def to_html(report: Report) -> str:
    """Return one self-contained page."""
    script = asset("report.js")
    values: dict[str, Any] = {"style": asset("report.css"), "script": script, "policy": policy(script)}
    return environment().get_template("report.html.j2").render(**view.build(report), **values)


def to_markdown(report: Report) -> str:
    """Return a short text for a pull request."""
    leaks = summary.what_leaks(report)
    lines = [f"### {_md(summary.headline(report))}", "", *([_md(leaks), ""] if leaks else [])]
    lines += [*(f"- {_md(item)}" for item in summary.advice(report)), ""]
    lines += [
        "| defense | verdict | worst case | everyday case | blind guess | bytes sent |",
        "|---|---|---|---|---|---|",
    ]
    for defense in report.defenses:
        parts = [report.judgement(defense.name, column) for column in COLUMNS]
        upload = defense.everyday
        sent = words.percent(upload.bytes_sent / upload.bytes_dense) if upload else "–"
        cells = [f"{words.number(p.worst)} ({_md(p.worst_attack or '–')})" for p in parts]
        verdict = report.judgement(defense.name).verdict
        floor = " / ".join(words.number(p.floor) for p in parts)
        lines.append(
            f"| {_md(words.label(defense.name))} | **{verdict}** | {cells[0]} | {cells[1]} | {floor} | {sent} |"
        )
    lines += ["", _md(summary.method(report))]
    lines += ["Scores are the mean SSIM of the strongest attack (1 = identical). Worst case: one picture, labels"]
    lines += ["known. Everyday case: the client's batch size, labels unknown, a used residual.", ""]
    for kind, items in (("Cut", report.cut), ("Note", report.notes)):
        lines += [f"- {kind}: {_md(item)}" for item in items]
    lines += [f"- {_md(f.title)}: {_md(f.remedy)}" for f in report.findings]
    return "\n".join(lines).rstrip() + "\n"


def _md(text: str) -> str:
    """Return text that cannot end a table cell or start markup."""
    safe = text.replace("\\", "\\\\").replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    for mark in "|`*_[]":
        safe = safe.replace(mark, f"\\{mark}")
    return " ".join(safe.split())
