"""State files: whole after a kill or on a full disk, nobody else's, and no litter."""

import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradveil import Veil, dgp
from gradveil.errors import StateError
from gradveil.files import write_tensors

SAVER = """
import itertools, sys, torch
from gradveil.files import write_tensors
print("ready", flush=True)
for i in itertools.count():
    write_tensors(sys.argv[1], {"a": torch.full((1_000_000,), float(i)), "b": torch.full((7,), float(i))})
    print(i, flush=True)
"""


def test_a_kill_leaves_a_whole_file_and_the_next_write_clears_up(tmp_path: Path) -> None:
    path, draw, littered = tmp_path / "state.safetensors", random.Random(0), 0
    for _ in range(2):
        with subprocess.Popen([sys.executable, "-c", SAVER, path], stdout=subprocess.PIPE, text=True) as saver:
            assert saver.stdout is not None
            while saver.stdout.readline() in ("ready\n", "0\n"):
                pass
            time.sleep(draw.random() / 20)
            saver.kill()
        saved = load_file(path)
        assert len({float(value) for t in saved.values() for value in (t.min(), t.max())}) == 1
        littered += len(list(tmp_path.iterdir())) > 1
    assert littered, "no kill hit a write: the test shows nothing"
    write_tensors(path, {"a": torch.zeros(1)})
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_the_old_state(tmp_path: Path) -> None:
    path, like = tmp_path / "state.safetensors", {"w": torch.zeros(300_000)}
    veil = Veil(dgp(), like, seed=1)
    veil.seal({"w": torch.randn(300_000, generator=torch.Generator().manual_seed(0))}, 1)
    veil.save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))  # every write beyond fails, as on a full disk
    try:
        with pytest.raises(StateError, match=r"cannot write .*state\.safetensors"):
            veil.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("trap", ["file", "link"])
def test_what_lies_in_the_way_is_not_written_to(trap: str, tmp_path: Path) -> None:
    """Somebody who can write to the folder must not get the state, nor another file destroyed."""
    path, victim = tmp_path / "state.safetensors", tmp_path / "victim"
    victim.write_text("precious")
    for name in (".new", ".tmp"):
        place = path.with_name(path.name + name)
        if trap == "file":
            place.write_bytes(b"")
            place.chmod(0o666)
        else:
            place.symlink_to(victim)
    with pytest.raises(StateError, match="cannot write"):
        write_tensors(path, {"a": torch.zeros(1)})
    assert victim.read_text() == "precious"
    assert not path.exists()


def test_a_state_is_its_owners_whatever_the_umask_and_lay_there_before(tmp_path: Path) -> None:
    path, old = tmp_path / "state.safetensors", os.umask(0)
    try:
        path.write_bytes(b"")
        write_tensors(path, {"a": torch.zeros(1)})
    finally:
        os.umask(old)
    assert path.stat().st_mode & 0o777 == 0o600
