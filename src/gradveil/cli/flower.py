"""`gradveil flower`: start a Flower app, and make the certificates and keys of its deployment."""

from pathlib import Path
from typing import Annotated

import typer

from ..engines.flower_new import write_app, write_keys
from . import app, out

flower_app = typer.Typer(help="Start a Flower app whose updates are protected.", no_args_is_help=True)
app.add_typer(flower_app, name="flower")


@flower_app.command()
def new(folder: Annotated[Path, typer.Argument(help="A new folder; the app takes its name.")]) -> None:
    """Write a complete app: model and data to edit, client, server, configuration, deployment."""
    for path in write_app(folder):
        out.print(path, highlight=False)
    out.print(f"\nEdit the model, the data and the defense in task.py, then:  flwr run {folder} local --stream")


@flower_app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="A new folder for the keys.")],
    host: Annotated[str, typer.Option(help="Name or address under which nodes reach the server.")] = "127.0.0.1",
    nodes: Annotated[int, typer.Option(help="How many nodes get a key.")] = 2,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 365,
) -> None:
    """Make a certificate authority, the server's certificate and one key pair for each node."""
    for path in write_keys(folder, host, nodes, days):
        out.print(path, highlight=False)
    out.print("\nA node needs ca.crt and its own node-N, the server everything else. Keep all of it secret.")
