"""The search for ATS policies: both scores against cases with a known answer, and the command."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from gradveil import models
from gradveil.cli import app, commands  # noqa: F401
from gradveil.core import Batch
from gradveil.defenses.ats import parse_policy
from gradveil.defenses.ats_search import Judge, Scored, draw_policies, gradient_similarity, jacobian_score, rank


class HalfSquare(nn.Module):
    """Its input Jacobian is the input itself."""

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x.square().sum(1, keepdim=True)


def test_policies_are_different_valid_and_settled_by_the_seed() -> None:
    drawn = draw_policies(300, torch.Generator().manual_seed(0))
    assert len(set(drawn)) == 300
    assert drawn == draw_policies(300, torch.Generator().manual_seed(0))
    indices = [index for text in drawn for (policy,) in [parse_policy(text)] for index in policy]
    assert (min(indices), max(indices)) == (0, 49), "every transformation can be drawn, and none past the end"
    assert any(len(text.split("-")) < 3 for text in drawn), "a place may be left out"


def test_jacobians_that_do_not_correlate_score_minus_one() -> None:
    rows = torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0], [1.0, -1.0, -1.0, 1.0]])
    assert jacobian_score(HalfSquare(), rows) == pytest.approx(-1.0, abs=1e-4)
    alike = rows[:1] + 0.01 * rows
    assert jacobian_score(HalfSquare(), alike) < -10
    assert jacobian_score(HalfSquare(), torch.zeros(3, 4)) < -10, "no Jacobian at all is worst, not NaN"


def test_similarity_is_one_on_the_picture_and_falls_with_the_distance() -> None:
    model = models.build("lenet(init='default')", num_classes=10, input_shape=(1, 8, 8))
    one = Batch(torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3]))
    assert gradient_similarity(model, cross_entropy, one, one.inputs[0]) == pytest.approx(1.0, abs=1e-4)
    near, far = (gradient_similarity(model, cross_entropy, one, one.inputs[0] * (1 - d) - d) for d in (0.1, 3.0))
    assert 1 > near > far


def test_the_judge_is_repeatable_and_sees_the_policy() -> None:
    model = models.build("lenet(init='default')", num_classes=10, input_shape=(3, 8, 8)).eval()
    rng = torch.Generator().manual_seed(0)
    victims = Batch(torch.rand(2, 3, 8, 8, generator=rng), torch.tensor([1, 2]))
    others = Batch(torch.rand(6, 3, 8, 8, generator=rng), torch.arange(6))
    judge = Judge(model, model, cross_entropy, victims, others, (0.0,), (1.0,))
    assert judge.score("0-1-2") == judge.score("0-1-2")
    assert judge.score("0-1-2")[1:] != judge.score("3")[1:]
    assert judge.score("").accuracy == pytest.approx(jacobian_score(model, others.inputs))


def test_only_policies_good_enough_for_training_are_ranked() -> None:
    scored = [Scored("1", 0.1, -9.0), Scored("2", 0.5, -2.0), Scored("3", 0.3, -3.0)]
    assert [one.policy for one in rank(scored)] == ["3", "2"]
    assert [one.policy for one in rank(scored, -10.0)] == ["1", "3", "2"]
    assert rank(scored, -1.0) == []


def test_the_command_prints_a_defense_that_can_be_used(tmp_path: Path) -> None:
    target = tmp_path / "scores.json"
    words = ["ats-search", "--candidates", "3", "--pictures", "1", "--jacobians", "8", "--epochs", "1", "--json"]
    result = CliRunner().invoke(app, [*words, str(target)], env={"COLUMNS": "160"})
    assert result.exit_code == 0, result.output
    said = "the two most private of 2 drawn policies whose accuracy score reaches the median, as a hybrid: ats(policy="
    assert said in result.output
    scores = json.loads(target.read_text())["scores"]
    assert sum(row["drawn"] for row in scores) == 3
    assert [row["policy"] for row in scores if not row["drawn"]] == ["", "3-1-7", "43-18-18", "21-13-3", "7-4-15"]


def test_the_command_says_how_many_policies_were_good_enough(tmp_path: Path) -> None:
    words = ["ats-search", "--candidates", "3", "--pictures", "1", "--jacobians", "8", "--epochs", "0"]
    target = tmp_path / "scores.json"
    CliRunner().invoke(app, [*words, "--json", str(target)])
    best = max(row["accuracy"] for row in json.loads(target.read_text())["scores"] if row["drawn"])
    one = CliRunner().invoke(app, [*words, "--floor", str(best)], env={"COLUMNS": "160"}).output
    assert "the only one of 3 drawn policies whose accuracy score reaches" in one
    assert "+" not in one.rpartition("ats(policy=")[2].partition(",")[0]
    none = CliRunner().invoke(app, [*words, "--floor", "0"], env={"COLUMNS": "160"}).output
    assert "none of 3 drawn policies has an accuracy score of 0.0" in none
