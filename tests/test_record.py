"""What a result file says about where it came from."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gradveil import record


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["/home/me/.venv/bin/gradveil", "audit", "--data", "my photos"], "gradveil audit --data 'my photos'"),
        (["/home/me/src/gradveil/__main__.py", "bench", "wire"], "gradveil bench wire"),
        (["examples/frontier.py", "attack"], "python examples/frontier.py attack"),
        (["/home/me/gradveil/examples/frontier.py", "attack"], "python examples/frontier.py attack"),
    ],
)
def test_the_command_reads_as_one_would_type_it(words: list[str], shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", words)
    assert record.command() == shown


def test_a_training_run_says_its_command(tmp_path: Path) -> None:
    words = ["train", "--model", "lenet", "--data", "digits", "--rounds", "1", "--users", "2", "--batch-size", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "gradveil", *words, "--out", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["command"].startswith("gradveil train --model lenet")
