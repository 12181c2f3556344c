"""`gradveil leaderboard`: check cards, make one from recorded results, render the page."""

import difflib
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
def render(
    folder: Folder = Path("results"),
    page: Annotated[Path, typer.Option(help="The page.")] = Path("docs/leaderboard.md"),
) -> None:
    """Write docs/leaderboard.md from results/cards/."""
    page.write_text(board.render(folder), encoding="utf-8")
    out.print(f"wrote {page}", markup=False, highlight=False)
