"""`gradveil attack` and `gradveil bench attack` from the outside."""

import json

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from gradveil import data
from gradveil.cli import app, commands  # noqa: F401
from gradveil.cli.attack import blind, paint
from gradveil.cli.attack_job import AttackJob, AttackSettings, with_steps
from gradveil.errors import ConfigError, GuardError

TWO = ["attack", "--data", "digits", "--pictures", "2", "--group", "1", "--no-progress"]
FEW = [*TWO, "--steps", "3"]


def call(*words):
    return CliRunner().invoke(app, list(words), catch_exceptions=False)


def test_pictures_scores_and_going_on(tmp_path):
    command = [*FEW, "--defense", "dgp", "--out", str(tmp_path)]
    assert call(*command).exit_code == 0
    scores = json.loads((tmp_path / "scores.json").read_text())
    assert len(scores["scores"]["mse"]) == 2
    assert set(scores["floor"]) == {"mean_image", "grey", "random_picture"}
    assert scores["floor"] == blind(AttackJob(AttackSettings(data="digits", pictures=2)), [0, 1])
    assert scores["attack"]["steps"] == 3
    assert scores["defense"]["name"] == "error_feedback"
    assert scores["threat"]["labels"]
    with Image.open(tmp_path / "pictures.png") as image:
        assert image.width > 2 * 8
    kept, lost = (tmp_path / f"part-000{i}.json" for i in (0, 1))
    before = kept.stat().st_mtime_ns
    lost.unlink()
    assert call(*command).exit_code == 0
    assert kept.stat().st_mtime_ns == before
    assert lost.exists()
    again = json.loads((tmp_path / "scores.json").read_text())
    assert again["scores"] == scores["scores"]


def test_the_result_says_who_was_identified_and_what_was_sent(tmp_path):
    words = [*TWO, "--attack", "linear_readout", "--model", "mlp(hidden=16)", "--seed", "3", "--out", str(tmp_path)]
    assert call(*words).exit_code == 0
    found = json.loads((tmp_path / "scores.json").read_text())
    assert found["scores"]["identified"] == [1.0, 1.0], "it reads single pictures off exactly"
    assert found["line_up"] == 100
    assert all(len(card["identified"]) == 2 and max(card["identified"]) == 0 for card in found["floor"].values())
    entries = 64 * 16 + 16 + 16 * 10 + 10
    assert found["bytes_dense"] == 4 * entries
    job = AttackJob(AttackSettings(data="digits", pictures=2, model="mlp(hidden=16)", seed=3))
    sent = [job.upload(i).nbytes for i in range(2)]
    assert [row["bytes_up"] for row in found["rows"]] == sent
    assert found["bytes_up"] == sum(sent) / 2
    tested = data.load("digits", split="test")
    assert found["pictures"] != [0, 1]
    assert torch.equal(tested.pixels(found["pictures"]), torch.cat([job.truth(i).inputs for i in range(2)]))


def test_an_attack_and_blind_guesses_stand_before_the_same_line_up():
    job = AttackJob(AttackSettings(data="digits", pictures=6, attack="blind"))
    ranks = [job.score(i, found)[1]["rank"][0] for i, found in enumerate(job.run(range(6))[0])]
    assert ranks == blind(job, range(6))["grey"]["rank"]
    assert max(ranks) > 10, "of 100"


def test_an_upload_that_is_empty_is_not_attacked(tmp_path):
    words = [*FEW, "--out", str(tmp_path), "--defense"]
    with pytest.raises(ConfigError, match=r"hardened\(examples=3\) sends nothing in round 1, so there is nothing"):
        call(*words, "hardened(examples=3)", "--rounds", "1")
    assert call(*words, "hardened(examples=3)", "--rounds", "2").exit_code == 0


def test_an_active_attack_is_on_a_client_without_a_guard(tmp_path):
    words = [*TWO, "--attack", "imprint", "--out", str(tmp_path)]
    with pytest.raises(GuardError, match="--no-guard"):
        call(*words)
    assert call(*words, "--no-guard").exit_code == 0


def test_another_attack_does_not_go_on_with_this_one(tmp_path):
    call(*FEW, "--out", str(tmp_path))
    with pytest.raises(ConfigError, match="other settings"):
        call(*FEW, "--seed", "1", "--out", str(tmp_path))


