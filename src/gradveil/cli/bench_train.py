"""`gradveil bench train` and `gradveil bench round`: how fast collaborative training runs, against what."""

import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from safetensors.torch import load_file

from ..errors import ConfigError
from ..record import command, environment, write_json
from ..training import FastTrainer, Settings, Trainer, assemble
from . import out
from .bench import bench_app

JsonOut = Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")]
APP = """
[project]
name = "benchapp"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "gradveil"
[tool.flwr.app.components]
serverapp = "benchapp.apps:server_app"
clientapp = "benchapp.apps:client_app"
[tool.flwr.app.config]
folder = ""
"""
COMPONENTS = """
from gradveil.cli import flower_job
client_app = flower_job.client_app
server_app = flower_job.server_app
"""


@bench_app.command("train")
def bench_train(
    rounds: Annotated[int, typer.Option(help="Rounds of our engines; the first is not timed.")] = 100,
    flower_rounds: Annotated[
        int, typer.Option(help="Rounds of Flower; the first, with Ray's start, is not timed.")
    ] = 10,
    model: Annotated[str, typer.Option(help="Any model.")] = "lenet",
    data: Annotated[str, typer.Option(help="Any dataset.")] = "digits",
    json_out: JsonOut = None,
) -> None:
    """Rounds per second of plain FedSGD, 10 users x batch 32, on the CPU: ours against Flower's simulation.

    Both draw the same batches from the same start, so after the same rounds the weights must agree; the largest
    difference is printed. Needs the extra `flower`.
    """
    job = Settings(model=model, data=data, defense="none", device="cpu", eval_every=10**6, rounds=rounds)
    engines = [(engine, defense) for engine in (Trainer, FastTrainer) for defense in ("none", "dgp")]
    before = [_rounds_per_second(engine, replace(job, defense=defense)) for engine, defense in engines]
    with tempfile.TemporaryDirectory() as folder:
        flower, weights = _flower(replace(job, rounds=flower_rounds), Path(folder))
    after = [_rounds_per_second(engine, replace(job, defense=defense)) for engine, defense in engines]
    check = Trainer(assemble(replace(job, rounds=flower_rounds)))
    list(check)
    difference = max(float((t - weights[name]).abs().max()) for name, t in check.model.state_dict().items())
    # The load of the machine drifts: the mean of a run before Flower's and one after it stands for the time between.
    ours = {f"{e.__name__}, {d}": (b + a) / 2 for (e, d), b, a in zip(engines, before, after, strict=True)}
    rates = {"Flower simulation": flower, **ours}
    table = Table(
        "engine", "rounds per second", "x Flower", title=f"{model} on {data}, {torch.get_num_threads()} threads"
    )
    for name, rate in rates.items():
        table.add_row(name, f"{rate:.2f}", f"{rate / flower:.1f}")
    out.print(table)
    out.print(f"largest difference of a weight after {flower_rounds} rounds: {difference:.1e}")
    if json_out:
        figures = {"rounds_per_second": rates, "largest_difference": difference, "settings": asdict(job)}
        figures["load_average"] = os.getloadavg()
        write_json(json_out, {**figures, "command": command(), "environment": environment()})


def _rounds_per_second(engine: Any, settings: Settings) -> float:
    trainer = engine(assemble(settings))
    done = len(trainer.advance())  # compiles, warms up
    started = time.perf_counter()
    count = len(list(trainer))
    assert done + count == settings.rounds
    return count / (time.perf_counter() - started)


