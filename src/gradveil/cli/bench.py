"""`gradveil bench`: speeds as ratios measured in one run. Each benchmark lives in a file of its own."""

import typer

from . import app

bench_app = typer.Typer(
    help="Measure speeds on this machine; every table has its baseline in the same run.", no_args_is_help=True
)
app.add_typer(bench_app, name="bench")
