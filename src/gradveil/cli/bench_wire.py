"""`gradveil bench wire`: what a federated round moves and how long it takes on slow links."""

import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from rich.table import Table
from torch import nn

from .. import data, defenses, models
from ..core import Defense, Tensors
from ..errors import ConfigError
from ..gradients import local_update
from ..record import command, environment, write_json
from . import out
from .bench import bench_app

if TYPE_CHECKING:
    from flwr.app import Message

ROUNDS = 2  # the first fills residuals and sends the full model, the last is measured
METHODS: dict[str, Callable[[], Defense] | None] = {
    "dense": None,  # FedAvg without gradveil
    "topk": defenses.top_k,
    "dgp": defenses.dgp,
    "adgp": defenses.adgp,
    "hardened": defenses.Hardened,
}
EXAMPLES = 32  # a client claims so many: a hardened one uploads nothing before it has mixed them


@dataclass
class Phase:
    """One request and its answers: every client works and transmits at the same time as the others."""

    down: list[int] = field(default_factory=list)  # bytes, one entry per client asked
    up: list[int] = field(default_factory=list)
    work: list[float] = field(default_factory=list)  # processor seconds of each client, training left out
    heaviest: tuple[list[bytes], list[bytes]] = field(default_factory=lambda: ([], []))


@dataclass
class Measured:
    """One method's measured round."""

    method: str
    clients: int
    phases: list[Phase]
    server_seconds: float
    round_seconds: dict[str, float] = field(default_factory=dict)  # by link speed in Mbit/s

    @property
    def upload(self) -> float:
        """Bytes a client sends in a round, on average."""
        return sum(sum(phase.up) for phase in self.phases) / self.clients

    @property
    def download(self) -> float:
        """Bytes a client receives in a round, on average."""
        return sum(sum(phase.down) for phase in self.phases) / self.clients

    @property
    def path_bytes(self) -> int:
        """Bytes one after the other on the slowest client's link."""
        return sum(max(phase.down) + max(phase.up) for phase in self.phases)

    @property
    def work_seconds(self) -> float:
        """Seconds that do not depend on the link, as if each side had one core to itself."""
        # Clients do equal work, one after the other here: the slowest would only show what else the machine did.
        return self.server_seconds + sum(median(phase.work) for phase in self.phases)


@bench_app.command("wire")
def wire(
    model: Annotated[str, typer.Option(help="Model whose update is sent.")] = "resnet18",
    clients: Annotated[int, typer.Option(min=3, help="Clients in the round.")] = 10,
    rate: Annotated[list[float] | None, typer.Option(help="Link speeds in Mbit/s (default 10, 100, 1000).")] = None,
    file: Annotated[Path | None, typer.Option("--out", "-o", help="Write the measurements as JSON.")] = None,
) -> None:
    """Measure upload, download and round time of dense FedAvg, Top-k, DGP, ADGP and the hardened form in Flower.

    Real Flower messages, built by the real strategy, app and mod, and moved byte by byte through a rate-limited TCP
    relay. Each client has a link of its own; the server's is not limited. Work is counted in processor seconds;
    training and waiting for disks are left out.
    """
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise ConfigError('Flower is not installed: pip install "gradveil[flower]"') from error
    logging.getLogger("flwr").setLevel(logging.ERROR)
    rates = rate or [10.0, 100.0, 1000.0]
    start, updates = _updates(model, clients)
    results = []
    for method, make in METHODS.items():
        with out.status(f"measuring {method}"), tempfile.TemporaryDirectory() as folder:
            results.append(_measure(method, make and make(), start, updates, Path(folder)))
    for one in results:
        with out.status(f"moving the messages of {one.method}"):
            one.round_seconds = {f"{mbit:g}": _round_seconds(one, mbit * 1e6) for mbit in rates}
    _show(results, rates, model, sum(t.numel() for t in start.values()))
    if file is not None:
        rows = [{**_plain(one), "break_even_mbit": break_even(one, results[0])} for one in results]
        setting = {"command": command(), "environment": environment(), "model": model, "rates_mbit": rates}
        write_json(file, {**setting, "rows": rows})


def _updates(name: str, clients: int) -> tuple[Tensors, list[list[Tensors]]]:
    """Return the model's start and each client's update in each round, computed once for all methods."""
    pictures = data.load("photos", split="train")
    net = models.build(name, num_classes=pictures.num_classes, input_shape=pictures.input_shape)
    start = {n: t.clone() for n, t in net.state_dict().items()}
    rng = torch.Generator().manual_seed(0)
    with out.status(f"computing updates of {name}"):
        updates = [
            [
                local_update(net, nn.functional.cross_entropy, [pictures.batch(rows)], lr=0.05)
                for rows in torch.randint(len(pictures), (clients, 4), generator=rng)
            ]
            for _ in range(ROUNDS)
        ]
    return start, updates


