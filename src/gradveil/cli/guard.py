"""`gradveil guard`: look at a model as a client's guard would."""

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..errors import ConfigError
from ..guard import Guard
from ..models import build
from . import app, out


@app.command()
def guard(
    model: Annotated[str, typer.Argument(help="lenet, cnn6, vgg11, resnet18, mlp, or package.module:factory.")],
    weights: Annotated[Path | None, typer.Option(help="The weights that arrived: a safetensors file.")] = None,
    classes: Annotated[int, typer.Option(help="Number of outputs.")] = 10,
    shape: Annotated[str, typer.Option(help="Shape of one input.")] = "3,32,32",
) -> None:
    """Say what in a model looks planted to read pictures out of gradients; exit code 0 if nothing does, else 1.

    The weights must fit MODEL, your own definition: a file with other tensors is refused as another structure.
    """
    try:
        input_shape = tuple(int(part) for part in shape.split(","))
    except ValueError:
        raise ConfigError(f"shape must look like 3,32,32, got {shape!r}") from None
    net = build(model, num_classes=classes, input_shape=input_shape)
    if weights is not None:
        _load(net, weights)
    findings = Guard().inspect(net, input_shape=input_shape)
    for finding in findings:
        out.print(f"[red]{escape(finding.layer)}[/]: {escape(finding.reason)}", highlight=False, soft_wrap=True)
    if findings:
        out.print("[bold red]The guard would refuse this model.[/]")
        raise typer.Exit(1)
    out.print("[green]Nothing looks planted.[/] What the guard cannot see is in docs/guard.md.", highlight=False)


def _load(net: nn.Module, weights: Path) -> None:
    try:
        net.load_state_dict(load_file(weights))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{weights} does not hold the weights of this model: {error}") from error
