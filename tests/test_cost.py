"""The cost tables: the paper's 24 cells from real messages, and what really crosses beside them."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradveil import Veil, cost, paper
from gradveil.cli import app, commands  # noqa: F401
from gradveil.core import Grads
from gradveil.defenses import Identity, Soteria, TopK

CELLS = [(model, defense) for model in paper.MODELS for defense in cost.LINE_UP]


@pytest.mark.parametrize(("model", "defense"), CELLS)
def test_the_paper_communication_table_comes_back(model: str, defense: str) -> None:
    # One pass per feature is dear, and the deep models have the same classifier for pictures of any size.
    side = 4 if defense == "soteria" and model in ("vgg11", "resnet18") else 32
    found = cost.measure(model, defense, users=1, batch_size=2, side=side)
    assert round(found.paper_mib, 3) == paper.communication_mib(model, defense)


def test_the_printed_tables_are_complete() -> None:
    assert len(CELLS) == 24
    assert all(paper.communication_mib(*cell) for cell in CELLS)
    searched = [cell for cell in CELLS if paper.computation_seconds(*cell) is not None]
    assert len(searched) == 16
    assert paper.communication_mib("resnet18", "dp") == paper.communication_mib("resnet18", "none")
    assert paper.communication_mib("mlp", "dgp") is None
    assert paper.computation_seconds("resnet18", "none") is None


def test_a_tensor_left_alone_is_dense_whatever_zeros_it_holds() -> None:
    raw = {"w": torch.tensor([0.0, 0.0, 3.0, 4.0]), "b": torch.tensor([0.0, 1.0])}
    assert cost.paper_count(Identity(), raw, raw, None) == (24.0, 24.0)
    sent = {**raw, "w": torch.tensor([0.0, 0.0, 0.0, 4.0])}
    assert cost.paper_count(TopK(0.25), raw, sent, None) == ((3 * 32 + 3) / 8, 24.0)


def test_an_aligned_message_is_charged_inside_its_mask() -> None:
    raw = {"w": torch.arange(1.0, 101.0)}
    sent = {"w": torch.where(raw["w"] > 80, raw["w"], 0.0)}
    up, down = cost.paper_count(TopK(0.2), raw, sent, {"w": raw["w"] > 60})
    assert (up * 8, down * 8) == (20 * 32 + 20, 40 * 32 + 100)


def test_soteria_is_charged_in_the_last_tensor_but_one() -> None:
    weight = torch.ones(2, 5)
    weight[:, :4] = 0
    raw: Grads = {"conv": torch.ones(10), "weight": torch.ones(2, 5), "bias": torch.ones(2)}
    up, down = cost.paper_count(Soteria(), raw, {**raw, "weight": weight}, None)
    assert (up, down) == (pytest.approx(22 * 4 - 31 / 8 * 8), 22 * 4)


def test_bytes_come_from_the_wire() -> None:
    one, ten = (cost.measure("lenet", "dgp", users=users, batch_size=2) for users in (1, 10))
    dense = cost.measure("lenet", "none", users=2, batch_size=2)
    assert one.parameters == 15826
    assert one.up < 0.3 * dense.up
    assert dense.up < 1.01 * 4 * 15826
    assert one.up == pytest.approx(ten.up, rel=0.05)
    assert ten.down >= one.down, "ten users choose more positions than one"
    assert ten.defense_seconds > 0
    assert ten.encode_seconds > 0


def test_every_kind_of_need_is_met() -> None:
    for name in ("dp_noise", "outpost", "ats", "chain(topk, gaussian_noise(sent_only=True))"):
        assert cost.measure("lenet", name, users=1, batch_size=1).up > 0


def test_the_command_prints_both_tables_and_writes_json(tmp_path: Path) -> None:
    target = tmp_path / "cost.json"
    words = ["cost", "--model", "lenet", "--defense", "topk", "--defense", "dgp", "--users", "2", "--json", str(target)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "Communication, MiB per user and round" in result.output
    assert "Computation" in result.output
    written = json.loads(target.read_text())
    assert [c["defense"] for c in written["costs"]] == ["topk", "dgp"]
    assert all(round(c["paper_mib"], 3) == c["paper_prints_mib"] == 0.074 for c in written["costs"])
    assert written["costs"][1]["paper_prints_seconds_per_epoch"] == 0.146
    assert written["settings"]["users"] == 2


def test_an_unknown_name_is_named() -> None:
    result = CliRunner().invoke(app, ["cost", "--model", "lenet", "--defense", "dpg"])
    assert result.exit_code != 0
    assert "dgp" in str(result.exception)


def test_the_first_proposal_which_compiles_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    propose = Veil.propose

    def slow_at_first(self: Veil, grads: Any) -> Any:
        calls.append(1)
        time.sleep(0.5 if len(calls) == 1 else 0.0)
        return propose(self, grads)

    monkeypatch.setattr(Veil, "propose", slow_at_first)
    assert cost.measure("lenet", "adgp", users=1, batch_size=1).defense_seconds < 0.5


def test_the_command_says_that_a_lone_user_downloads_its_own_upload() -> None:
    words = ["cost", "--model", "lenet", "--defense", "soteria", "--users", "2", "--batch-size", "1"]
    said = " ".join(CliRunner().invoke(app, words).output.split())  # however wide the terminal is
    assert "soteria: 1 user, who downloads its own upload" in said
