"""`gradveil gate` and `gradveil doctor`: answers for scripts, as exit codes."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.table import Table

from ..audit import Report, words
from ..audit.doctor import Examination, examine
from ..audit.report import COLUMNS, Column
from ..audit.thresholds import Thresholds, failures
from ..defenses import DEFENSES
from ..spec import build, import_object, users_code
from . import app, err, out


@app.command()
def gate(
    report: Annotated[Path, typer.Argument(help="A report.json.")],
    defense: Annotated[list[str] | None, typer.Option(help="Which to gate; by default all but none.")] = None,
    require: Annotated[Literal["holds", "leaks", "incomplete"] | None, typer.Option(help="The verdict.")] = None,
    max_ssim: Annotated[float | None, typer.Option(help="Worst mean SSIM of any attack.")] = None,
    max_picture_ssim: Annotated[float | None, typer.Option(help="SSIM of the best recovered picture.")] = None,
    max_lead: Annotated[float | None, typer.Option(help="Worst mean SSIM minus a blind guess's.")] = None,
    max_bytes: Annotated[float | None, typer.Option(help="Bytes sent, share of the bare gradient.")] = None,
    min_accuracy: Annotated[float | None, typer.Option(help="Accuracy under the defense.")] = None,
    column: Annotated[Literal["diagnostic", "realistic"] | None, typer.Option(help="By default both.")] = None,
) -> None:
    """Exit with 0 if a report satisfies every limit, with 1 if not. Without limits: --require holds."""
    columns: tuple[Column, ...] = (column,) if column else COLUMNS
    limits = Thresholds(max_ssim, max_picture_ssim, max_lead, max_bytes, min_accuracy, require, columns)
    if limits == Thresholds(columns=columns):
        limits = Thresholds(require="holds", columns=columns)
    found = failures(Report.load(report), limits, defense or ())
    for line in found:
        err.print(f"[red]fails[/] {escape(line)}", highlight=False, soft_wrap=True)
    if found:
        raise typer.Exit(1)
    out.print("[green]passes[/]")


@app.command()
def doctor(
    source: Annotated[str, typer.Argument(help="A payload, a Veil's state file, or package.module:function.")],
    expect: Annotated[str | None, typer.Option(help="The defense that should be on, such as dgp.")] = None,
) -> None:
    """Look at what really left the process and say whether the defense is on; exit code 0 if it is, else 1.

    SOURCE is a file with the bytes of a payload or with a client's saved state, or a function that returns a Payload,
    its bytes or a Veil: call it from your own training code to look at a live client.
    """
    live = ":" in source and not Path(source).exists()
    expected = build(DEFENSES, expect, "defense") if expect else None
    given: Any = source
    if live:
        with users_code(source):
            given = import_object(source)()
    found = examine(given, expected)
    out.print(_table(found))
    for reason in found.reasons:
        out.print(words.printable(reason), markup=False, highlight=False)
    colour = {"on": "green", "off": "red", "unclear": "yellow"}[found.state]
    out.print(f"[bold {colour}]The defense is {found.state}.[/]")
    if found.state != "on":
        raise typer.Exit(1)


def _table(found: Examination) -> Table:
    residual = found.kind == "state"
    title = f"Residual, {found.round} uploads old" if residual else f"Payload, {found.nbytes} bytes"
    table = Table("tensor", "type", "entries", "not zero", "bytes", *(["norm"] if residual else []), title=title)
    for part in found.parts:
        norm = [words.number(part.norm, 4)] if residual else []
        table.add_row(
            escape(words.printable(part.name)),
            part.dtype,
            f"{part.entries:,}",
            words.percent(part.share),
            f"{part.nbytes:,}",
            *norm,
        )
    return table