def _flower(settings: Settings, folder: Path) -> tuple[float, dict[str, torch.Tensor]]:
    """Run the job in Flower's simulation; return rounds per second without the first round, and the weights."""
    tools = {name: _tool(name) for name in ("flower-superlink", "flwr")}
    (folder / "benchapp").mkdir()
    (folder / "pyproject.toml").write_text(APP, encoding="utf-8")
    (folder / "benchapp" / "__init__.py").write_text("", encoding="utf-8")
    (folder / "benchapp" / "apps.py").write_text(COMPONENTS, encoding="utf-8")
    write_json(folder / "settings.json", asdict(settings))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    home = folder / "home"
    home.mkdir()
    address = f'[superlink.bench]\naddress = "127.0.0.1:{port}"\ninsecure = true\n'
    (home / "config.toml").write_text(address, encoding="utf-8")
    quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    own = {"FLWR_HOME": str(home), "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "OMP_NUM_THREADS": "1"}
    path = f"{Path(tools['flwr']).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it starts tools of its own
    variables = {**os.environ, **quiet, **own, "PATH": path}
    link = [tools["flower-superlink"], "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(link, env=variables, stdout=log, stderr=log)
        try:
            time.sleep(6)  # it takes connections after 3 to 6 seconds
            config = f"folder='{folder}'"
            federation = f"num-supernodes={settings.users} client-resources-num-cpus=1"
            start = [tools["flwr"], "run", str(folder), "bench", "--stream"]
            start += ["--federation-config", federation, "--run-config", config]
            subprocess.run(start, env=variables, stdout=log, stderr=log, timeout=600, check=False)
        finally:
            server.terminate()
            server.wait()
    times = folder / "flower.json"
    if not times.exists():  # Flower's exit code is 0 even when the run failed
        raise ConfigError(f"Flower's run failed: {(folder / 'log').read_text()[-2000:]}")
    ends = json.loads(times.read_text())
    return (len(ends) - 2) / (ends[-1] - ends[1]), load_file(folder / "flower.safetensors")


def _tool(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} was not found: install the extra with pip install 'gradveil[flower]'")
    return found


@bench_app.command("round")
def bench_round(
    model: Annotated[str, typer.Option(help="Any model.")] = "resnet18",
    data: Annotated[str, typer.Option(help="Any dataset.")] = "cifar10",
    root: Annotated[str, typer.Option(help="Where the dataset's files lie; empty: the usual places.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda or auto.")] = "auto",
    precision: Annotated[
        list[str] | None, typer.Option(help="float32, tf32, bf16; repeatable (default: bf16).")
    ] = None,
    lanes: Annotated[list[int] | None, typer.Option(help="Users at once; repeatable (default: 10).")] = None,
    defense: Annotated[list[str] | None, typer.Option(help="Repeatable (default: none, dgp, topk, adgp).")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of a repeat, after as many to warm up.")] = 50,
    repeats: Annotated[int, typer.Option(min=1, help="Repeats, the defenses in turn; medians are told.")] = 5,
    json_out: JsonOut = None,
) -> None:
    """Milliseconds of a round of the fast engine, 10 users x batch 32, real bytes measured on no round."""
    rows = []
    for kind in precision or ["bf16"]:
        for count in lanes or [10]:
            names = defense or ["none", "dgp", "topk", "adgp"]
            common = Settings(model=model, data=data, root=root, device=device, precision=kind)
            times = _milliseconds([replace(common, defense=name) for name in names], count, rounds, repeats)
            rows += [(kind, count, name, statistics.median(ms), ms) for name, ms in zip(names, times, strict=True)]
    base = {(kind, count): ms for kind, count, name, ms, _ in rows if name == "none"}
    table = Table(
        "precision", "lanes", "defense", "ms per round", "over none", "s per epoch", title=f"{model} on {data}"
    )
    for kind, count, name, ms, each in rows:
        none = base.get((kind, count))
        over = "-" if none is None else f"{100 * (ms / none - 1):+.1f} %"
        spread = f"{ms:.3f} ({min(each):.3f} to {max(each):.3f})"
        table.add_row(kind, str(count), name, spread, over, f"{157 * ms / 1000:.2f}")
    out.print(table)
    if json_out:
        fields = ("precision", "lanes", "defense", "ms_per_round", "repeats")
        figures = [dict(zip(fields, row, strict=True)) for row in rows]
        write_json(
            json_out,
            {"model": model, "data": data, "rows": figures, "command": command(), "environment": environment()},
        )


def _milliseconds(jobs: Sequence[Settings], lanes: int, rounds: int, repeats: int) -> list[list[float]]:
    """Return the time of a round of each job, repeat by repeat.

    The jobs take turns: a GPU that grows warm, or a neighbour at work, then slows all of them alike.
    """
    never = 10**9
    runs = [
        replace(job, rounds=rounds * (repeats + 1), checkpoint_every=rounds, wire_every=never, eval_every=never)
        for job in jobs
    ]
    trainers = [FastTrainer(assemble(run), lanes=lanes) for run in runs]
    times: list[list[float]] = [[] for _ in jobs]
    for repeat in range(repeats + 1):
        for trainer, found in zip(trainers, times, strict=True):
            seconds: list[float] = []
            while trainer.round < rounds * (repeat + 1):
                seconds += [one.seconds for one in trainer.advance()]
            if repeat:  # the first one compiles
                found.append(1000 * statistics.fmean(seconds))
    return times
