"""The commands around a report, as a user types them."""

import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
from typer.testing import CliRunner

from gradveil.audit import Plan, Report
from gradveil.audit.plan import DEFAULT_ATTACKS
from gradveil.audit.verdict import judge
from gradveil.cli import app, commands  # noqa: F401
from gradveil.cli.audit import template
from gradveil.config import from_mapping, read_toml

run = CliRunner().invoke


def test_init_writes_a_config_that_loads(tmp_path) -> None:
    path = tmp_path / "audit.toml"
    assert run(app, ["init", str(path)]).exit_code == 0
    plan = from_mapping(read_toml(path), Plan)
    assert plan.model == Plan().model
    assert "dgp" in plan.defenses
    assert plan.attacks == DEFAULT_ATTACKS
    assert template().count("\n# ") == len(plan.__dataclass_fields__)
    assert run(app, ["init", str(path)]).exit_code != 0
    assert run(app, ["init", str(path), "--force"]).exit_code == 0


def test_audit_from_config_and_flags(tmp_path) -> None:
    (tmp_path / "a.toml").write_text(
        'model = "mlp(hidden=16)"\ndata = "digits"\npictures = 2\nbatch_size = 2\nround = 1\naccuracy_rounds = 5\n'
        'attacks = ["reader=linear_readout"]\n'
    )
    out = tmp_path / "out"
    command = ["audit", str(tmp_path / "a.toml"), "--defense", "dgp", "--pictures", "1", "--out", str(out)]
    done = run(app, [*command, "--no-progress"])
    assert done.exit_code == 0, done.output
    assert out.joinpath("report.html").resolve().as_uri() in done.output.replace("\n", "")
    found = Report.load(out / "report.json")
    assert found.settings["pictures"] == 1  # the flag goes before the file
    assert [d.name for d in found.defenses] == ["none", "dgp"]
    assert all(0 < d.accuracy <= 1 for d in found.defenses)
    assert found.attacks[0].name == "reader"
    again = run(app, [*command, "--resume"])
    assert again.exit_code == 0
    assert Report.load(out / "report.json").rows == found.rows
    markdown = run(app, ["report", str(out / "report.json"), "--markdown"])
    assert markdown.output == (out / "report.md").read_text()


def test_checkpoint_settles_the_model() -> None:
    done = run(app, ["audit", "--checkpoint", "c.safetensors", "--model", "lenet"])
    assert "leave out --model" in str(done.exception)


def test_bad_settings_are_named(tmp_path) -> None:
    (tmp_path / "a.toml").write_text("pictres = 3\n")
    done = run(app, ["audit", str(tmp_path / "a.toml")])
    assert "did you mean pictures?" in str(done.exception)


def test_report_and_compare(report: Report, tmp_path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    report.save(old)
    worse = [replace(r, scores={"ssim": [0.9] * 4}) if r.defense == "hardened" else r for r in report.rows]
    after = replace(report, rows=worse, seed=1)
    replace(after, judgements=judge(after)).save(new)
    assert run(app, ["report", str(old)]).exit_code == 0
    assert (tmp_path / "old.html").exists()
    assert run(app, ["compare", str(old), str(old)]).exit_code == 0
    changed = run(app, ["compare", str(old), str(new)])
    assert changed.exit_code == 1
    assert "worse" in changed.output
    assert "setting seed: 0 before, 1 after" in changed.output


def test_a_leak_in_one_column_does_not_hide_the_other(report: Report, tmp_path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    at = ("realistic", "topk")
    calm = [
        replace(r, scores={"ssim": r.floor}, contrast=[0.0] * 4, identified=[False] * 4)
        if (r.column, r.defense) == at
        else r
        for r in report.rows
    ]
    before = replace(report, rows=calm)
    verdicts = [{(j.defense, j.column): j.verdict for j in judge(r)} for r in (before, report)]
    assert [v["topk", "realistic"] for v in verdicts] == ["holds", "leaks"]
    assert [v["topk", None] for v in verdicts] == ["leaks", "leaks"]
    before.save(old)
    replace(report, judgements=before.judgements).save(new)  # the rows count, not the verdicts in the file
    changed = run(app, ["compare", str(old), str(new)])
    assert changed.exit_code == 1, changed.output
    assert run(app, ["compare", str(new), str(old)]).exit_code == 0


MODEL = """
from torch import nn


def factory(num_classes, input_shape):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Sigmoid(), nn.Linear(32, num_classes))
"""


@pytest.mark.slow
def test_ctrl_c_on_the_real_command_and_resume(tmp_path) -> None:
    """With a model that lies in the current folder, which the installed command must find."""
    (tmp_path / "mymodel.py").write_text(MODEL)
    settings = "--model mymodel:factory --data digits --pictures 2 --batch-size 2 --round 1 --accuracy-rounds 0"
    attack = "--defense dgp --attack q=gradient_matching(steps=300) --device cpu --out out"
    command = [sys.executable, "-c", "from gradveil.cli import main; main()", "audit", *f"{settings} {attack}".split()]
    path = tmp_path / "out" / "report.json"
    # Tests that run in the background ignore SIGINT, and so would what they start.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, preexec_fn=heeds) as started:
        try:
            limit = time.monotonic() + 120
            while not (path.exists() and any(row.status == "ok" for row in Report.load(path).rows)):
                assert started.poll() is None, started.communicate()[1]
                assert time.monotonic() < limit
                time.sleep(0.05)
            started.send_signal(signal.SIGINT)
            _, said = started.communicate(timeout=120)
        finally:
            started.kill()
    assert started.returncode == 130
    assert "--resume goes on" in said
    kept = Report.load(path)
    done = [row for row in kept.rows if row.status == "ok"]
    assert 1 <= len(done) < 4
    assert len(kept.cut) == 4 - len(done)
    assert "Not everything ran" in (tmp_path / "out" / "report.html").read_text()
    again = subprocess.run([*command, "--resume"], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert again.returncode == 0, again.stderr
    finished = Report.load(path)
    assert [row.status for row in finished.rows] == ["ok"] * 4
    assert finished.rows[: len(done)] == done
