"""`gradveil version` and `gradveil list`."""

import inspect
import platform

import torch
from rich.table import Table

from .. import __version__
from ..defenses import DEFENSES
from ..defenses.advice import ADVICE
from . import app, out


@app.command()
def version() -> None:
    """Print the versions of gradveil, Python and PyTorch, and whether a GPU is there."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    out.print(f"gradveil {__version__}  python {platform.python_version()}  torch {torch.__version__}  gpu {gpu}")


@app.command("list")
def list_() -> None:
    """List the defenses you can name on the command line or in a config, and which to take against what."""
    table = Table("defense", "what it does", "parameters", title="Defenses")
    for name, factory in DEFENSES.items():
        line = (inspect.getdoc(factory) or "").partition("\n")[0]
        params = ", ".join(str(p).replace("'", "") for p in inspect.signature(factory).parameters.values())
        table.add_row(name, line, params)
    out.print(table)
    advice = Table("threat", "defense", "beside it", title="Against what (docs/hardened.md)")
    for row in ADVICE:
        advice.add_row(*row)
    out.print(advice)
