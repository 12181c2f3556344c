"""The limited link, and `gradveil bench wire` through it on a small model."""

import json
import os
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradveil.cli import app, commands  # noqa: F401
from gradveil.engines.link import Relay, transfer_seconds


def test_a_link_is_as_slow_as_it_says_and_counts_what_passes() -> None:
    parts = [os.urandom(300_000), os.urandom(100_000)]
    limited, free = transfer_seconds(parts, 8e6), transfer_seconds(parts, None)
    assert limited >= 0.38  # 0.4 s, less what a queue lets pass at once
    assert free < 0.5 * limited
    with socket.create_server(("127.0.0.1", 0)) as echo, Relay(echo.getsockname()[1]) as relay:
        with socket.create_connection(("127.0.0.1", relay.port)) as client, echo.accept()[0] as server:
            client.sendall(b"12345")
            assert server.recv(5, socket.MSG_WAITALL) == b"12345"
            server.sendall(b"ok")
            assert client.recv(2, socket.MSG_WAITALL) == b"ok"
        assert (relay.up, relay.down) == (5, 2)


def test_bench_wire_measures_every_method(tmp_path: Path) -> None:
    pytest.importorskip("flwr", reason="the flower extra is not installed")
    path = tmp_path / "wire.json"
    command = ["bench", "wire", "--model", "lenet", "--clients", "3", "--rate", "100", "--out", str(path)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    found = json.loads(path.read_text())
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == ["dense", "topk", "dgp", "adgp", "hardened"]
    dense = rows["dense"]
    for name, row in rows.items():
        assert row["round_seconds"]["100"] > 0
        assert name == "dense" or row["upload"] < 0.45 * dense["upload"]
    assert rows["hardened"]["upload"] < 0.15 * dense["upload"]  # two bits for each entry
    assert rows["adgp"]["download"] < 0.8 * dense["download"]
    assert {"command", "environment", "rates_mbit"} <= found.keys()
