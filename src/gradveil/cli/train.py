"""`gradveil train`: collaborative training under a defense, with accuracy, bytes and time."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..config import from_mapping, read_toml
from ..training.job import Job
from ..training.privacy import stated
from ..training.rounds import Round
from ..training.run import run
from ..training.settings import Settings
from . import app, err, out
from .options import with_options


@app.command()
@with_options(Settings)
def train(
    config: Annotated[Path | None, typer.Argument(help="TOML file.")] = None,
    folder: Annotated[Path | None, typer.Option("--out", "-o", help="The run's folder; by default in runs/.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the folder's checkpoint, if any.")] = False,
    minutes: Annotated[float | None, typer.Option(min=0, help="Stop after this long, with a checkpoint.")] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    **flags: Any,
) -> None:
    """Train collaboratively under a defense, and record accuracy, bytes and time.

    CONFIG is a TOML file with any of the options from --model on as keys (local_steps = 2); flags go before it, and it
    goes before the defaults, which are the DGP paper's. The folder gets settings.toml (as resolved), metrics.jsonl,
    checkpoint.safetensors and result.json. Run the same command with --resume to go on after a stop or a kill.
    """
    values = {**(read_toml(config) if config else {}), **{k: v for k, v in flags.items() if v is not None}}
    if isinstance(values.get("lr"), int | float):  # in TOML a single rate is a number
        values["lr"] = str(values["lr"])
    settings = from_mapping(values, Settings, str(config or "gradveil train"))
    folder = folder or Path("runs") / _name(settings)
    with Progress(*_columns(), console=err, disable=not progress, refresh_per_second=2) as bar:
        task = bar.add_task("preparing", total=None, news="")

        def show(job: Job, rounds: list[Round]) -> None:
            bar.update(task, description=settings.defense, total=job.rounds, completed=rounds[-1].index + 1)
            latest.update(_latest(rounds))
            bar.update(task, news=" ".join(latest[name] for name in ("loss", "accuracy", "bytes") if name in latest))

        latest: dict[str, str] = {}
        result = run(settings, folder, resume=resume, minutes=minutes, on_rounds=show)
    out.print(_table(result))
    out.print(f"{result['status']}: {folder / 'result.json'}", highlight=False, soft_wrap=True)
    if result["status"] == "diverged":
        raise typer.Exit(1)


def _name(settings: Settings) -> str:
    words = re.findall(r"[A-Za-z0-9.]+", f"{settings.model} {Path(settings.data).name} {settings.defense}")
    return f"{'-'.join(words)}-seed{settings.seed}"


def _columns() -> tuple[Any, ...]:
    """Return columns that fit into 80 characters: the defense's name is cut before any figure is."""
    return (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=8)),
        BarColumn(bar_width=4),
        MofNCompleteColumn(),
        TextColumn("{task.fields[news]}", table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, elapsed_when_finished=True),
    )


def _latest(rounds: list[Round]) -> dict[str, str]:
    """Return the newest loss, accuracy and bytes in a few rounds, as text."""
    news = {"loss": f"loss {rounds[-1].loss:.3f}"}
    for one in rounds:
        if one.accuracy is not None:
            news["accuracy"] = f"acc {100 * one.accuracy:.1f}%"
        if one.bytes_up is not None and one.bytes_down is not None:
            news["bytes"] = f"up {_size(one.bytes_up)} down {_size(one.bytes_down)}"
    return news


def _size(count: float | None) -> str:
    if count is None:
        return "-"
    return f"{count / 1024:.1f} KiB" if count < 1 << 20 else f"{count / (1 << 20):.2f} MiB"


def _table(result: dict[str, Any]) -> Table:
    mean = result["per_user_and_round"]
    table = Table("measure", "value", title=f"{result['settings']['model']} under {result['settings']['defense']}")
    accuracy = result["accuracy"]
    table.add_row("test accuracy", "-" if accuracy is None else f"{100 * accuracy:.2f} %")
    table.add_row("rounds", f"{result['rounds_done']} of {result['resolved']['rounds']}")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    table.add_row("bytes up, user and round", f"{_size(mean['bytes_up'])} (paper's count {_size(mean['paper_up'])})")
    table.add_row("bytes down", f"{_size(mean['bytes_down'])} (paper's count {_size(mean['paper_down'])})")
    if mean["residual_ratio"]:
        table.add_row("residual / gradient", f"{mean['residual_ratio']:.2f}, gamma {mean['gamma']:.3f} (means)")
    table.add_row("differential privacy", stated(result["privacy"]))
    if result["privacy"]["epsilon"] is not None:
        table.add_row("assumed of batches", result["privacy"]["sampling"])
        table.add_row("not covered", "; ".join(result["privacy"]["not_covered"]))
    return table
