"""`gradveil attack`: one attack on one defense, with pictures to look at."""

import math
import time
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any

import torch
import typer
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from .. import metrics
from ..attacks.progress import Progress as Step
from ..attacks.progress import watch
from ..config import from_mapping
from ..record import environment, write_json
from ..veil import derive_rng
from . import app, err, out
from .attack_job import AttackJob, AttackSettings, describe, load_part, save_part
from .options import with_options

PER_ROW = 10  # pairs of pictures side by side in the PNG
PUBLIC = 1000  # public pictures used at most
SIDE = 96  # pixels of a picture in it, about


@app.command()
@with_options(AttackSettings)
def attack(
    folder: Annotated[Path, typer.Option("--out", "-o", help="Where pictures and scores go.")] = Path("attack"),
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
    **flags: Any,
) -> None:
    """Reconstruct private pictures from what clients upload, and score the result against blind guesses.

    The folder gets pictures.png (originals above, reconstructions below) and scores.json. The same command goes on
    where it was stopped.
    """
    given = {name: value for name, value in flags.items() if value is not None}
    job = AttackJob(from_mapping(given, AttackSettings, "gradveil attack"))
    rows, guesses, seconds = [], [], 0.0
    with Progress(*_columns(), console=err, disable=not progress, refresh_per_second=4) as bar:
        for uploads in job.parts():
            part = load_part(folder, job, uploads)
            if part is None:
                started = time.perf_counter()
                found = _watched(job, uploads, bar)
                save_part(folder, job, uploads, found, time.perf_counter() - started)
                part = load_part(folder, job, uploads)
            if part is not None:
                rows += part[0]["rows"]
                seconds += part[0]["seconds"]
                guesses.append(part[1])
    _finish(folder, job, rows, torch.cat(guesses), seconds)


def _columns() -> tuple[Any, ...]:
    loss = TextColumn("loss {task.fields[loss]}")
    return TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), loss, TimeRemainingColumn()


def _watched(job: AttackJob, uploads: list[int], bar: Progress) -> Any:
    name = f"uploads {uploads[0] + 1} to {uploads[-1] + 1}"
    task = bar.add_task(name, total=None, loss="-")

    def show(step: Step) -> None:
        bar.update(task, completed=step.step, total=step.total, loss=f"{step.loss:.2e}")

    with watch(show, every=20):
        return job.run(uploads)


def _finish(folder: Path, job: AttackJob, rows: list[dict[str, Any]], guesses: Tensor, seconds: float) -> None:
    truths = torch.cat([job.truth(row["upload"]).inputs for row in rows])
    columns = {name: [v for row in rows for v in row["scores"][name]] for name in rows[0]["scores"]}
    floor = blind(job, [row["upload"] for row in rows])
    paint(truths, guesses).save(folder / "pictures.png")
    facts = {**describe(job), "bytes_up": fmean(row["bytes_up"] for row in rows), "seconds": seconds}
    result = {**facts, "scores": columns, "floor": floor, "rows": rows, "environment": environment()}
    write_json(folder / "scores.json", result)
    out.print(_table(job, columns, floor))
    out.print(f"{folder / 'pictures.png'} and {folder / 'scores.json'}; {seconds:.0f} s", highlight=False)


def blind(job: AttackJob, uploads: list[int]) -> dict[str, dict[str, list[float]]]:
    """Return what blind guesses score, upload by upload like the attack: across uploads they would be paired better."""
    public = job.public.pixels(range(min(len(job.public), PUBLIC)))
    cards = [
        metrics.score_floor(
            job.truth(upload).inputs, public, derive_rng(job.settings.seed, "floor", upload), gallery=job.line_up
        )
        for upload in uploads
    ]
    for card, upload, guess in zip(cards, uploads, job.run_blind(uploads), strict=False):
        card["label alone"] = job.score(upload, guess)[1]
    return {
        guess: {name: [v for card in cards for v in card[guess][name]] for name in scores}
        for guess, scores in cards[0].items()
    }


def _table(job: AttackJob, columns: dict[str, list[float]], floor: dict[str, dict[str, list[float]]]) -> Table:
    s = job.settings
    names = [name for name in columns if name != "rank"]  # which means little: "identified" says how often it is 1
    title = f"{s.attack} on {s.model}, {s.data}, defense {s.defense}; {s.pictures} pictures, mean and spread"
    table = Table("", *names, title=title)
    table.add_row("attack", *(_mean(columns[name]) for name in names))
    for guess, scores in floor.items():
        table.add_row(
            f"blind: {guess}", *(_mean(scores[name]) if name in scores else "-" for name in names), style="dim"
        )
    return table


def _mean(values: list[float]) -> str:
    return f"{fmean(values):.3f} ± {pstdev(values):.3f}"


def paint(truths: Tensor, guesses: Tensor) -> Image.Image:
    """Return originals with their reconstructions below them, several pairs in a row, enlarged to be seen."""
    count, channels, height, width = truths.shape
    across = min(count, PER_ROW)
    lines = math.ceil(count / across)
    canvas = torch.ones(channels, lines * (2 * height + 2), across * (width + 1))
    for i in range(count):
        top, left = (i // across) * (2 * height + 2), (i % across) * (width + 1)
        canvas[:, top : top + height, left : left + width] = truths[i]
        canvas[:, top + height : top + 2 * height, left : left + width] = guesses[i]
    pixels = (canvas.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).expand(-1, -1, 3).contiguous()
    image = Image.fromarray(pixels.numpy())
    factor = max(SIDE // width, 1)
    return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
