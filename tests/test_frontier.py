"""The frontier script on a tiny setting, its variants under the contract of defenses, its page against its files."""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradveil import Step, tree
from gradveil.core import Defense
from gradveil.defenses import DEFENSES, DualPrune, ErrorFeedback
from gradveil.spec import build, to_text

from . import test_defense_contract as contract

ROOT = Path(__file__).resolve().parents[1]
CONTRACT = (
    "test_nothing_handed_in_is_changed",
    "test_the_seed_and_the_round_settle_the_output",
    "test_a_zero_gradient_is_no_trouble",
    "test_no_nan_comes_out_of_extreme_gradients",
    "test_the_state_survives_safetensors",
    "test_it_works_in_a_chain",
    "test_it_is_a_frozen_value",
    "test_what_arrives_is_what_the_defense_let_out",
)
NAMES = (
    "warmed_dgp",
    "accumulated_dgp",
    "rotating_dgp",
    "random_dgp",
    "clipped_dgp",
    "decayed_dgp",
    "coarse_dgp",
    "projected",
    "low_rank",
    "noisy_band",
    "warmed_noisy_dgp",
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    """Import from the examples, and leave tables and paths as they were."""
    path, table = list(sys.path), dict(DEFENSES)
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module
    sys.path[:] = path
    DEFENSES.clear()
    DEFENSES.update(table)


@pytest.fixture(scope="module")
def variants(scripts: Callable[[str], ModuleType]) -> ModuleType:
    return scripts("variants")


@pytest.mark.parametrize("name", NAMES)
def test_variants_keep_the_contract(name: str, variants: ModuleType) -> None:
    defense: Defense = variants.VARIANTS[name]()
    for rule in CONTRACT:
        getattr(contract, rule)(defense)
    contract.test_keys_shapes_types_and_device_are_kept(defense, torch.float32)
    if name != "decayed_dgp":  # forgets on purpose
        contract.test_what_is_held_back_is_not_lost(defense)
    assert build({**DEFENSES, **variants.VARIANTS}, to_text(defense), "defense") == defense
    assert set(NAMES) >= set(variants.NAMED)


def rounds_of(defense: Defense, grads: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what leaves of one vector per round."""
    state, sent = defense.init({"w": grads[0]}), []
    for t, g in enumerate(grads):
        out, state = defense.apply({"w": g}, state, Step(torch.Generator().manual_seed(t), t, num_examples=1))
        sent.append(out["w"])
    return sent


def test_a_warmed_release_is_the_plain_one_of_the_sum(variants: ModuleType, rng: torch.Generator) -> None:
    grads = [torch.randn(200, generator=rng) for _ in range(6)]
    plain = ErrorFeedback(DualPrune())
    sent = rounds_of(variants.Gathered(plain, 3), grads)
    assert not torch.stack(sent[:2]).any()
    for mine, right in zip(sent[2:], rounds_of(plain, [sum(grads[:3], torch.zeros(200)), *grads[3:]]), strict=True):
        torch.testing.assert_close(mine, right)
    often = rounds_of(variants.Gathered(plain, 3, always=True), grads)
    assert [bool(s.any()) for s in often] == [False, False, True] * 2


def test_a_rotating_release_lets_an_entry_leave_once_in_a_turn(variants: ModuleType, rng: torch.Generator) -> None:
    sent = torch.stack(rounds_of(variants.Rotating(4, 0.05, 0.15), [torch.randn(400, generator=rng)] * 8))
    assert int((sent != 0).sum(0).max()) == 2
    assert (sent != 0).sum(1).tolist() == [80] * 8
    assert all(not sent[t].view(-1, 4)[:, torch.arange(4) != t % 4].any() for t in range(8))


def test_noise_on_the_band_is_bounded(variants: ModuleType, rng: torch.Generator) -> None:
    g = torch.randn(5000, generator=rng)
    step, pruned = Step(rng), DualPrune().apply({"w": g}, {}, Step(rng))[0]["w"]
    for noise, limit, wanted in ((0.5, 100.0, 0.5 * float(pruned[pruned != 0].square().mean().sqrt())), (99, 2.0, 2.0)):
        defense = variants.NoisyBand(noise, limit)
        sent, _ = defense.apply({"w": g}, defense.init({"w": g}), step)
        assert torch.equal(sent["w"] != 0, pruned != 0)
        assert float((sent["w"] - pruned)[pruned != 0].std()) == pytest.approx(wanted, rel=0.1)


def test_projection_and_low_rank_are_what_they_say(variants: ModuleType, rng: torch.Generator) -> None:
    g = {"w": torch.randn(32, 64, generator=rng)}
    low, _ = variants.LowRankMatrix(3).apply(g, {}, Step(rng))
    assert int(torch.linalg.matrix_rank(low["w"])) == 3
    once, _ = variants.RandomProjection(0.25).apply(g, {}, Step(torch.Generator().manual_seed(1)))
    twice, _ = variants.RandomProjection(0.25).apply(once, {}, Step(torch.Generator().manual_seed(1)))
    torch.testing.assert_close(once, twice)
    assert tree.global_norm(once) ** 2 == pytest.approx(0.25 * tree.global_norm(g) ** 2, rel=0.3)


def test_the_script_attacks_trains_draws_and_skips_what_it_knows(
    scripts: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADVEIL_OFFLINE", "1")
    frontier, view = scripts("frontier"), scripts("frontier_view")
    store, out = view.Store(tmp_path / "out"), ["--out", str(tmp_path / "out")]

    def call(*words: str) -> str:
        done = CliRunner().invoke(frontier.app, [*words, *out], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return str(done.output)

    lenet = ["--model", "lenet", "--data", "digits", "--runs", str(tmp_path / "runs")]
    attack = ["attack", *lenet, "--pictures", "2", "--attack", "inverting_gradients(steps=3)"]
    both = ["--defense", "adgp", "--defense", "rotating_dgp(every=2)"]
    assert len(call(*attack, *both).splitlines()) == 2
    assert not call(*attack, *both), "what is recorded is skipped"
    train = ["train", *lenet, "--rounds", "1", *both]
    assert len(call(*train).splitlines()) == 2
    assert not call(*train)
    chained = ["--attack", "chained(gradient_matching(steps=2))", "--age", "1", "--after-rounds", "1"]
    call("attack", *lenet, "--pictures", "2", *chained, "--defense", "adgp")
    frozen = ["--attack", "repeated_rounds(gradient_matching(steps=2))", "--repeat", "1"]
    call("attack", *lenet, "--pictures", "2", *frozen, "--defense", "adgp")
    assert len(list(store.entries("attack", model="lenet"))) == 4
    assert len(list(tmp_path.glob("out/*/*.json"))) == 6

    call("draw", "--model", "lenet", "--picture", str(tmp_path / "it.png"))
    assert (tmp_path / "it.png").stat().st_size > 5000
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- frontier model=lenet batch=1 -->\nold\n<!-- /frontier -->\nb\n")
    call("table", str(page))
    lines = page.read_text().splitlines()
    assert "old" not in lines
    assert sum("`adgp`" in line or "`rotating_dgp(every=2)`" in line for line in lines) == 2
    assert (lines[0], lines[-1]) == ("a", "b")


def entry(ssim: float, floors: dict[str, float]) -> dict[str, Any]:
    return {"mean": {"ssim": ssim}, "floor": {kind: {"ssim": value} for kind, value in floors.items()}}


def test_leakage_is_counted_from_the_higher_floor(scripts: Callable[[str], ModuleType]) -> None:
    view = scripts("frontier_view")
    assert view.gain(entry(0.5, {"grey": 0.1, "another upload": 0.3})) == pytest.approx(0.2)
    assert view.gain(entry(0.1, {"grey": 0.2})) == pytest.approx(-0.1)


def test_the_tables_count_where_the_attacker_knows_the_release(scripts: Callable[[str], ModuleType]) -> None:
    view, tables = scripts("frontier_view"), ROOT / "results" / "full"
    found = list(view.Store(Path("nowhere"), tables).entries("attack", model="resnet18", batch=1))
    assert {"none", "dgp", *view.ATTACKED_AS.values()} <= {e["defense"] for e in found}
    assert all(e["defense"] == "none" or "masked='never'" not in e["attack"] for e in found)
    trained = view.accuracies(view.Store(Path("nowhere"), tables), "resnet18")
    for text, attacked in view.ATTACKED_AS.items():
        assert trained[text] == {**trained[attacked], "defense": text}


def test_the_page_shows_what_the_files_hold(scripts: Callable[[str], ModuleType]) -> None:
    view = scripts("frontier_view")
    text = (ROOT / "docs" / "hardened.md").read_text(encoding="utf-8")
    assert view.MARKED.search(text), "the page has lost its markers"
    assert view.MIXED.search(text), "the page has lost its markers"
    again = view.fill_page(text, view.Store(ROOT / "results" / "frontier"))
    assert again == text, "run: python examples/frontier.py table docs/hardened.md"


def test_a_checkpoint_is_called_by_its_file_or_its_run(scripts: Callable[[str], ModuleType]) -> None:
    name = scripts("frontier")._name_of
    assert name(Path("runs/hardened.safetensors")) == "hardened"
    assert name(Path("runs/first/checkpoint.safetensors")) == "first"


def test_uploads_of_several_pictures_stand_beside_another_upload(
    scripts: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    view = scripts("frontier_view")
    store, score = view.Store(tmp_path), {"ssim": 0.25, "identified": 0.5, "rank": 3.0}
    found = {"mean": score, "floor": {"another upload": {**score, "rank": 7.0}}, "environment": {"commit": "0" * 40}}
    for defense, attack in (("hardened", "ig(coarse=8, steps=5, weighting='none')"), ("none", "ig(steps=5)")):
        for trained in ({}, {"after": "run"}):
            store.write("attack", defense, {"model": "m", "batch": 2, "n": 4, **trained}, found, attack)
    lines = view.render_uploads(store, "m", 2).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:6]] == [
        "| raw gradient",
        "| `hardened`",
        "| raw gradient, trained model",
        "| `hardened`, trained model",
    ]
    assert (
        "8x8 pictures, 5 steps, tensors not weighed by their noise | 0.250 / 0.250 | 50% / 50% | 3.0 / 7.0" in lines[3]
    )


def test_the_attacker_is_given_a_form_it_can_imitate(
    scripts: Callable[[str], ModuleType], variants: ModuleType
) -> None:
    as_public = scripts("frontier").as_public
    warmed = variants.warmed_dgp()
    assert as_public(warmed, 1) == warmed.inner
    assert as_public(build(DEFENSES, "hardened", "defense"), 32).examples == 1
    assert as_public(build(DEFENSES, "hardened", "defense"), 8).examples == 32


def test_the_rows_about_a_known_mask_run_and_stand_on_a_page(
    scripts: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_mask = scripts("known_mask")
    assert all(build(DEFENSES, defense, "defense") for _, defense, _ in known_mask.ROWS)
    rows = (("DGP, 1 earlier round", "dgp", 1), ("never run", "topk", 0))
    monkeypatch.setattr(known_mask, "ROWS", rows[:1])
    line = ["attack", "--model=lenet", "--data=photos", "--pictures=2", "--steps=2", f"--out={tmp_path}"]
    done = CliRunner().invoke(known_mask.app, line)
    assert done.exit_code == 0, done.output
    monkeypatch.setattr(known_mask, "ROWS", rows)
    marks = "<!-- known mask models=lenet -->\nold\n<!-- /known mask -->"
    assert "| DGP, 1 earlier round | not run |" in known_mask.fill_page(marks, known_mask.Store(tmp_path)), (
        "fewer steps"
    )
    monkeypatch.setattr(known_mask, "STEPS", 2)
    monkeypatch.setattr(known_mask, "PICTURES", 2)
    page = known_mask.fill_page(marks, known_mask.Store(tmp_path))
    assert re.search(r"\| DGP, 1 earlier round \| -?0\.\d{3}, ", page)
    assert "| never run | not run |" in page
    assert "old" not in page


@pytest.mark.parametrize(("script", "page"), [("known_mask", "hardened.md"), ("precision", "training.md")])
def test_tables_of_the_other_scripts_show_what_the_files_hold(
    scripts: Callable[[str], ModuleType], script: str, page: str
) -> None:
    module, text = scripts(script), (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert module.MARKED.search(text), "the page has lost its markers"
    folder = ROOT / "results" / script
    again = module.fill_page(text, module.Store(folder) if script == "known_mask" else folder)
    assert again == text, f"run: python examples/{script}.py table docs/{page}"


def test_precisions_are_trained_once_and_compared(
    scripts: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    precision = scripts("precision")
    line = [
        "train",
        "--model",
        "mlp(hidden=8)",
        "--data",
        "digits",
        "--device",
        "cpu",
        "--epochs",
        "1",
        "--out",
        "found",
    ]
    done = CliRunner().invoke(precision.app, line)
    assert done.exit_code == 0, done.output
    assert len(list(Path("found").iterdir())) == len(done.output.splitlines()) == 6
    assert CliRunner().invoke(precision.app, line).output == ""
    table = precision.fill_page("<!-- precision -->\nold\n<!-- /precision -->", Path("found"))
    assert re.search(r"\| float32 \|( \d+\.\d\d % \|){4} \d\.\d\d \|\n\| bf16 \|", table)
    assert "old" not in table


def test_every_preset_of_the_page_can_be_built() -> None:
    text = (ROOT / "docs" / "hardened.md").read_text(encoding="utf-8")
    section = text.split("## Presets per threat model")[1].split("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("|")][2:]
    specs = [spec for row in rows for spec in re.findall(r"`([^`]+)`", row)]
    assert len(rows) == 5
    assert len(specs) >= len(rows)
    for spec in specs:
        build(DEFENSES, spec, "defense")
