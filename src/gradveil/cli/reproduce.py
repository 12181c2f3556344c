"""`gradveil reproduce`: the paper table by table, and the pages made of what came out."""

import os
import tempfile
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .. import record
from ..errors import ConfigError
from ..metrics.perceptual import lpips_weights
from ..reproduce import NAMES, SCALES, Outcome, Session, run
from ..reproduce.cells import AttackCell, key
from ..reproduce.pages import PLOTS, plot_names, plots_of, render_table
from ..reproduce.pages import render as make_page
from ..reproduce.scales import Scale
from ..reproduce.tables import TABLES
from ..reproduce.view import page as make_view
from ..reproduce.weights import RUNS
from ..training.job import pick_device
from . import app, err, out

group = typer.Typer(
    no_args_is_help=True, help="Run the tables of the DGP paper and compare; `render` writes docs/results.md."
)
app.add_typer(group, name="reproduce")

Folder = Annotated[Path, typer.Option("--out", "-o", help="Where results lie; what is there is not run again.")]
Root = Annotated[str | None, typer.Option(help="Where the dataset's files lie.")]
Rounds = Annotated[int | None, typer.Option(min=0, help="Attack after so many earlier rounds of error feedback.")]
Labels = Annotated[str | None, typer.Option(help="given to the attacker, or inferred by it.")]
Mode = Annotated[str | None, typer.Option(help="eval or train: the clients' BatchNorm.")]
ScaleName = Annotated[str, typer.Option("--scale", help="quick: minutes on a CPU. full: the paper's, on a GPU.")]
STOPPED = (
    "stopped: the same command goes on; a search (IG, GI) from its last half minute, a training from its last "
    "checkpoint, what else was under way from the start of its cell"
)
STYLES = {
    "done": "green",
    "recorded": "dim",
    "untrained": "yellow",
    "failed": "red",
    "no time": "yellow",
    "no data": "yellow",
    "impossible": "yellow",
}


def _command(name: str) -> None:
    text = "Every table and figure, the most telling cells first." if name == "all" else TABLES[name].__doc__

    @group.command(name, help=text)
    def reproduce(
        scale: ScaleName = "quick",
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, or auto.")] = "auto",
        root: Root = None,
        seeds: Annotated[str, typer.Option(help="Seeds, such as 0,1,2.")] = "0",
        folder: Folder = Path("results"),
        minutes: Annotated[float | None, typer.Option(min=0, help="Stop cleanly after this long.")] = None,
        cells: Annotated[str, typer.Option(help="Only cells whose name matches, such as 'ig*_dgp_*,rob*'.")] = "*",
        train: Annotated[bool, typer.Option("--train", help="Full scale: also run the missing training runs.")] = False,
        since: Annotated[
            datetime | None,
            typer.Option(
                formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M"], help="Run attacks and costs recorded before (UTC) again."
            ),
        ] = None,
        rounds: Rounds = None,
        labels: Labels = None,
        mode: Mode = None,
        dry: Annotated[bool, typer.Option("--dry", help="Only list the cells.")] = False,
    ) -> None:
        pick_device(device)  # a device that is not there is one line, not a failure of each cell
        numbers = _numbers(seeds)
        session = Session(
            scale=_with_switches(scale, rounds=rounds, labels=labels, mode=mode),
            folder=folder,
            root=root,
            device=device,
            minutes=0.0 if dry else minutes,
            train=train,
            since=since and since.replace(tzinfo=UTC),
            command=record.command(),
        )
        if not dry:
            _must_be_writable(folder / scale)
        out.print(f"{name}, {session.scale.explained}", markup=False, highlight=False)
        try:
            outcomes = run(name, session, seeds=numbers, pattern=cells, tell=_list if dry else _tell)
        except KeyboardInterrupt:
            err.print(STOPPED, highlight=False, soft_wrap=True)
            raise
        if not outcomes:
            raise ValueError(f"no cell of {name} matches {cells!r}: --dry lists them")
        count = {status: sum(o.status == status for o in outcomes) for status in STYLES}
        words = {"no time": "to do"} if dry else {}
        summary = ", ".join(f"{number} {words.get(status, status)}" for status, number in count.items() if number)
        out.print(f"{summary}; {session.scale.name} scale, in {folder / session.scale.name}")
        if count["no time"] and not dry:
            out.print("the same command goes on where this one stopped")
        if count["untrained"]:
            out.print("missing trainings are run here with --train, or alone by the commands above")
        if any(o.status == "done" and isinstance(o.cell, AttackCell) for o in outcomes):
            _say_if_lpips_is_missing()
        if not dry:
            switched = [f"{word}-{value}" for word, value in session.scale.switches.items()]
            place = RUNS if folder.resolve() == Path("results").resolve() else folder
            page = place / ("-".join([name, scale, *switched]) + ".md")
            page.parent.mkdir(parents=True, exist_ok=True)
            strips = os.path.relpath(folder / scale, page.parent)
            page.write_text(render_table(name, session.scale, folder, strips), encoding="utf-8")
            if name in ("figures", "all"):
                _write_plots(folder, scale, page.parent, plot_names(scale))
            out.print(f"the table, the paper's values beside ours: {page}", highlight=False, soft_wrap=True)
        # A run that found no data must not look like one that worked.
        if count["failed"] or (count["no data"] and not count["done"] + count["recorded"]):
            raise typer.Exit(1)