def test_other_data_in_the_same_folder_is_another_attack(tmp_path):
    def pictures(brightness):
        for split, label, i in ((s, k, i) for s in ("train", "test") for k in "ab" for i in range(3)):
            file = tmp_path / "pics" / split / label / f"{i}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (brightness + i, brightness, 0)).save(file)

    command = [*FEW, "--data", str(tmp_path / "pics"), "--out", str(tmp_path / "out")]
    pictures(10)
    assert call(*command).exit_code == 0
    pictures(100)
    with pytest.raises(ConfigError, match="other settings or data"):
        call(*command)


@pytest.mark.parametrize(
    ("name", "content"),
    [("json", b"{}"), ("json", b"["), ("json", b"[]"), ("safetensors", b"cut"), ("safetensors", None)],
)
def test_a_damaged_part_is_done_again(tmp_path, name, content):
    command = [*FEW, "--out", str(tmp_path)]
    call(*command)
    whole = json.loads((tmp_path / "scores.json").read_text())["scores"]
    damaged = tmp_path / f"part-0000.{name}"
    damaged.unlink() if content is None else damaged.write_bytes(content)
    assert call(*command).exit_code == 0
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == whole


def test_a_part_of_an_older_version_is_done_again(tmp_path):
    command = [*FEW, "--out", str(tmp_path)]
    call(*command)
    file = tmp_path / "part-0000.json"
    part = json.loads(file.read_text())
    del part["rows"][0]["bytes_up"], part["rows"][0]["scores"]["identified"]
    file.write_text(json.dumps(part))
    assert call(*command).exit_code == 0
    assert len(json.loads((tmp_path / "scores.json").read_text())["scores"]["identified"]) == 2


def test_attacks_that_remember_get_their_rounds(tmp_path):
    command = [*FEW, "--attack", "joint(rounds=2)", "--defense", "dgp"]
    with pytest.raises(ConfigError, match="--rounds"):
        call(*command, "--out", str(tmp_path / "none"))
    assert call(*command, "--rounds", "2", "--out", str(tmp_path / "two")).exit_code == 0
    frozen = [*FEW, "--attack", "repeated_rounds", "--rounds", "2", "--freeze", "--labels", "inferred"]
    assert call(*frozen, "--defense", "dgp", "--out", str(tmp_path / "three")).exit_code == 0


def test_the_attacked_pictures_are_the_same_with_and_without_earlier_rounds():
    plain = AttackJob(AttackSettings(data="digits", pictures=4, batch_size=2))
    later = AttackJob(AttackSettings(data="digits", pictures=4, batch_size=2, rounds=2))
    assert torch.equal(plain.truth(1).inputs, later.truth(1).inputs)
    used = [later.indices(upload, round_) for upload in range(2) for round_ in range(3)]
    assert len({i for part in used for i in part}) == 12
    assert len(later.observe(1).earlier) == 2


def test_steps_reach_the_attack_inside():
    job = AttackJob(AttackSettings(attack="chained(gradient_matching(lr=0.3))", steps=7, rounds=1))
    assert job.attack.inner.steps == 7
    assert job.attack.inner.lr == 0.3
    with pytest.raises(ConfigError, match="no steps"):
        with_steps(AttackJob(AttackSettings(attack="blind")).attack, 3)


def test_blind_guesses_are_paired_within_their_upload_only():
    job = AttackJob(AttackSettings(data="digits", pictures=6))
    alone = [blind(job, [upload]) for upload in range(6)]
    together = blind(job, list(range(6)))
    for guess, scores in together.items():
        assert scores["ssim"] == [card[guess]["ssim"][0] for card in alone]


def test_originals_stand_above_reconstructions():
    image = paint(torch.ones(3, 1, 8, 8), torch.zeros(3, 1, 8, 8))
    scale = 96 // 8
    assert image.getpixel((0, 0)) == (255, 255, 255)
    assert image.getpixel((0, 9 * scale)) == (0, 0, 0)


def test_bench_prints_and_writes_figures(tmp_path):
    file = tmp_path / "bench.json"
    words = ["bench", "attack", "--data", "digits", "--pictures", "2", "--steps", "1", "--repeats", "1"]
    assert call(*words, "--device", "cpu", "--json", str(file)).exit_code == 0
    figures = json.loads(file.read_text())
    assert set(figures["milliseconds"]) == {"one by one", "layer rules, eager", "vmap, eager"}
    assert figures["slope_difference"] < 1e-3
