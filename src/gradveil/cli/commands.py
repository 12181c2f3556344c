"""Imports every command module, which registers its commands; the order is the order of `--help`."""

import inspect

import typer

from . import (  # noqa: F401
    app,
    ats,
    attack,
    audit,
    basics,
    bench_attack,
    bench_codec,
    bench_protect,
    bench_select,
    bench_train,
    bench_wire,
    cost,
    flower,
    gate,
    generator,
    guard,
    leaderboard,
    reproduce,
    train,
    ui,
)


def flowing(text: str) -> str:
    """Return a docstring whose paragraphs fill any terminal: typer keeps the line breaks of all but the first.

    >>> flowing("Do it.\\n\\n    One line\\n    and the next.\\n\\n    - a list\\n    - stays")
    'Do it.\\n\\nOne line and the next.\\n\\n- a list\\n- stays'
    """
    parts = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(part if part.startswith((" ", "- ")) else part.replace("\n", " ") for part in parts)


def _flow(group: typer.Typer) -> None:
    for command in group.registered_commands:
        command.help = flowing(command.help or (command.callback and command.callback.__doc__) or "")
    for below in group.registered_groups:
        if below.typer_instance is not None:
            _flow(below.typer_instance)


_flow(app)