def _measure(
    method: str, defense: Defense | None, start: Tensors, updates: list[list[Tensors]], folder: Path
) -> Measured:
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import FedAvg

    from ..engines.flower import VeilMod
    from ..engines.flower_local import LocalGrid, wire_bytes
    from ..engines.flower_strategy import VeiledFedAvg

    class Meter(LocalGrid):
        """Notes what each message weighs and how long its client works on it."""

        phases: list[Phase] = []  # noqa: RUF012

        def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> list["Message"]:
            questions = list(messages)
            if questions:
                self.phases.append(Phase())
            return [self.deliver(message) for message in questions]

        def deliver(self, message: "Message") -> "Message":
            began = time.process_time()
            reply: Message = super().deliver(message)
            seconds = time.process_time() - began
            self.busy += seconds
            down, up = wire_bytes(message), wire_bytes(reply)
            phase = self.phases[-1]
            if not phase.down or sum(map(len, down + up)) > max(phase.down) + max(phase.up):
                phase.heaviest = (down, up)
            phase.down.append(sum(map(len, down)))
            phase.up.append(sum(map(len, up)))
            phase.work.append(seconds)
            self.weighing += time.process_time() - began - seconds
            return reply

        busy = weighing = 0.0

    clients = len(updates[0])
    share: dict[str, Any] = {"fraction_evaluate": 0.0, "min_train_nodes": clients, "min_available_nodes": clients}
    strategy = FedAvg(**share) if defense is None else VeiledFedAvg(defense, sparse_download=True, **share)
    grid = Meter(_app([] if defense is None else [VeilMod(defense, folder=folder)], updates), clients)
    arrays = ArrayRecord(start)
    for round_ in range(1, ROUNDS + 1):
        grid.phases, grid.busy, grid.weighing = [], 0.0, 0.0
        began = time.process_time()
        arrays = _one_round(strategy, grid, arrays, round_)
        server = time.process_time() - began - grid.busy - grid.weighing
    return Measured(method, clients, grid.phases, server)


def _one_round(strategy: Any, grid: Any, arrays: Any, round_: int) -> Any:
    from flwr.app import ConfigRecord

    questions = strategy.configure_train(round_, arrays, ConfigRecord(), grid)
    new, _ = strategy.aggregate_train(round_, grid.send_and_receive(questions))
    if new is None or getattr(strategy, "rejected", []):
        raise ConfigError(f"the round failed: {getattr(strategy, 'rejected', '')}")
    return new


def _app(mods: list[Any], updates: list[list[Tensors]]) -> Any:
    """Return a client that answers with the update computed before, as if it had trained."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        update = updates[message.content["config"]["server-round"] - 1][context.node_config["partition-id"]]
        state = message.content["arrays"].to_torch_state_dict()
        new = ArrayRecord({name: t - update[name] if name in update else t for name, t in state.items()})
        content = RecordDict({"arrays": new, "metrics": MetricRecord({"num-examples": EXAMPLES})})
        return Message(content, reply_to=message)

    return app


def _round_seconds(measured: Measured, bits_per_second: float) -> float:
    """Return the round's time with the heaviest client's bytes really sent through a link of this speed."""
    from ..engines.link import transfer_seconds

    moved = [transfer_seconds(part, bits_per_second) for phase in measured.phases for part in phase.heaviest]
    return sum(moved) + measured.work_seconds


def break_even(one: Measured, dense: Measured) -> float | None:
    """Return the link speed in Mbit/s below which a method's round is faster than a dense one; None: at any speed."""
    extra, saved = one.work_seconds - dense.work_seconds, dense.path_bytes - one.path_bytes
    return None if extra <= 0 else max(8e-6 * saved / extra, 0.0)


def _plain(one: Measured) -> dict[str, Any]:
    phases = [{k: v for k, v in asdict(phase).items() if k != "heaviest"} for phase in one.phases]
    return {**asdict(one), "phases": phases, "upload": one.upload, "download": one.download}


def _show(results: list[Measured], rates: list[float], model: str, size: int) -> None:
    dense = results[0]
    title = f"One round of {dense.clients} clients, {model} ({size:,} numbers), bytes per client"
    table = Table("", "upload", "of dense", "download", "of dense", "both", title=title)
    for one in results:
        both = (one.upload + one.download) / (dense.upload + dense.download)
        shares = [f"{one.upload / dense.upload:.1%}", f"{one.download / dense.download:.1%}"]
        table.add_row(one.method, f"{one.upload:,.0f}", shares[0], f"{one.download:,.0f}", shares[1], f"{both:.1%}")
    out.print(table)
    speeds = [f"{mbit:g} Mbit/s" for mbit in rates]
    table = Table("", "work", *speeds, "faster below", title="Seconds per round, training left out")
    for one in results:
        edge = break_even(one, dense)
        known = "" if one is dense else "any speed" if edge is None else f"{edge:,.0f} Mbit/s"
        table.add_row(one.method, f"{one.work_seconds:.2f}", *(f"{s:.2f}" for s in one.round_seconds.values()), known)
    out.print(table)
    out.print("Each client has its own link. Aligned rounds ask three clients for a mask first; those train twice.")
