"""What a training run says it has spent of differential privacy."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradveil.cli import app, commands
from gradveil.defenses import correlated_epsilon, gaussian_epsilon, strategy_sensitivity
from gradveil.training import Settings, assemble
from gradveil.training.privacy import spent, stated

assert commands  # importing it registers the commands
TINY = {"model": "mlp(hidden=8)", "users": 3, "rounds": 6, "lr": "0.1"}


def privacy(rounds: int = 40, **changes: object) -> dict:
    return spent(assemble(Settings(**{**TINY, **changes})), rounds)


@pytest.mark.parametrize("defense", ["dp_noise", "clip_noise", "correlated_noise", "chain(dp_noise, topk)"])
def test_the_command_says_what_was_spent(defense: str, tmp_path: Path) -> None:
    line = ["train", "--defense", defense, "--model=mlp(hidden=8)", "--users=3", "--rounds=6", "--no-progress"]
    done = CliRunner().invoke(app, [*line, "--delta=1e-6", "--out", str(tmp_path / "run")], env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())["privacy"]
    assert result["epsilon"] > 0
    assert result["delta"] == 1e-6
    assert result["unit"] == ("user" if defense == "clip_noise" else "example")
    assert "no gain from sampling" in result["sampling"]
    words = f"epsilon {result['epsilon']:.4g} at delta 1e-06"
    assert words in " ".join(done.output.split())
    assert words in (tmp_path / "run" / "settings.toml").read_text()


@pytest.mark.parametrize(
    ("defense", "why"),
    [
        ("dp", "no clip"),
        ("none", "no clip"),
        ("hardened", "no clip"),
        ("dp_noise(noise_multiplier=0)", "is 0"),
        ("chain(dp_noise, soteria)", "soteria looks at the batch again"),
        ("chain(adgp, clip_noise)", "mask"),
    ],
)
def test_a_defense_without_a_guarantee_says_so(defense: str, why: str) -> None:
    found = privacy(defense=defense)
    assert found["epsilon"] is None
    assert why in stated(found)
    assert stated(found).startswith("none: ")


def test_the_accountant_covers_the_batches_that_are_really_drawn() -> None:
    """Whatever the order came to be, no picture may have moved the mechanism further than was accounted for."""
    for correlation in (0.0, 0.9):
        job = assemble(Settings(**TINY, defense=f"correlated_noise(correlation={correlation})", batch_size=100))
        rounds = 30
        found = spent(job, rounds)
        assert found["epsilon"] is not None
        reached = gaussian_epsilon(1 / _furthest(job, rounds, correlation), 1e-5)
        assert reached <= found["epsilon"] < 3 * reached


def test_passes_that_fill_whole_batches_hold_an_example_once_each() -> None:
    found = privacy(rounds=12, users=1, batch_size=10**6, defense="dp_noise(noise_multiplier=5.0)")
    # Every batch is the whole shard.
    assert found["epsilon"] == pytest.approx(gaussian_epsilon(5 / math.sqrt(12), 1e-5))
    alone = correlated_epsilon(5.0, correlation=0.0, rounds=12, participations=12, delta=1e-5)
    assert found["epsilon"] == pytest.approx(alone)


def test_a_user_that_is_invited_less_often_spends_less() -> None:
    some, every = (privacy(defense="clip_noise", participants=n, users=8)["epsilon"] for n in (2, 8))
    assert some < every == pytest.approx(gaussian_epsilon(1 / math.sqrt(40), 1e-5))


def test_epsilon_grows_with_the_rounds_done() -> None:
    values = [privacy(rounds, defense="dp_noise")["epsilon"] for rounds in (0, 1, 30, 60)]
    assert values[0] == 0
    assert all(a < b for a, b in pairwise(values))


def test_statistics_that_are_sent_are_named() -> None:
    shown = privacy(model="vgg11", size=32, data="photos", defense="clip_noise")
    assert any("BatchNorm" in one for one in shown["not_covered"])


def _furthest(job: object, rounds: int, correlation: float) -> float:
    """Return how far the drawn batches let one picture of the first user move the mechanism, by its definition."""
    counts: dict[int, list[int]] = {}
    for turn in range(rounds):
        for picture in job.feed.draw(0, turn)[:, 0].tolist():  # type: ignore[attr-defined]
            counts.setdefault(picture, [0] * rounds)[turn] += 1
    assert any(2 in one for one in counts.values())  # a batch that ends one pass and begins the next

    def norm(times: list[int]) -> float:
        level, square = 0.0, 0.0
        for count in times:
            level = correlation * level + count
            square += level**2
        return math.sqrt(square)

    assert norm([1, 1, 0]) == pytest.approx(strategy_sensitivity(correlation, rounds=3, participations=2))
    return max(norm(one) for one in counts.values())
