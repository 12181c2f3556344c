"""`gradveil cost`: the paper's communication and computation tables, ours beside theirs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from .. import check, paper
from ..cost import LINE_UP, MIB, Cost, measure
from ..defenses import DEFENSES
from ..record import environment, write_json
from ..spec import build
from ..training.job import pick_device
from . import app, err, out


@app.command()
def cost(
    model: Annotated[list[str] | None, typer.Option(help="a model, repeatable (default: the paper's four)")] = None,
    defense: Annotated[
        list[str] | None, typer.Option(help="a defense, repeatable (default: the paper's columns)")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU")] = "cpu",
    rounds: Annotated[int, typer.Option(help="rounds to average over")] = 1,
    users: Annotated[int, typer.Option(help="users in each round; the more, the denser the mean they download")] = 10,
    batch_size: Annotated[int | None, typer.Option(help="pictures per user (default: 32 on a GPU, 2 on a CPU)")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write the figures to this file")] = None,
) -> None:
    """Measure bytes and seconds of each defense on each model; print the paper's own values beside them.

    Bytes are those of real messages. The paper's count (32 bits for a sent entry, 1 bit for a pruned one, a dense
    download) is applied to the same messages. On a CPU a defense that works through the batch (Soteria) is measured
    on one user: it takes a minute for each of them on ResNet18. Its download is then its own upload, which is less
    than the mean of ten users.
    """
    device = str(pick_device(device))
    size = (32 if device.startswith("cuda") else 2) if batch_size is None else batch_size
    check.at_least(1, rounds=rounds, users=users, batch_size=size)
    pairs = [(m, d, _users(d, users, device)) for m in model or paper.MODELS for d in defense or LINE_UP]
    costs = [
        measure(m, d, users=count, batch_size=size, rounds=rounds, device=device)
        for m, d, count in track(pairs, "measuring", console=err, transient=True)
    ]
    setting = f"{users} users, batches of {size}, {rounds} round(s), {device}"
    alone = {c.defense for c in costs if c.users != users}
    setting += f"; {', '.join(sorted(alone))}: 1 user, who downloads its own upload" if alone else ""
    out.print(_communication(costs, setting))
    out.print(_computation(costs, setting))
    if any((c.model, c.defense) == ("cnn6", "soteria") for c in costs):
        out.print(
            "CNN6 under Soteria: the paper counts the last convolution as masked, the second-to-last tensor of a model "
            "without biases; masking the classifier, as Soteria says and as was sent here, makes it 1.082 MiB."
        )
    if json_out:
        settings = {"users": users, "batch_size": size, "rounds": rounds, "device": device}
        write_json(json_out, {"settings": settings, "environment": environment(), "costs": [_plain(c) for c in costs]})


def _users(defense: str, users: int, device: str) -> int:
    slow = "batch" in build(DEFENSES, defense, "defense").needs and not device.startswith("cuda")
    return 1 if slow else users


def _communication(costs: list[Cost], setting: str) -> Table:
    table = Table(title="Communication, MiB per user and round", caption=setting)
    for heading in ("model", "defense"):
        table.add_column(heading)
    for heading in ("up", "down", "up + down", "the paper's count", "paper prints", "ours / paper's"):
        table.add_column(heading, justify="right")
    for c in costs:
        printed = paper.communication_mib(c.model, c.defense)
        sizes = (f"{value:.3f}" for value in (c.up / MIB, c.down / MIB, c.mib, c.paper_mib))
        ratio = c.mib / printed if printed else None
        table.add_row(c.model, c.defense, *sizes, _shown(printed, ".3f"), _shown(ratio, ".3f"))
    return table


def _computation(costs: list[Cost], setting: str) -> Table:
    title = f"Computation, seconds per user and epoch of {paper.ROUNDS_PER_EPOCH} rounds"
    table = Table(title=title, caption=f"{setting}; the paper: one RTX 2080 Ti, batches of 32")
    for heading in ("model", "defense"):
        table.add_column(heading)
    for heading in ("ms per round", "encoding, ms", "s per epoch", "x Top-k", "paper prints, s", "x Top-k"):
        table.add_column(heading, justify="right")
    for c in costs:
        base = next((t.defense_seconds for t in costs if (t.model, t.defense) == (c.model, "topk")), None)
        printed = paper.computation_seconds(c.model, c.defense)
        printed_base = paper.computation_seconds(c.model, "topk")
        table.add_row(
            c.model,
            c.defense,
            f"{c.defense_seconds * 1e3:.2f}",
            f"{c.encode_seconds * 1e3:.2f}",
            f"{c.defense_seconds * paper.ROUNDS_PER_EPOCH:.3f}",
            _shown(c.defense_seconds / base if base else None, ".1f"),
            _shown(printed, ".3f"),
            _shown(printed / printed_base if printed and printed_base else None, ".1f"),
        )
    return table


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _plain(c: Cost) -> dict[str, Any]:
    printed = {
        "paper_prints_mib": paper.communication_mib(c.model, c.defense),
        "paper_prints_seconds_per_epoch": paper.computation_seconds(c.model, c.defense),
    }
    return {**asdict(c), "mib": c.mib, "paper_mib": c.paper_mib, **printed}
