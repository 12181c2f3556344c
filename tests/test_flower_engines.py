"""Flower's own engines: one deployment with TLS, node keys and everything going wrong, one simulation on Ray.

Flower takes a minute to notice a client that was killed. The simulation runs in that minute.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="the flower extra is not installed")

from gradveil import tree
from gradveil.engines.flower_new import write_app, write_keys

pytestmark = [pytest.mark.engine, pytest.mark.slow]
TOOLS = Path(sys.executable).parent

CLIENT = '''
import os, pathlib, signal, time, numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from gradveil.engines import flower_records as records
from gradveil.engines.flower import VeilMod
from gradveil.engines.flower_secure import SecureVeilMod
from .common import DEFENSE

def veil(message, context, call_next):
    kind = SecureVeilMod if context.run_config["secure"] else VeilMod
    return kind(DEFENSE)(message, context, call_next)

def faults(message, context, call_next):
    """Stands between the protected answer and the network, as a hostile or dying client would."""
    ours = message.content["gradveil"]
    here = f"{ours['round']}-{context.node_config['partition-id']}-{ours['ask']}"
    reply = call_next(message, context)
    plan = dict(item.rsplit("-", 1) for item in context.run_config["plan"].split())
    fault = plan.get(here)
    folder = pathlib.Path(context.run_config["folder"])
    if fault:
        (folder / f"fault-{here}").touch()
    if fault == "zeros":
        body = bytes(len(reply.content["gradveil-mask"]["mask"].data))
        reply.content["gradveil-mask"] = ArrayRecord({"mask": records.blob(body, records.MASK)})
    elif fault == "lie":
        reply.content["metrics"]["num-examples"] = 10**12
    elif fault == "garbage":
        size = len(reply.content["arrays"]["update"].data)
        reply.content["arrays"] = ArrayRecord({"update": records.blob(os.urandom(size), records.UPDATE)})
    elif fault == "truncate":
        body = reply.content["arrays"]["update"].data
        reply.content["arrays"] = ArrayRecord({"update": records.blob(body[:len(body) // 2], records.UPDATE)})
    elif fault == "late":
        for _ in range(1200):
            if (folder / "server-is-back").exists():
                break
            time.sleep(0.1)
    elif fault == "kill":  # the residual is written, the answer never leaves
        os.kill(os.getpid(), signal.SIGKILL)
    return reply

app = ClientApp(mods=[faults, veil])

@app.train()
def train(message, context):
    part, round_ = context.node_config["partition-id"], message.content["config"]["server-round"]
    rng = np.random.default_rng([part, round_, context.run_config["salt"]])
    old = {name: array.numpy() for name, array in message.content["arrays"].items()}
    update = {name: rng.normal(0, 0.01, value.shape).astype("f4") for name, value in old.items()}
    np.savez(f"{context.node_config['gradveil-dir']}/update-{context.run_config['salt']}-{round_}.npz", **update)
    new = ArrayRecord({name: Array(value - update[name]) for name, value in old.items()})
    metrics = MetricRecord({"num-examples": 10 + part, "loss": 1.0})
    return Message(RecordDict({"arrays": new, "metrics": metrics}), reply_to=message)
'''

SERVER = """
import torch
from pathlib import Path
from safetensors.torch import save_file
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from gradveil import dgp, models
from gradveil.attacks.imprint import Imprint
from gradveil.engines.flower_secure import SecureFedAvg
from gradveil.engines.flower_strategy import VeiledFedAvg
from .common import DEFENSE, START

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
    events = Path(config["folder"]) / "events.txt"
    class Dumps:
        def configure_train(self, server_round, arrays, *more):
            if server_round == config["plant"]:
                body = models.build("mlp(hidden=32)", num_classes=10, input_shape=(1, 8, 8))
                imprint = Imprint(bins=40).fitted(dgp(), (0.5,), (0.25,))
                planted = imprint.plant(body, (1, 8, 8), torch.Generator().manual_seed(0))
                arrays = ArrayRecord(planted.state_dict())
            return super().configure_train(server_round, arrays, *more)
        def _accept(self, server_round, reply):
            part = super()._accept(server_round, reply)
            if part is not None and not config["secure"]:
                save_file(part.update, Path(config["folder"]) / f"used-{server_round}-{part.node}.safetensors")
                events.open("a").write(f"{server_round} counts for {part.examples} examples\\n")
            return part
        def _reject(self, server_round, reply, why):
            super()._reject(server_round, reply, why)
            events.open("a").write(f"{server_round} node {reply.metadata.src_node_id}: {why}\\n")
    kind = type("Kind", (Dumps, SecureFedAvg if config["secure"] else VeiledFedAvg), {})
    strategy = kind(DEFENSE, max_examples=50, checkpoint=Path(config["folder"]) / "server.safetensors",
                    fraction_evaluate=0.0, min_available_nodes=3, min_train_nodes=3)
    start = strategy.resume() or ArrayRecord(START)
    strategy.start(grid, start, num_rounds=config["rounds"], timeout=300)
    if strategy.last_sum is not None:
        save_file(strategy.last_sum, Path(config["folder"]) / "used-secure.safetensors")
