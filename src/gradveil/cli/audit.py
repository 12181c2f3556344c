"""`gradveil audit`, `init`, `report` and `compare`."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from ..audit import Audit, Event, Plan, Report, subject, summary, to_html, to_markdown, words, write
from ..audit.compare import compare_reports, settings_changed
from ..audit.plan import DEFAULT_ATTACKS, DEFAULT_DEFENSES, Scope
from ..audit.report import COLUMNS
from ..audit.spread import spread
from ..config import from_mapping, read_toml
from ..errors import ConfigError
from . import app, err, out
from .options import with_options

Repeat = Annotated[list[str] | None, typer.Option(help="May be repeated; name=... gives it a name in the report.")]
OF_THE_RUN = ("model", "weights", "data", "size", "mean", "std")  # settings a checkpoint settles
STYLES = {"leaks": "red", "holds": "green", "incomplete": "yellow"}


@app.command()
@with_options(Scope)
def audit(
    config: Annotated[Path | None, typer.Argument(help="TOML file; `gradveil init` writes one.")] = None,
    defense: Repeat = None,
    attack: Repeat = None,
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where the report goes.")] = Path("audit-report"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the audit in that folder.")] = False,
    progress: Annotated[bool, typer.Option(help="Show progress bars.")] = True,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that attack at the same time.")] = 1,
    ray: Annotated[str | None, typer.Option(help="Attack on a Ray cluster: its address, or `auto`.")] = None,
    **flags: Any,
) -> None:
    """Attack what a client would send under each defense, and write a report.

    Without arguments: bundled photos, a small model, the usual defenses, a naive, a mask-aware and a coarse attacker;
    no data and no download needed. For CIFAR-10, or with --generator, one that searches a generator as well: it finds
    most under noise. A flag wins over CONFIG, and CONFIG over the defaults. The folder gets report.json
    (the truth), report.html (one page that needs nothing else) and report.md (for a pull request). Ctrl-C keeps what
    is done. DGP and ADGP, as published, do not withstand an attacker who compares only the entries that arrived.
    """
    plan = _plan(config, {**flags, "defenses": defense or None, "attacks": attack or None})
    before = Report.load(folder / "report.json") if resume else None
    found = subject(plan)
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(*_columns(), console=err, disable=not progress, refresh_per_second=4) as bar:
        tell = _bars(bar)
        if jobs > 1 or ray is not None:
            count = lambda done, total: tell(Event("attacking", done, total))  # noqa: E731
            before = spread(plan, found, folder / "jobs", workers=jobs, ray=ray, tell=count)
        running = Audit(plan, found, tell=tell, save=lambda r: r.save(folder / "report.json"), before=before)
        try:
            report = running.run()
        except KeyboardInterrupt:
            write(running.report, folder)
            bar.stop()
            err.print(f"stopped; what is done is in {folder}, and --resume goes on", highlight=False)
            raise
    page = write(report, folder)
    out.print(_table(report))
    out.print(summary.headline(report), style="bold", markup=False)
    for item in summary.advice(report):
        out.print(f"- {item}", markup=False, highlight=False)
    out.print(f"The report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True)
    if any(row.status == "failed" for row in report.rows):
        err.print("[red]an attack failed[/]: the report says how")
        raise typer.Exit(1)


def _plan(config: Path | None, flags: dict[str, Any]) -> Plan:
    """Return what the configuration and the flags say, of which those not given are None."""
    settled = [f"--{name.replace('_', '-')}" for name in OF_THE_RUN if flags[name] is not None]
    if flags["checkpoint"] and settled:
        raise ConfigError(f"the checkpoint settles the model, its weights and the data: leave out {', '.join(settled)}")
    values = {**(read_toml(config) if config else {}), **{k: v for k, v in flags.items() if v is not None}}
    return from_mapping(values, Plan, str(config or "gradveil audit"))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("audit.toml"),
    force: Annotated[bool, typer.Option("--force", help="Write over an existing file.")] = False,
) -> None:
    """Write a commented configuration for `gradveil audit`."""
    if path.exists() and not force:
        raise ConfigError(f"{path} exists: choose another name or give --force")
    path.write_text(template(), encoding="utf-8")
    out.print(f"wrote {path}; edit it, then: gradveil audit {path}", highlight=False, markup=False)


def template() -> str:
    """Return a configuration with every setting at its default, each under its explanation."""
    lines = ["# An audit of gradveil. Every line shows its default; change what you need.", ""]
    shown = {"defenses": DEFAULT_DEFENSES, "attacks": DEFAULT_ATTACKS}
    for f in fields(Plan):
        value = shown.get(f.name, f.default)
        text = json.dumps(value) if not isinstance(value, tuple) else json.dumps(value, indent=2)
        lines += [f"# {f.metadata['help']}", f"{f.name} = {text}", ""]
    return "\n".join(lines)


@app.command()
def report(
    file: Annotated[Path, typer.Argument(help="A report.json.")],
    page: Annotated[Path | None, typer.Option("--out", "-o", help="The page; by default beside the file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown instead.")] = False,
) -> None:
    """Render a report again, from its JSON."""
    found = Report.load(file)
    if markdown:
        typer.echo(to_markdown(found), nl=False)
        return
    page = page or file.with_suffix(".html")
    page.write_text(to_html(found), encoding="utf-8")
    out.print(f"The report: {page.resolve().as_uri()}", highlight=False, soft_wrap=True)


@app.command()
def compare(
    before: Annotated[Path, typer.Argument(help="The older report.json.")],
    after: Annotated[Path, typer.Argument(help="The newer one.")],
) -> None:
    """Show what changed between two reports; exit code 1 if a defense got worse."""
    old, new = Report.load(before), Report.load(after)
    table = Table("defense", "", "where", "verdict before", "after", "worst SSIM before", "after")
    changes = compare_reports(old, new)
    colours = {"worse": "red", "better": "green"}
    for change in changes:
        verdicts = [j.verdict if j else "–" for j in (change.before, change.after)]
        scores = [words.number(j.worst if j else None) for j in (change.before, change.after)]
        kind = f"[{colours[change.kind]}]{change.kind}[/]" if change.kind in colours else change.kind
        either = change.after or change.before
        where = either.column if either and either.column else "overall"
        table.add_row(escape(change.defense), kind, where, *verdicts, *scores)
    out.print(table)
    for key, (a, b) in settings_changed(old, new).items():
        out.print(f"setting {key}: {a!r} before, {b!r} after", markup=False, highlight=False)
    if any(change.kind == "worse" for change in changes):
        raise typer.Exit(1)


def _columns() -> tuple[Any, ...]:
    return (TextColumn("{task.fields[left]:>10}"), BarColumn(bar_width=30), TextColumn("{task.description}"))


def _bars(bar: Progress) -> Any:
    """Return a listener that moves one bar for the whole audit and one for the attack that runs."""
    whole = bar.add_task("audit", total=1.0, left="")
    part = bar.add_task("", total=1.0, left="")

    def tell(event: Event) -> None:
        share = event.step / event.steps if event.steps else 0.0
        left = "" if event.seconds_left is None else f"{words.duration(event.seconds_left)} left"
        done = (event.done + share) / event.total
        bar.update(whole, completed=done, description=f"{event.done} of {event.total} attacks", left=left)
        own = "" if event.attack_seconds_left is None else f"{words.duration(event.attack_seconds_left)} left"
        steps = f", {event.step} of {event.steps} steps" if event.steps else ""
        bar.update(part, completed=share, description=escape(event.stage + steps), left=own)

    return tell


def _table(report: Report) -> Table:
    heads = ("defense", "verdict", *(f"{c}: worst SSIM (blind)" for c in COLUMNS), "bytes", "accuracy")
    table = Table(*(Column(head, overflow="fold") for head in heads))
    for defense in report.defenses:
        verdict = report.judgement(defense.name).verdict
        parts = [report.judgement(defense.name, column) for column in COLUMNS]
        scores = [f"{words.number(p.worst)} ({words.number(p.floor)}) {escape(p.worst_attack or '')}" for p in parts]
        upload = defense.everyday
        share = words.percent(upload.bytes_sent / upload.bytes_dense) if upload else "–"
        name = escape(words.label(defense.name))
        table.add_row(name, f"[{STYLES[verdict]}]{verdict}[/]", *scores, share, words.percent(defense.accuracy))
    return table
