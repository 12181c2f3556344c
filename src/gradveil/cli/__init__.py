"""The command line: the only place that prints. Each command lives in a file of its own."""

import os
import sys
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from ..defenses.advice import WARNING
from ..errors import GradveilError
from .heap import keep_freed_memory

app = typer.Typer(
    name="gradveil",
    help="Protect shared gradients, attack them to see what they give away, and report it.\n\n"
    f"DGP {WARNING}: use the defense [bold]hardened[/bold].",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
out = Console()
err = Console(stderr=True)


def main() -> None:
    """Run the command line; an error the user can mend is one line and exit code 2."""
    from . import commands  # noqa: F401  (registers every command on `app`)

    keep_freed_memory()
    sys.path.insert(0, os.getcwd())  # so that package.module:name finds what lies beside the user

    try:
        app()
    except OSError as error:
        where = f" ({error.filename}: check the path and its permissions)" if error.filename else ""
        _refuse(f"{error.strerror or error}{where}")
    except (GradveilError, ValueError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        err.print("[bold red]gradveil:[/] stopped")
        sys.exit(130)


def _refuse(message: str) -> NoReturn:
    # Escaped, because the message may hold the user's text, or brackets such as those of 'gradveil[ui]'.
    err.print(f"[bold red]gradveil:[/] {escape(message)}", highlight=False, soft_wrap=True)
    sys.exit(2)