"""

COMMON = """
import torch
from gradveil import AlignedDualPrune, Chain, ErrorFeedback
from gradveil.engines.secure import FixedPoint
DEFENSE = ErrorFeedback(Chain(AlignedDualPrune(), FixedPoint()))
RNG = torch.Generator().manual_seed(0)
START = {"w": torch.randn(40, 64, generator=RNG) / 8, "b": torch.zeros(40)}
"""


class Engine:
    """Processes of one federation, all of which end with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        home = folder / "flwr"
        home.mkdir()
        self.env = {
            **os.environ,
            "PATH": f"{TOOLS}:{os.environ['PATH']}",
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
        }

    def spawn(self, name: str, *command: str) -> "subprocess.Popen[bytes]":
        # Should pytest itself be killed, its children must not live on.
        leash = ("setpriv", "--pdeathsig", "KILL") if shutil.which("setpriv") else ()
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen([*leash, *command], env=self.env, stdout=log, stderr=log, start_new_session=True)
        self.processes.append(process)
        return process

    def configure(self, trust: str) -> None:
        text = f'[superlink.here]\naddress = "127.0.0.1:{self.port}"\n{trust}\n'
        (self.folder / "flwr" / "config.toml").write_text(text)

    def wait_for_port(self) -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.3)
        raise TimeoutError((self.folder / "link.log").read_text()[-2000:])

    def flwr(self, *args: str, seconds: float = 400) -> str:
        done = subprocess.run(["flwr", *args], env=self.env, capture_output=True, text=True, timeout=seconds)
        return done.stdout + done.stderr

    def together(self, *commands: tuple[str, ...]) -> None:
        """Run several commands at a time; each takes seconds to start."""
        running = [subprocess.Popen(["flwr", *command], env=self.env, stdout=subprocess.PIPE) for command in commands]
        for process in running:
            said, _ = process.communicate(timeout=180)
            assert process.returncode == 0, said

    def status(self) -> str:
        return str(json.loads(self.flwr("list", "here", "--format", "json"))["runs"][0]["status"])

    def stop(self) -> None:
        for process in self.processes:
            kill_tree(process)