for _name in NAMES:
    _command(_name)


@group.command()
def view(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(NAMES)}.")],
    scale: ScaleName = "quick",
    root: Root = None,
    folder: Folder = Path("results"),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("runs/reproduce/view.html"),
    rounds: Rounds = None,
    labels: Labels = None,
    mode: Mode = None,
) -> None:
    """Show reconstructions beside the originals, which come from your own copy of the data."""
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    text = make_view(name, _with_switches(scale, rounds=rounds, labels=labels, mode=mode), folder, root)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    out.print(f"The page: {page.resolve().as_uri()}", highlight=False, soft_wrap=True)


@group.command()
def render(
    folder: Folder = Path("results"),
    page: Annotated[Path, typer.Option(help="The page to write.")] = Path("docs/results.md"),
) -> None:
    """Write docs/results.md, and the plots beside it, from the recorded results."""
    text = make_page(folder)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    _write_plots(folder, "full", page.parent, PLOTS)
    out.print(f"wrote {page}", markup=False, highlight=False)


def _must_be_writable(place: Path) -> None:
    """Refuse before anything runs: a result that cannot be written is noticed only once it has been computed."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ConfigError(
            f"results cannot be written to {place} ({error.strerror}): name a folder of your own with --out"
        ) from error


def _write_plots(folder: Path, scale: str, place: Path, names: dict[str, str]) -> None:
    for name, png in plots_of(folder, scale, names).items():
        (place / name).write_bytes(png)


def _tell(outcome: Outcome, done: int, total: int) -> None:
    if outcome.status == "no time" and not outcome.note:
        return  # the summary counts them
    style = STYLES[outcome.status]
    took = f" {outcome.seconds:.1f} s" if outcome.seconds else ""
    line = f"{done:>3}/{total} [{style}]{outcome.status}[/]{took}  {escape(key(outcome.cell))}"
    if outcome.note:
        line += f"  [dim]{escape(outcome.note)}[/]"
    (err if outcome.status == "failed" else out).print(line, highlight=False, soft_wrap=True)


def _say_if_lpips_is_missing() -> None:
    try:
        lpips_weights()
    except ConfigError as error:
        out.print(f"the LPIPS columns are empty: {error}", markup=False, highlight=False, soft_wrap=True)


def _list(outcome: Outcome, done: int, total: int) -> None:
    status = "to do" if outcome.status == "no time" else outcome.status
    out.print(f"{done:>3}/{total} {status:<9} {key(outcome.cell)}", markup=False, highlight=False, soft_wrap=True)


def _with_switches(scale: str, **switches: Any) -> Scale:
    return replace(SCALES[_known(scale)], switches={word: v for word, v in switches.items() if v is not None})


def _known(scale: str) -> str:
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(SCALES)}, got {scale!r}")
    return scale


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"seeds must look like 0 or 0,1,2, got {text!r}") from None
