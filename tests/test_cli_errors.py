"""Mistakes on the command line: one line that names the remedy, exit code 2, no traceback."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gradveil.cli import err, main
from gradveil.errors import ConfigError


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with things that look like what the commands take, and are not."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("hello")
    (tmp_path / "bad.toml").write_text("[audit")
    (tmp_path / "empty.json").write_text("{}")
    save_file({"other.weight": torch.zeros(2)}, tmp_path / "other.safetensors")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(err, "_width", 80)  # a long message must not be folded
    return tmp_path


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("audit --data nowhere", "nowhere is neither a folder of pictures nor one of"),
        ("audit --data [/x]", "[/x] is neither"),
        ("audit --data empty", "empty holds no picture"),
        ("audit --defense dgpp", "unknown defense 'dgpp': did you mean dgp?"),
        ("audit --attack nope", "unknown attack 'nope': Known: blind"),
        ("audit --defense dgp(topp=0.1)", "'topp'; its options are top, bottom, rounding"),
        ("audit --defense chain(dgp,noise=dp)", "'noise'; its options are defenses, parts"),
        ("audit --defense dgp(top=[1])", "top must be a share in [0, 1], got [1]"),
        ("audit --weights missing.safetensors", "cannot read the weights missing.safetensors"),
        ("audit --weights file", "cannot read the weights file"),
        ("audit --weights other.safetensors", "a run's checkpoint goes to --checkpoint"),
        ("audit --checkpoint file", "cannot read the checkpoint file"),
        ("audit --model nowhere:build", "installed packages and the current folder are searched"),
        ("audit --out file", "file: check the path and its permissions"),
        ("audit bad.toml", "cannot read the configuration bad.toml"),
        ("train --data digits --rounds 1 --out file", "file: check the path and its permissions"),
        ("flower new file", "file: check the path and its permissions"),
        ("report empty.json", "run the audit again"),
        ("gate missing.json", "cannot read the report missing.json"),
        ("cost --device cuda:7", "device 'cuda:7' was asked for, but PyTorch finds no GPU"),
        ("cost --device gpu", "device 'gpu' is not known"),
        ("ats-search --device gpu", "device 'gpu' is not known"),
        ("generator train --data digits --device gpu --out g.safetensors", "device 'gpu' is not known"),
        ("train --data photos --model resnet18 --defense dp_noise", "BatchNorm has not while it trains: take a model"),
        ("cost --model lenet --defense none --batch-size 0", "batch_size must be a whole number of at least 1, got 0"),
        ("cost --model lenet --defense none --defense dgpp", "unknown defense 'dgpp': did you mean dgp?"),
        ("leaderboard card dgpp", "no table has a defense 'dgpp': did you mean dgp? Known: "),
        ("leaderboard render --results nowhere --page page.md", "there is no folder nowhere: cards lie in cards/"),
        ("guard lenet --shape 3,32", "model lenet cannot take inputs of shape (3, 32)"),
        ("doctor file", "neither a payload nor the state of a Veil"),
    ],
)
def test_a_mistake_is_one_line(
    scene: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, remedy: str
) -> None:
    assert remedy in _last_line(monkeypatch, capsys, command)


USERS_OWN = """
from torch import nn

def missing(num_classes):
    return {}["hidden"]

def wide(num_classes):
    return nn.Linear("wide", num_classes)

class Forgetful(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        return self.lost[0]

def defense():
    return 1 / 0
"""


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "train --model users_own:missing",
            "model users_own:missing failed with KeyError: 'hidden' (users_own.py, line 5)",
        ),
        ("train --model users_own:wide", "(users_own.py, line 8)"),
        ("audit --model users_own:Forgetful", "running model users_own:Forgetful failed with AttributeError: "),
        (
            "train --defense users_own:defense",
            "defense users_own:defense failed with ZeroDivisionError: division by zero",
        ),
        ("doctor users_own:defense", "users_own:defense failed with ZeroDivisionError: division by zero"),
        ("train --model users_typo:net", "importing 'users_typo:net' failed with SyntaxError: "),
        (
            "train --model users_needs:net",
            "importing 'users_needs:net' failed with RuntimeError: no driver (users_needs.py",
        ),
    ],
)
def test_an_error_in_the_users_own_code_is_one_line_that_says_where(
    scene: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, said: str
) -> None:
    (scene / "users_own.py").write_text(USERS_OWN)
    (scene / "users_typo.py").write_text("def net(:\n")
    (scene / "users_needs.py").write_text("raise RuntimeError('no driver')\n")
    monkeypatch.delitem(sys.modules, "users_own", raising=False)
    assert said in _last_line(monkeypatch, capsys, command)


def test_brackets_of_a_remedy_are_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> None:
        raise ConfigError("pip install 'gradveil[ui]'")

    monkeypatch.setattr("gradveil.cli.app", refuse)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert _last_line(monkeypatch, capsys, "ui") == "gradveil: pip install 'gradveil[ui]'"


def _last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str) -> str:
    monkeypatch.setattr(sys, "argv", ["gradveil", *command.split()])
    with pytest.raises(SystemExit) as left:
        main()
    text = capsys.readouterr().err
    assert left.value.code == 2
    assert "Traceback" not in text
    line = text.strip().splitlines()[-1]
    assert line.startswith("gradveil: ")
    return line