def kill_tree(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process and what it started; Flower's helpers may have sessions of their own."""
    children = subprocess.run(["ps", "-eo", "pid,ppid"], capture_output=True, text=True).stdout.split()[2:]
    parents = {int(pid): int(parent) for pid, parent in zip(children[::2], children[1::2], strict=True)}
    family = {process.pid}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    for pid in sorted(family):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def engine(tmp_path: Path):  # type: ignore[no-untyped-def]
    engine = Engine(tmp_path)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """A SuperLink with TLS and three SuperNodes with keys, in which everything goes wrong.

    Round 1: the server sends an imprint. Round 2: a forged mask, a lie, garbage, half an answer. Round 3: one client
    is killed with -9, one answers late, and the server is killed while it waits. It starts again and runs a secure
    round.
    """
    folder = tmp_path_factory.mktemp("federation")
    engine = Engine(folder)
    try:
        app = make_app(folder)
        write_keys(folder / "keys", "127.0.0.1", 4)
        engine.configure(f'root-certificates = "{folder}/keys/ca.crt"')
        link = start_link(engine)
        engine.together(*(("supernode", "register", f"{folder}/keys/node-{part}.pub", "here") for part in range(3)))
        for part in range(3):
            start_node(engine, part)
        plan = "2-1-mask-zeros 2-0-update-truncate 2-1-update-lie 2-2-update-garbage "
        plan += "3-0-update-late 3-1-update-kill 3-2-update-mark"  # a mark only says that the answer is ready
        engine.flwr("run", str(app), "here", "--run-config", settings(folder, 1, f'rounds=3 plant=1 plan="{plan}"'))
        wait_until(lambda: len(list(folder.glob("fault-3-*"))) == 3, 400, folder)
        kill_tree(link)  # which waits for the late client
        start_link(engine)
        (folder / "server-is-back").touch()
        engine.flwr("run", str(app), "here", "--run-config", settings(folder, 2, "rounds=1 secure=true"))
        yield engine
    finally:
        engine.stop()


def settings(folder: Path, salt: int, more: str) -> str:
    return f'salt={salt} folder="{folder}" {more}'


def test_faults_and_lies_are_named_and_the_others_go_on(federation: Engine) -> None:
    events = (federation.folder / "events.txt").read_text()
    first = [line for line in events.splitlines() if line.startswith("1 ")]
    assert len(first) == 3, events  # every client refused the imprint, even as a question for the mask
    assert all("the model looks manipulated" in line and "code 6" in line for line in first), events
    assert not list(federation.folder.glob("state-*/update-1-1.npz"))  # and none was made to train
    assert re.search(r"^2 node \d+: bad proposal: the common mask of w has 0 positions", events, re.M), events
    assert re.search(r"^2 counts for 50 examples$", events, re.M), events  # client 1 claimed 10^12
    bad = re.findall(r"^2 node (\d+): bad payload: ", events, re.M)
    assert len(set(bad)) == 2, events  # the garbage and the truncated answer
    assert len(re.findall(r"^2 ", events, re.M)) == 4, events


def test_a_node_without_a_registered_key_is_turned_away(federation: Engine) -> None:
    stranger = start_node(federation, 3)
    assert stranger.wait(timeout=120) != 0
    assert "Activated" not in (federation.folder / "node-3.log").read_text()


def test_the_new_app_trains_on_ray(engine: Engine) -> None:
    """`gradveil flower new` writes an app that runs unchanged in the simulation engine."""
    app = engine.folder / "my-app"
    write_app(app)
    engine.configure("insecure = true")
    link = ("flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(engine.port))
    engine.spawn("link", *link)
    engine.wait_for_port()
    size = "num-supernodes=4 client-resources-num-cpus=1"
    config = "num-server-rounds=3 num-clients=4 local-epochs=4"
    said = engine.flwr("run", str(app), "here", "--stream", "--federation-config", size, "--run-config", config)
    assert engine.status() == "finished:completed", said[-3000:]
    accuracy = [float(value) for value in re.findall(r"'accuracy': ([\d.]+)\}", said)]
    assert len(accuracy) == 3, said[-3000:]
    assert accuracy[-1] > 0.7


def test_after_kills_and_a_restart_nothing_is_lost(federation: Engine) -> None:
    """The secure round resumes from the checkpoint, and all that was ever computed is accounted for."""
    folder = federation.folder
    wait_until((folder / "used-secure.safetensors").exists, 400, folder)
    wait_until(lambda: federation.status().startswith("finished"), 60, folder)
    assert federation.status() == "finished:completed", (folder / "link.log").read_text()[-3000:]
    assert not re.search(r"^3 ", (folder / "events.txt").read_text(), re.M)  # the server died before it used anything
    check_the_books(folder)


def make_app(folder: Path) -> Path:
    app = folder / "faulty"
    write_app(app)
    for name, text in (("client", CLIENT), ("server", SERVER), ("common", COMMON)):
        (app / "faulty" / f"{name}.py").write_text(text)
    (app / "faulty" / "task.py").unlink()
    project = (app / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[0]
    config = 'rounds = 1\nsalt = 0\nsecure = false\nplant = 0\nplan = ""\nfolder = ""\n'
    (app / "pyproject.toml").write_text(f"{project}[tool.flwr.app.config]\n{config}")
    return app


def start_link(engine: Engine) -> "subprocess.Popen[bytes]":
    keys = f"{engine.folder}/keys"
    tls = (
        "--ssl-ca-certfile",
        f"{keys}/ca.crt",
        "--ssl-certfile",
        f"{keys}/server.crt",
        "--ssl-keyfile",
        f"{keys}/server.key",
    )
    where = ("--host", "127.0.0.1", "--port", str(engine.port), "--database", f"{engine.folder}/link.db")
    link = engine.spawn("link", "flower-superlink", *where, "--enable-supernode-auth", *tls)
    engine.wait_for_port()
    return link


def start_node(engine: Engine, part: int) -> "subprocess.Popen[bytes]":
    folder = engine.folder
    (folder / f"state-{part}").mkdir()
    return engine.spawn(
        f"node-{part}", "flower-supernode", "--superlink", f"127.0.0.1:{engine.port}",
        "--root-certificates", f"{folder}/keys/ca.crt", "--auth-supernode-private-key", f"{folder}/keys/node-{part}",
        "--host", "127.0.0.1", "--port", str(free_port()),
        "--node-config", f'partition-id={part} num-partitions=3 gradveil-dir="{folder}/state-{part}"',
    )  # fmt: skip


def wait_until(done, seconds: float, folder: Path) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise TimeoutError("\n".join(path.read_text()[-3000:] for path in folder.glob("*.log")))
        time.sleep(0.3)


def check_the_books(folder: Path) -> None:
    """All updates ever computed = all that was used + all that is still held back."""
    import numpy as np

    computed = {"w": torch.zeros(40, 64, dtype=torch.float64), "b": torch.zeros(40, dtype=torch.float64)}
    balance = tree.zeros_like(computed)
    for path in folder.glob("state-*/update-*.npz"):
        computed = tree.add(computed, {n: torch.from_numpy(v).double() for n, v in np.load(path).items()})
    for path in folder.glob("used-*.safetensors"):
        balance = tree.add(balance, {n: t.double() for n, t in load_file(path).items()})
    for path in folder.glob("state-*/[0-9a-f]*-?.safetensors"):
        held = tree.only("veil.state.residual", load_file(path))
        balance = tree.add(balance, {n: t.double() for n, t in held.items()})
    assert len(list(folder.glob("state-*/update-*.npz"))) == 9
    assert len(list(folder.glob("state-*/[0-9a-f]*-?.safetensors"))) == 3
    for name, want in computed.items():
        torch.testing.assert_close(balance[name], want, rtol=0, atol=1e-6)
