"""`gradveil leaderboard`: check cards, make one from recorded results, render the page."""

import difflib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from .. import record
from ..errors import ConfigError
from ..reproduce import SCALES, board, cards, entries, own_cards
from . import app, out

group = typer.Typer(no_args_is_help=True, help="What each defense withstands: cards and the page made of them.")
app.add_typer(group, name="leaderboard")

Folder = Annotated[Path, typer.Option("--results", help="The folder of recorded results.")]


@group.command()
def check(
    files: Annotated[list[Path], typer.Argument(help="Cards.")],
    folder: Folder = Path("results"),
) -> None:
    """Say what is wrong with cards, alone and beside those in results/cards/; exit code 1 if anything is."""
    found = {path.resolve(): cards.read(path) for path in (*files, *sorted((folder / "cards").glob("*.json")))}
    together = cards.problems_together(found, folder if folder.is_dir() else None, datetime.now(UTC).date())
    for path in files:
        wrong = together[path.resolve()]
        _say(f"{path}: {'not valid' if wrong else 'valid'}")
        for text in wrong:
            _say(f"  {text}")
    if not folder.is_dir():
        _say(f"there is no folder {folder}: nobody looked for evidence in results/, nor for other cards (--results)")
    if any(together[path.resolve()] for path in files):
        raise typer.Exit(1)


def _say(text: str) -> None:
    out.print(text, markup=False, highlight=False, soft_wrap=True)


@group.command()
def card(
    defense: Annotated[str, typer.Argument(help="A defense as the tables call it, such as dgp.")],
    folder: Folder = Path("results"),
) -> None:
    """Make a defense's card from the recorded full-scale results: the strongest adaptive attack of each kind."""
    known = {entry.cell.defense: entry for entry in entries("all", SCALES["full"])}
    if defense not in known and f"{defense}1" not in known:  # the name without its number stands for both
        near = difflib.get_close_matches(defense, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"no table has a defense {defense!r}: {hint}Known: {', '.join(sorted(known))}")
    path = folder / "cards" / f"{defense}.json"
    made = own_cards.make(defense, folder)
    if wrong := cards.problems(made):
        raise ConfigError(f"the recorded results do not make a card of {defense} yet: " + "; ".join(wrong))
    record.write_json(path, made)
    out.print(f"wrote {path}", markup=False, highlight=False)


@group.command()
def draft(
    name: Annotated[str, typer.Argument(help="What the card calls your defense: letters, digits, - and _.")],
    runs: Annotated[list[Path], typer.Argument(help="Folders that gradveil attack wrote, of one defense.")],
    by: Annotated[str, typer.Option(help="Who you are.")],
    source: Annotated[str, typer.Option(help="Where the defense's code is.")],
    folder: Folder = Path("results"),
) -> None:
    """Make the card of your own defense from runs of `gradveil attack`, and keep their scores beside it as evidence.

    Scores go to results/submitted/NAME/; pictures stay where they are.
    """
    if not re.fullmatch(r"[\w-]+", name):
        raise ConfigError(f"a name has letters, digits, - and _ only, since files are called by it; got {name!r}")
    path, kept = folder / "cards" / f"{name}.json", folder / "submitted" / name
    if path.exists():
        raise ConfigError(f"{path} is there already: choose another name, or delete that card if it is yours")
    found = {run.resolve().name: cards.read(run / "scores.json") for run in runs}
    if len(found) < len(runs):
        raise ConfigError("the folders of the runs must have different names, since their scores are kept by them")
    evidence = {f"{cards.OURS}submitted/{name}/{run}.json": scores for run, scores in found.items()}
    made = own_cards.draft(name, evidence, by, source)
    if wrong := cards.problems(made, datetime.now(UTC).date()):
        raise ConfigError("these runs do not make a card: " + "; ".join(wrong))
    for run, scores in found.items():
        record.write_json(kept / f"{run}.json", scores)
    record.write_json(path, made)
    _say(f"wrote {path} and its evidence in {kept}")


@group.command()
def render(
    folder: Folder = Path("results"),
    page: Annotated[Path, typer.Option(help="The page.")] = Path("docs/leaderboard.md"),
) -> None:
    """Write docs/leaderboard.md from results/cards/."""
    page.write_text(board.render(folder), encoding="utf-8")
    out.print(f"wrote {page}", markup=False, highlight=False)
