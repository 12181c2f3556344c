"""Exit codes that a script can trust."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

import gradveil
from gradveil import tree
from gradveil.audit.doctor import examine
from gradveil.audit.report import Report
from gradveil.audit.thresholds import Thresholds, failures
from gradveil.cli import app, commands  # noqa: F401
from gradveil.errors import ConfigError, GradveilError
from gradveil.wire.frame import KINDS, Entry, Positions, Values, write_frame

PARAMS = {"w": torch.zeros(40, 30), "b": torch.zeros(30)}


def grads(seed: int = 0) -> dict[str, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {name: torch.randn(p.shape, generator=rng) for name, p in PARAMS.items()}


def test_gate_by_verdict(report: Report) -> None:
    found = failures(report, Thresholds(require="holds"))
    assert sorted({line.split(":")[0] for line in found}) == ["dgp", "topk"]
    assert failures(report, Thresholds(require="holds"), ["hardened"]) == []


def test_gate_by_limits(report: Report) -> None:
    assert failures(report, Thresholds(max_ssim=0.2), ["hardened"]) == []
    assert len(failures(report, Thresholds(max_ssim=0.2), ["dgp"])) == 2
    assert len(failures(report, Thresholds(max_ssim=0.45, columns=("realistic",)), ["dgp"])) == 0
    assert len(failures(report, Thresholds(max_lead=0.01, max_picture_ssim=0.01, max_bytes=0.01), ["hardened"])) >= 3
    assert "accuracy is" in failures(report, Thresholds(min_accuracy=0.99), ["hardened"])[0]


def test_gate_trusts_rows_not_verdicts(report: Report) -> None:
    forged = replace(report, judgements=[replace(j, verdict="holds", worst=0.0) for j in report.judgements])
    assert failures(forged, Thresholds(require="holds"), ["dgp"])
    assert failures(forged, Thresholds(max_ssim=0.2), ["dgp"])


def test_gate_fails_on_what_was_not_measured(report: Report) -> None:
    blank = replace(report, rows=[], defenses=[replace(d, uploads=[], accuracy=None) for d in report.defenses])
    for limits in (Thresholds(max_ssim=1.0), Thresholds(max_bytes=9.0), Thresholds(min_accuracy=0.0)):
        assert "not measured" in failures(blank, limits, ["dgp"])[0]
    with pytest.raises(ConfigError, match="no defense 'nope'"):
        failures(report, Thresholds(), ["nope"])
    alone = replace(report, defenses=report.defenses[:1])
    assert failures(alone, Thresholds(require="holds"))


@pytest.mark.parametrize("limit", ["max_ssim", "max_lead", "max_picture_ssim"])
def test_gate_fails_on_an_attack_without_result(report: Report, limit: str) -> None:
    rows = [
        replace(row, status="failed", scores={}) if (row.defense, row.attack) == ("hardened", "mask_aware") else row
        for row in report.rows
    ]
    gone = [row for row in rows if row.status == "ok"]
    wanted = [f"hardened: mask_aware has no result in the {c} column" for c in ("diagnostic", "realistic")]
    for some in (rows, gone):
        assert failures(replace(report, rows=some), Thresholds(**{limit: 1.0}), ["hardened"]) == wanted
    assert failures(replace(report, rows=rows), Thresholds(max_bytes=1.0), ["hardened"]) == []


def test_doctor_on_payloads() -> None:
    pruned = gradveil.Veil(gradveil.dgp(), PARAMS, seed=0).seal(grads(), 1)
    bare = gradveil.Veil(gradveil.Identity(), PARAMS, seed=0).seal(grads(), 1)
    assert examine(pruned).state == "on"
    assert examine(pruned.body, gradveil.dgp()).state == "on"
    assert examine(bare).state == "off"
    assert examine(bare, gradveil.dgp()).state == "off"
    assert "sent 1200 entries where the expected defense sends 240" in examine(bare, gradveil.dgp()).reasons[1]
    assert examine(pruned, gradveil.adgp()).state == "on"
    assert examine(bare, gradveil.GaussianNoise()).state == "unclear"
    levels = gradveil.Veil(gradveil.Hardened(examples=1), PARAMS, seed=0).seal(grads(), 1)
    assert examine(levels).state == "on"
    dead = {"first": grads()["w"], "last": grads()["w"] * (torch.arange(40)[:, None] > 25)}  # units that never fire
    silent = gradveil.Veil(gradveil.Identity(), dead).seal(dead, 1)
    assert examine(silent).state == "unclear"  # zeros alone are no defense
    assert examine(silent, gradveil.dgp()).state == "off"
    parts = {part.name: part for part in examine(pruned).parts}
    assert parts["w"].share == pytest.approx(0.2)
    assert parts["w"].dtype == "float32"
    assert examine(pruned).nbytes == pruned.nbytes


def test_doctor_on_states(tmp_path) -> None:
    veil = gradveil.Veil(gradveil.dgp(), PARAMS, seed=0)
    assert examine(veil).state == "unclear"
    veil.seal(grads(), 1)
    veil.seal(grads(1), 1)
    veil.save(tmp_path / "state.safetensors")
    found = examine(tmp_path / "state.safetensors")
    assert (found.state, found.round, found.kind) == ("on", 2, "state")
    saved = veil.state_dict()
    lost = {k: torch.zeros_like(t) if "residual" in k else t for k, t in saved.items()}
    broken = {k: t / 0 if "residual" in k else t for k, t in saved.items()}
    for bad, why in ((lost, "lost or never ran"), (broken, "NaN")):
        veil._state = tree.only("state", bad)  # as a broken defense might leave it; loading refuses NaN
        assert examine(veil).state == "off"
        assert why in examine(veil).reasons[0]
    assert examine(gradveil.Veil(gradveil.Identity(), PARAMS)).state == "unclear"


def test_doctor_refuses_other_things(tmp_path) -> None:
    payload = gradveil.Veil(gradveil.dgp(), PARAMS, seed=0).seal(grads(), 1)
    (tmp_path / "cut").write_bytes(payload.body[:-3])
    (tmp_path / "noise").write_bytes(b"hello")
    for name in ("cut", "noise", "missing"):
        with pytest.raises(GradveilError):
            examine(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot examine a int"):
        examine(3)


def test_doctor_on_a_hostile_payload(tmp_path) -> None:
    vast = [Entry(f"w{i}", KINDS[0], (1 << 31,), Positions.NONE, Values.PLAIN, False, 0, 0, 0) for i in range(8)]
    found = examine(write_frame(vast, [], None), gradveil.dgp())  # 68 GB, declared in a hundred bytes
    assert found.state == "unclear"
    assert "17179869184 entries, too many" in found.reasons[1]
    (tmp_path / "p").write_bytes(gradveil.wire.encode({"\x1b]0;owned\x07\x1b[2J\n": torch.ones(300)}))
    done = CliRunner().invoke(app, ["doctor", str(tmp_path / "p")])
    assert "owned" in done.output
    assert not {"\x1b", "\x07"} & set(done.output)


def live_payload() -> gradveil.Payload:
    return gradveil.Veil(gradveil.dgp(), PARAMS, seed=0).seal(grads(), 1)


def test_commands(report: Report, tmp_path, monkeypatch) -> None:
    run = CliRunner().invoke
    path = tmp_path / "report.json"
    report.save(path)
    assert run(app, ["gate", str(path)]).exit_code == 1
    assert run(app, ["gate", str(path), "--defense", "hardened"]).exit_code == 0
    assert run(app, ["gate", str(path), "--max-ssim", "0.2", "--defense", "dgp"]).exit_code == 1
    payload = live_payload()
    (tmp_path / "payload").write_bytes(payload.body)
    seen = run(app, ["doctor", str(tmp_path / "payload"), "--expect", "dgp"])
    assert seen.exit_code == 0, seen.output
    assert "The defense is on." in seen.output
    (tmp_path / "hook.py").write_text(
        "import gradveil, torch\n"
        "def bare():\n"
        "    return gradveil.Veil(gradveil.Identity(), {'w': torch.zeros(99)}).seal({'w': torch.ones(99)}, 1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert run(app, ["doctor", "hook:bare"]).exit_code == 1
