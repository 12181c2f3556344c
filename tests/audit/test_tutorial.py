"""The tutorial, block by block: Python is executed, commands are run with flags that make them short."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradveil.cli import app, commands  # noqa: F401

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
SHORT = "--pictures 1 --batch-size 1 --round 1 --accuracy-rounds 0 --no-progress"
# Four steps show nothing, so no verdict can be asked of them.
REPLACED = {"steps=200": "steps=4", "--require holds ": ""}


def blocks() -> list[tuple[str, str]]:
    return re.findall(r"```(python|sh)\n(.*?)```", TUTORIAL.read_text(encoding="utf-8"), re.DOTALL)


def test_tutorial_works_as_written(tmp_path, monkeypatch) -> None:
    if not TUTORIAL.exists():
        pytest.skip("the documentation is not part of this installation")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("gradveil.audit.risk.PATIENCE", 0.0)  # a few directions of the fast score are enough here
    names: dict[str, object] = {}
    for kind, text in blocks():
        for long, short in REPLACED.items():
            text = text.replace(long, short)
        if kind == "python":
            exec(compile(text, "docs/tutorial.md", "exec"), names)
            continue
        for line in text.strip().splitlines():
            words = shlex.split(line)
            assert words[0] == "gradveil"
            if words[1] == "audit":
                words += [*shlex.split(SHORT), "--attack", "quick=gradient_matching(steps=4)"]
            done = CliRunner().invoke(app, words[1:])
            assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception}"
    assert (tmp_path / "report" / "report.html").exists()
    assert (tmp_path / "report-run" / "report.html").exists()
    sys.modules.pop("my_model", None)


def test_names_of_the_tutorial_need_no_import_of_their_own() -> None:
    names = "gradveil.data.load, gradveil.models.build, gradveil.attacks.GradientMatching, gradveil.audit.write"
    subprocess.run([sys.executable, "-c", f"import gradveil; {names}"], check=True, timeout=60)
