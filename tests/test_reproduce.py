"""Reproducing the paper: what is run, that it resumes, and that the pages say what the files say."""

import base64
import io
import json
import math
import re
import shlex
import subprocess
from copy import deepcopy
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from gradveil import data, metrics, paper, tree
from gradveil.attacks import ATTACKS
from gradveil.cli import app, commands  # noqa: F401
from gradveil.core import Batch, Reconstruction
from gradveil.data.cifar import LAYOUTS
from gradveil.defenses import DEFENSES
from gradveil.errors import ConfigError, NeedError
from gradveil.gradients import local_update
from gradveil.reproduce import (
    SCALES,
    Session,
    attacked,
    board,
    cards,
    entries,
    figures,
    own_cards,
    pages,
    pictures,
    plots,
    run,
    runner,
    scored,
    store,
    tables,
    trained,
    view,
    weights,
)
from gradveil.reproduce.cells import AttackCell, TrainingCell, definition, key
from gradveil.reproduce.entry import Entry
from gradveil.reproduce.figures import Figure
from gradveil.reproduce.pictures import victims
from gradveil.spec import build
from gradveil.training import load_checkpoint
from gradveil.training.run import CHECKPOINT

QUICK, FULL = SCALES["quick"], SCALES["full"]
TINY = replace(QUICK, match="steps=4, tv=0.05", pictures=2)
REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "results"


def cells(name: str, scale: Any = FULL) -> list[AttackCell]:
    return [e.cell for e in entries(name, scale) if isinstance(e.cell, AttackCell)]


@pytest.fixture
def in_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Weights and runs go to a folder of the test's own."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def do(scale: Any, folder: Path, pattern: str, name: str = "all", **fields: Any) -> list[Any]:
    session = Session(scale=scale, folder=folder, device="cpu", command="gradveil reproduce", **fields)
    return run(name, session, pattern=pattern)


# What is run


@pytest.mark.parametrize("scale", [QUICK, FULL], ids=lambda s: s.name)
def test_every_cell_names_known_objects_and_has_a_file_of_its_own(scale: Any) -> None:
    kept: dict[str, Any] = {}
    for entry in entries("all", scale):
        cell = entry.cell
        assert kept.setdefault(key(cell), cell) == cell, "two cells share a file"
        if isinstance(cell, AttackCell):
            build(ATTACKS, cell.attack_text, "attack")
            build(DEFENSES, cell.defense_text, "defense")
        elif isinstance(cell, TrainingCell):
            build(DEFENSES, cell.settings.defense, "defense")


def test_every_privacy_and_accuracy_value_the_paper_prints_has_a_line() -> None:
    printed = {name: [v for e in entries(name, FULL) for v in e.paper.values()] for name in tables.TABLES}
    four = paper.tables()["tables"]["main_four_attacks"]
    privacy = [
        v
        for attack in ("rgap", "ig", "gi", "rob")
        for metric in four[attack].values()
        for v in metric.values()
        if v is not None
    ]
    accuracy = [v for v in four["final_model_accuracy_percent"].values() if isinstance(v, float)]
    assert sorted(printed["main"]) == sorted(privacy + accuracy)
    assert len(printed["parameters"]) == 6 * 3
    assert len(printed["models"]) == 2 * 2 * 4 * 2 * 2
    assert len(printed["cost"]) == 24 + 16
    assert len(printed["topk95"]) == 8


def test_the_full_scale_is_the_papers() -> None:
    ig = next(c for c in cells("main") if c.attack == "ig" and c.defense == "dgp")
    assert (ig.model, ig.data, ig.pictures, ig.batch_size) == ("resnet18", "cifar10", 20, 1)
    attack: Any = build(ATTACKS, ig.attack_text, "attack")
    assert (attack.steps, attack.lr, attack.masked, attack.weighting) == (2500, 0.1, "never", "none")
    rob = next(c for c in cells("main") if c.attack == "rob")
    assert (rob.batch_size, rob.model) == (9, "resnet18")
    run_ = next(e.cell for e in entries("main", FULL) if isinstance(e.cell, TrainingCell))
    assert (run_.settings.users, run_.settings.batch_size, run_.settings.epochs) == (10, 32, 100)


def test_beyond_has_the_attackers_and_settings_the_paper_leaves_out() -> None:
    found = cells("beyond")
    names = {c.attack for c in found}
    assert {"ig+mask", "gi+mask", "ig+band", "ig+chain", "rob+fit", "rgap+mask"} <= names
    assert {c.attack for c in found if c.defense == "adgp"} >= {"ig", "gi", "rob", "rgap", "ig+mask", "ig+band"}
    assert {c.epochs for c in found} == {0, 1, 10, 100}
    assert {c.in_turn for c in found if c.local_steps > 1} == {True, False}
    assert any(c.labels == "inferred" for c in found)
    assert any(c.rounds for c in found)
    alphas = {e.cell.settings.alpha for e in entries("beyond", FULL) if isinstance(e.cell, TrainingCell)}
    assert len(alphas) == 3


def test_the_most_telling_cells_come_first_and_each_once() -> None:
    work = tables.worklist("all", FULL, (0, 1))
    assert len({key(c) for c in work}) == len(work)
    first = [c for c in work[:12] if isinstance(c, AttackCell)]
    assert len(first) == 12
    assert all(c.attack in tables.FIRST and c.defense in tables.URGENT and c.seed == 0 for c in first)


def test_batches_hold_different_labels_or_one() -> None:
    cell = QUICK.attack("ig", "none", batch_size=4)
    photos, chosen = victims(cell, None)
    assert len(set(photos.labels[chosen].tolist())) == 4
    photos, chosen = victims(replace(cell, one_label=True), None)
    assert len(set(photos.labels[chosen].tolist())) == 1
    assert len(set(chosen)) == 4
    with pytest.raises(ConfigError, match="has"):
        victims(replace(cell, pictures=4000), None)


# Running


def test_a_cell_is_one_file_with_every_picture_and_is_not_run_twice(in_scratch: Path) -> None:
    pattern = "ig_dgp_cnn6_photos_seed0"
    (outcome,) = do(TINY, in_scratch, pattern, "main")
    assert outcome.status == "done", outcome.note
    result = store.load(store.path_of(in_scratch, "quick", outcome.cell))
    assert result["scale"] == "quick"
    assert "QUICK" in result["note"]
    assert {"command", "environment", "seconds", "seed", "n", "victims", "paper"} <= result.keys()
    assert result["environment"].keys() >= {"commit", "cpu", "gpu", "time"}
    assert result["paper"]["main: IG on ResNet18: dgp"] == {"lpips": 0.316, "ssim": 0.287}
    assert all(len(values) == 2 for values in result["scores"].values())
    assert {"ssim", "paper_ssim"} <= result["scores"].keys()
    assert 0.5 < result["distance"][0] < 1
    strip = in_scratch / "quick" / f"{pattern}.webp"
    assert 0 < strip.stat().st_size < 20_000
    assert not list(in_scratch.glob("**/*.tmp"))
    before = strip.stat().st_mtime_ns
    (again,) = do(TINY, in_scratch, pattern, "main")
    assert again.status == "recorded"
    assert strip.stat().st_mtime_ns == before
    (changed,) = do(replace(TINY, match="steps=5, tv=0.05"), in_scratch, pattern, "main")
    assert changed.status == "done", "another definition is another result"
    # A field that came after the result was recorded had its default then.
    path = in_scratch / "quick" / f"{pattern}.json"
    older = json.loads(path.read_text())
    del older["definition"]["attack"]["tv_first"]
    path.write_text(json.dumps(older))
    (same,) = do(replace(TINY, match="steps=5, tv=0.05"), in_scratch, pattern, "main")
    assert same.status == "recorded"


def test_what_was_recorded_before_a_time_is_run_again_once(in_scratch: Path) -> None:
    name = "rob_none_lenet_*_seed0"
    (first,) = do(TINY, in_scratch, name, "models")
    past, future = (datetime.now(UTC) + timedelta(hours=h) for h in (-1, 1))
    assert [o.status for o in do(TINY, in_scratch, name, "models", since=past)] == ["recorded"]
    assert [o.status for o in do(TINY, in_scratch, name, "models", since=future)] == ["done"]
    assert first.status == "done"
    words = ["reproduce", "models", "--cells", name, "--out", str(in_scratch), "--dry"]
    assert "to do" in CliRunner().invoke(app, [*words, "--since", "2999-01-01"]).output
    assert "recorded" in CliRunner().invoke(app, [*words, "--since", "2000-01-01"]).output


def test_time_that_runs_out_leaves_no_file_and_a_broken_cell_stops_nothing(in_scratch: Path) -> None:
    (outcome,) = do(QUICK, in_scratch, "ig_dgp_cnn6_photos_seed0", "main", minutes=1e-9)
    assert outcome.status == "no time"
    broken = replace(TINY, match="steps=-1")
    first, second = do(broken, in_scratch, "*[gb]_none_cnn6_photos_seed0", "main")
    assert (first.status, second.status) == ("failed", "done")
    assert "steps" in first.note
    assert [p.name for p in (in_scratch / "quick").glob("*.json")] == [f"{key(second.cell)}.json"]


def test_an_attack_that_ran_out_of_time_goes_on_where_it_stopped(
    in_scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, scale = "ig_dgp_cnn6_photos_seed0", replace(TINY, match="steps=12, tv=0.05")
    monkeypatch.setattr(runner, "WATCH_EVERY", 3)
    do(scale, in_scratch / "straight", name, "main")
    steps: list[int] = []
    check = runner._check

    def impatient(session: Session, progress: Any = None) -> None:
        steps.append(progress.step)
        if len(steps) in (2, 4):
            raise runner.OutOfTimeError("for now")
        check(session, progress)

    monkeypatch.setattr(runner, "_check", impatient)
    statuses = [do(scale, in_scratch / "halting", name, "main")[0].status for _ in range(3)]
    assert (statuses, steps) == (["no time", "no time", "done"], [3, 6, 9, 12])
    one, other = (store.load(next((in_scratch / place / "quick").glob("*.json"))) for place in ("straight", "halting"))
    assert (one["scores"], one["loss"]) == (other["scores"], other["loss"])
    assert (one.get("resumed"), other.get("resumed")) == (None, True)
    assert not list((weights.RUNS / "searches").iterdir()), "nothing is left behind"


def test_cells_attacked_together_find_what_they_find_alone(in_scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = "ig+mask_none_*_photos_seed0,ig+mask_dgp_*_photos_seed0,ig+mask_dgp_*_photos_round1_seed0"
    scale = replace(TINY, adaptive="steps=4, tv=0.05")
    alone = do(scale, in_scratch / "alone", pattern, "beyond")
    monkeypatch.setattr(runner, "TOGETHER", {"cpu": 10})
    together = do(scale, in_scratch / "together", pattern, "beyond")
    assert [key(o.cell) for o in together] == [key(o.cell) for o in alone]
    sizes = {}
    for outcome in together:
        one, other = (
            store.load(store.path_of(in_scratch / place, "quick", outcome.cell)) for place in ("alone", "together")
        )
        assert one["scores"]["mse"] == pytest.approx(other["scores"]["mse"], rel=1e-3)
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        sizes[outcome.cell.model, outcome.cell.rounds] = other.get("cells_together")
    assert sizes["cnn6", 0] == sizes["cnn6", 1] == 3, "whatever their defense and their round"


def test_a_cell_that_breaks_among_others_is_reported_alone(in_scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "TOGETHER", {"cpu": 10})
    real = attacked.prepare

    def prepare(cell: AttackCell, place: Any) -> Any:
        if cell.defense == "dgp":
            raise NeedError("no such thing")
        return real(cell, place)

    monkeypatch.setattr(attacked, "prepare", prepare)
    outcomes = do(TINY, in_scratch, "ig_none_cnn6_*,ig_topk_cnn6_*_seed0,ig_dgp_cnn6_photos_seed0", "main")
    assert {o.cell.defense: o.status for o in outcomes} == {"none": "done", "topk": "done", "dgp": "impossible"}


def test_cells_go_together_only_while_there_is_time_and_break_together_once(
    in_scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "TOGETHER", {"cpu": 10})
    prepared: list[str] = []
    sizes: list[int] = []
    prepare, guess = attacked.prepare, attacked.guess

    def noted(cell: AttackCell, place: Any) -> Any:
        prepared.append(key(cell))
        return prepare(cell, place)

    def breaking(cases: Any, place: Any) -> Any:
        sizes.append(len(cases))
        if len(cases) > 1:
            raise KeyError("one of them")
        return guess(cases, place)

    monkeypatch.setattr(attacked, "prepare", noted)
    pattern = "ig_none_cnn6_photos_seed0,ig_topk_cnn6_photos_seed0,ig_dgp_cnn6_photos_seed0"
    assert {o.status for o in do(TINY, in_scratch, pattern, "main", minutes=1e-9)} == {"no time"}
    assert not prepared
    done = do(TINY, in_scratch / "timed", pattern, "main", minutes=10)
    assert {o.status for o in done} == {"done"}
    files = [store.load(store.path_of(in_scratch / "timed", "quick", o.cell)) for o in done]
    assert [f.get("cells_together") for f in files] == [None, 2, 2], "the first tells how long they take"
    monkeypatch.setattr(attacked, "guess", breaking)
    assert {o.status for o in do(TINY, in_scratch / "broken", pattern, "main")} == {"done"}
    assert sizes == [3, 1, 1, 1]


def test_a_transforming_defense_is_scored_against_both_pictures(in_scratch: Path) -> None:
    (outcome,) = do(TINY, in_scratch, "rob_ats_*", "main")
    assert outcome.status == "done", outcome.note
    lines = {e.label: e for e in entries("main", TINY) if e.cell == outcome.cell}
    found = {n: figures.figures_of(e, figures.results_of(in_scratch, "quick", e)) for n, e in lines.items()}
    assert found["ats_r"]["plain_ssim"].mean > found["ats_t"]["plain_ssim"].mean + 0.3


def test_copies_of_private_pictures_are_left_out_of_the_strip(in_scratch: Path) -> None:
    (outcome,) = do(TINY, in_scratch, "rob_none_*_seed0", "main")
    result = store.load(store.path_of(in_scratch, "quick", outcome.cell))
    with Image.open(in_scratch / "quick" / f"{key(outcome.cell)}.webp") as strip:
        tiles = torch.from_numpy(np.array(strip)).view(32, 9, 32, 3).float() / 255
    copies = torch.tensor(result["scores"]["mse"]) < 1e-4
    assert bool(copies.any())
    spread = tiles.std(dim=(0, 2)).amax(1)
    assert bool((spread[copies] < 0.02).all()), "a plain tile has no contrast"


def test_an_upload_that_carries_nothing_is_not_scored(in_scratch: Path) -> None:
    cell = TINY.attack("ig+mask", "hardened", local_steps=2)
    place = attacked.Place(TINY, None, torch.device("cpu"), None)
    with pytest.raises(NeedError, match="sent nothing"):
        attacked.prepare(cell, place)
    (released,) = do(TINY, in_scratch, "rob+fit_hardened_*", "beyond")
    assert released.status == "done", released.note
    result = store.load(store.path_of(in_scratch, "quick", released.cell))
    assert result["bytes_up"] > 1000
    assert result["waited"] == [3], "4 batches of 9 make 32 examples"


def test_what_the_paper_leaves_open_is_a_switch(in_scratch: Path) -> None:
    scale = replace(TINY, stand_ins={}, switches={"rounds": 1, "labels": "inferred", "mode": "train"})
    found = {key(e.cell): e.cell for e in entries("all", scale) if isinstance(e.cell, AttackCell)}
    assert "ig_dgp_resnet18_photos_round1_inferred_trainmode_seed0" in found
    assert "ig+mask_dgp_resnet18_photos_round4_inferred_trainmode_seed0" in found, "what a line says itself stays"
    assert all(cell.rounds == 0 for cell in found.values() if cell.local_steps > 1)
    words = ["reproduce", "main", "--cells", "ig_dgp_*", "--device", "cpu", "--out", "results", "--mode"]
    done = CliRunner().invoke(app, [*words, "train", "--rounds", "1", "--labels", "inferred"])
    assert done.exit_code == 0, done.output
    assert (in_scratch / "results/quick/ig_dgp_cnn6_photos_round1_inferred_trainmode_seed0.json").exists()
    assert "mode train" in (in_scratch / "runs/reproduce/main-quick-rounds-1-labels-inferred-mode-train.md").read_text()
    assert "mode must be" in str(CliRunner().invoke(app, [*words, "tain"]).exception)


def test_a_client_in_training_mode_normalises_by_its_batch(in_scratch: Path) -> None:
    model = replace(TINY, stand_ins={}, adaptive="steps=1", pictures=1)
    place = attacked.Place(model, None, torch.device("cpu"), None)
    sent = [attacked.prepare(model.attack("ig+mask", "none", mode=mode), place).sent[0] for mode in ("eval", "train")]
    assert not any(torch.allclose(g, sent[1].grads[name]) for name, g in sent[0].grads.items() if "conv" in name)


def test_a_result_from_before_a_setting_existed_had_its_default(tmp_path: Path) -> None:
    cell = FULL.attack("ig", "dgp")
    result = fake(cell, 0.1, 0.3)
    result["cell"] = {name: value for name, value in result["cell"].items() if name != "mode"}
    assert figures.is_of(result, cell)
    assert not figures.is_of(result, replace(cell, mode="train"))


def test_fedavg_and_chained_cells_run(in_scratch: Path) -> None:
    scale = replace(TINY, pictures=1)
    done = do(scale, in_scratch, "ig+mask_*dgp_*_local2_*") + do(scale, in_scratch, "ig+chain_dgp_*")
    assert [o.status for o in done] == ["done"] * 3, [o.note for o in done]


def test_local_steps_in_turn_take_a_picture_each_and_the_attacker_knows(in_scratch: Path) -> None:
    cell = TINY.attack("ig+mask", "none", "lenet", batch_size=2, local_steps=2, in_turn=True)
    case = attacked.prepare(cell, attacked.Place(TINY, None, torch.device("cpu"), None))
    assert case.attack.split
    seen, (inputs, labels) = case.seen[0], case.sent[0].batch
    steps = [Batch(inputs[i : i + 1], labels[i : i + 1]) for i in range(2)]
    update = local_update(deepcopy(seen.model), seen.loss_fn, steps, attacked.LOCAL_RATE)
    for name, sent in case.sent[0].grads.items():
        torch.testing.assert_close(sent, update[name])
    swapped = local_update(deepcopy(seen.model), seen.loss_fn, steps[::-1], attacked.LOCAL_RATE)
    assert not all(torch.equal(sent, swapped[name]) for name, sent in case.sent[0].grads.items())
    with pytest.raises(ValueError, match="shared out"):
        replace(cell, local_steps=3)


def test_a_trained_model_is_trained_once_and_gone_on_from(in_scratch: Path) -> None:
    scale = replace(TINY, pictures=1)
    outcomes = do(scale, in_scratch, "ig+mask_none_*_epochs?_*")
    assert [o.status for o in outcomes] == ["done", "done"], [o.note for o in outcomes]
    runs = sorted(p.name for p in (in_scratch / "runs" / "reproduce").iterdir())
    assert [name.rpartition("_")[2] for name in runs] == ["epochs1", "epochs2"]
    results = [json.loads((in_scratch / "runs/reproduce" / n / "result.json").read_text()) for n in runs]
    assert results[1]["rounds_done"] == 2 * results[0]["rounds_done"]
    for outcome, name in zip(outcomes, runs, strict=True):  # each result names the weights that were attacked
        kept = load_checkpoint(in_scratch / "runs/reproduce" / name / CHECKPOINT).model
        assert store.load(store.path_of(in_scratch, "quick", outcome.cell))["weights"] == tree.digest(kept)


# Accuracies


def test_training_runs_are_found_by_what_was_trained(in_scratch: Path) -> None:
    (outcome,) = do(QUICK, in_scratch, "train_dgp_lenet_digits_seed0", "figures")
    assert outcome.status == "done", outcome.note
    assert isinstance(outcome.cell, TrainingCell)
    path = store.path_of(in_scratch, "quick", outcome.cell)
    recorded = in_scratch / "training" / "any-name.json"
    recorded.parent.mkdir()
    result = store.load(path)
    result["settings"] |= {"defense": "error_feedback(dual_prune)", "precision": "bf16", "seed": 7}
    result["settings"]["lr"] = "0.1, 50:0.01, 70:0.005"
    recorded.write_text(json.dumps(result))
    found = trained.recorded(in_scratch, outcome.cell, "quick")
    assert [r["settings"]["seed"] for r in found] == [0, 7]
    result["settings"] |= {"seed": 8, "users": 3}
    recorded.write_text(json.dumps(result))
    assert [r["settings"]["seed"] for r in trained.recorded(in_scratch, outcome.cell, "quick")] == [0]


def test_training_for_the_tables_takes_the_arithmetic_that_suits_the_machine() -> None:
    wanted = FULL.train("dgp", "lenet").settings
    assert (wanted.engine, wanted.precision) == ("fast", "bf16")
    here = weights.placed(wanted, "somewhere", "cpu")
    assert replace(here, root="", device="auto", precision="bf16") == wanted
    assert (here.root, here.device, here.precision) == ("somewhere", "cpu", "float32")


def test_missing_full_scale_runs_are_named_not_trained(in_scratch: Path) -> None:
    (outcome,) = do(FULL, in_scratch, "train_dgp_resnet18_cifar10_seed0", "main")
    assert outcome.status == "untrained"
    assert "gradveil train" in outcome.note
    assert "--model resnet18" in outcome.note


@pytest.mark.parametrize("copy", ["A", "B"])  # the original, and another copy of the data
def test_the_command_printed_for_a_missing_training_makes_it(copies: Path, in_scratch: Path, copy: str) -> None:
    training = {**QUICK.training, "data": "cifar10", "batch_size": 4}
    scale, out = replace(QUICK, name="full", data="cifar10", training=training), in_scratch / "my results"
    name, root = "train_none_lenet_cifar10_seed0", str(copies / copy)
    (missing,) = do(scale, out, name, "figures", root=root)
    assert missing.status == "untrained"
    train, *keep = missing.note.split(" && ")
    trained_ = CliRunner().invoke(app, shlex.split(train)[1:])
    assert trained_.exit_code == 0, trained_.output
    for line in keep:
        subprocess.run(shlex.split(line), check=True)
    assert [o.status for o in do(scale, out, name, "figures", root=root)] == ["recorded"]


@pytest.mark.parametrize("out", ["file", "file/below"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(
    in_scratch: Path, monkeypatch: pytest.MonkeyPatch, out: str
) -> None:
    (in_scratch / "file").write_text("")
    monkeypatch.setattr(attacked, "prepare", lambda *_: pytest.fail("a cell was begun"))
    words = ["reproduce", "main", "--cells", "rob_none_*", "--device", "cpu", "--out", out]
    refused = CliRunner().invoke(app, words)
    assert isinstance(refused.exception, ConfigError)  # a line and exit code 2
    assert f"results cannot be written to {out}/quick" in str(refused.exception)
    assert CliRunner().invoke(app, [*words, "--dry"]).exit_code == 0, "listing writes nothing"


def test_each_folder_of_results_has_a_table_of_its_own(in_scratch: Path) -> None:
    for out in ("results", "other"):
        words = ["--cells", "rob_none_*", "--device", "cpu", "--minutes", "0", "--out", out]
        assert CliRunner().invoke(app, ["reproduce", "main", *words]).exit_code == 0
    assert sorted(str(p) for p in Path().glob("**/*.md")) == ["other/main-quick.md", "runs/reproduce/main-quick.md"]


def test_what_was_stopped_is_promised_no_more_than_it_keeps(in_scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(attacked, "prepare", stop)
    stopped = CliRunner().invoke(app, ["reproduce", "main", "--cells", "rob_none_*", "--device", "cpu"])
    assert stopped.exit_code == 130
    assert "what else was under way from the start of its cell" in stopped.output


# Pages


def test_the_results_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    assert page == pages.render(RESULTS), "run: gradveil reproduce render"


def test_the_plots_are_up_to_date() -> None:
    lines = entries("figures", FULL)
    drawn = {
        "results-distance.png": plots.distances(lines, RESULTS, "full"),
        "results-accuracy.png": plots.accuracies(lines, RESULTS, "full"),
    }
    assert set(drawn) == set(pages.PLOTS.values())
    for name, from_data in drawn.items():
        with Image.open(REPOSITORY / "docs" / name) as picture:
            assert picture.text[plots.DATA] == plots.digest(from_data), "run: gradveil reproduce render"


def test_plots_show_every_point_and_curve_and_say_what_they_are_of(tmp_path: Path) -> None:
    lines = entries("figures", FULL)
    points = plots.distances(lines, RESULTS, "full")
    assert {model: {kind: len(s["distance"]) for kind, s in kinds.items()} for model, kinds in points.items()} == {
        model: {"top-k": len(tables.KEPT), "DGP": len(tables.TOPS) + 1} for model in ("resnet18", "lenet")
    }
    assert all(
        len(values) == len(s["lpips"]) for kinds in points.values() for s in kinds.values() for values in s.values()
    )
    curves = plots.accuracies(lines, RESULTS, "full")
    assert {"none", "dgp", "dgp-nofeedback"} <= set.intersection(*(set(lines) for lines in curves.values()))
    assert len(curves) == 4
    for png in pages.plots_of(RESULTS).values():
        with Image.open(io.BytesIO(png)) as picture:
            assert picture.width > 1000
    assert pages.plots_of(tmp_path) == {}


def test_the_leaderboard_page_is_up_to_date() -> None:
    page = (REPOSITORY / "docs" / "leaderboard.md").read_text(encoding="utf-8")
    assert page == board.render(RESULTS), "run: gradveil leaderboard render"


def test_recorded_results_are_small_and_say_what_they_are() -> None:
    for scale in SCALES:
        assert all(store.load(path)["scale"] == scale for path in (RESULTS / scale).glob("*.json"))
    quick = [p.stat().st_size for p in (RESULTS / "quick").glob("*")]
    assert sum(quick) < 1_000_000
    assert all(p.stat().st_size < 100_000 for p in RESULTS.glob("**/*.webp"))


def test_the_papers_tables_show_beside_each_line_what_knowing_the_defense_adds(tmp_path: Path) -> None:
    for attack, ssim in (("ig", 0.2), ("ig+mask", 0.9)):
        for defense in ("none", "dgp"):
            cell = FULL.attack(attack, defense)
            store.write(store.path_of(tmp_path, "full", cell), fake(cell, ssim, 0.5))
    part = pages.render(tmp_path).partition("### IG on ResNet18")[2].partition("<details>")[0]
    rows = {row.split("|")[1].strip(): row.split("|") for row in part.splitlines() if row.startswith("| ")}
    told = rows[""].index(" told the defense: SSIM, identified ")
    assert [rows[defense][told] for defense in ("none", "dgp")] == [" – ", " **0.900** "]


def test_the_page_opens_with_what_each_attack_finds_told_the_defense_or_not(tmp_path: Path) -> None:
    for attack, ssim, identified in (("ig", 0.2, 0.25), ("ig+mask", 0.9, 0.75)):
        result = fake(cell := FULL.attack(attack, "dgp"), ssim, 0.5)
        result["scores"]["identified"] = [float(i < 4 * identified) for i in range(4)]
        result["floor"] = {"grey": {"ssim": 0.1, "identified": 0.0}, "mean": {"ssim": 0.23, "identified": 0.12}}
        store.write(store.path_of(tmp_path, "full", cell), result)
    short = pages.render(tmp_path).partition("## In short")[2].partition("##")[0]
    assert "| dgp | 0.20, **0.90**, 75 % | – | – | – | – |" in short
    assert "| topk | – | – | – | – | – |" in short
    assert "blind guesses reach 0.23" in short
    assert "(blind: 12)" in short.replace("\n", " ")


def test_both_attackers_of_a_cell_are_compared_on_the_same_seeds(tmp_path: Path) -> None:
    recorded = {"ig": {0: 0.2, 1: 0.4, 2: 0.9}, "ig+mask": {0: 0.6, 1: 0.8}}
    for attack, seeds in recorded.items():
        for seed, ssim in seeds.items():
            cell = replace(FULL.attack(attack, "dgp"), seed=seed)
            store.write(store.path_of(tmp_path, "full", cell), fake(cell, ssim, 0.5, seed))
    text = pages.render(tmp_path)
    assert "| dgp | 0.30, **0.70** (n 8) | – |" in text, "seed 2 has one attacker only"
    part = text.partition("### IG on ResNet18")[2].partition("<details>")[0]
    assert "| **0.700**, n 8 | 12 | 0, 1, 2 |" in part
    for seed in (1, 2):  # of two seeds each, but not the same
        store.path_of(tmp_path, "full", replace(FULL.attack("ig", "dgp"), seed=seed)).unlink()
    store.path_of(tmp_path, "full", FULL.attack("ig+mask", "dgp")).unlink()
    assert "| dgp | 0.20 | – |" in pages.render(tmp_path), "no seed has both"


def test_the_first_table_says_where_a_row_mixes_things() -> None:
    page = (REPOSITORY / "docs" / "results.md").read_text(encoding="utf-8")
    rows, _, marks = page.partition("## In short")[2].partition("##")[0].partition("\n¹ ")
    trained_otherwise = re.findall(r"^\| (\S+) .* ² \|$", rows, re.MULTILINE)
    assert trained_otherwise == ["soteria", "outpost", "hardened1"]
    assert all(name in marks.partition("² ")[2] for name in trained_otherwise)
    assert "| ats ¹ |" in rows


def test_every_note_stands_under_a_heading_that_there_is() -> None:
    headings = {entry.part for entry in entries("all", FULL)}
    assert {*pages.notes("table"), *pages.notes("recorded")} <= headings


def test_the_page_names_what_was_not_run_and_counts_what_was(tmp_path: Path) -> None:
    done = FULL.attack("ig", "topk", batch_size=2)
    store.write(store.path_of(tmp_path, "full", done), fake(done, 0.5, 0.5))
    text = pages.render(tmp_path)
    assert re.search(r"\| \[figures\]\(#figures\) \|.*\| 1 of \d+ \|", text)
    part = text.partition("### Batches of 2 and 4, IG")[2].partition("###")[0]
    assert "| batch 2, topk |" in part
    assert "| batch 2, none |" not in part, "a line without any figure is named below the table"
    assert "Not run: batch 2, none; batch 2, dgp; batch 4, none; batch 4, topk; batch 4, dgp." in part
    assert "PRECODE has no line" in text.partition("### R-GAP on CNN6")[2].partition("###")[0]


def test_the_page_names_every_commit_and_machine_behind_a_line(tmp_path: Path) -> None:
    dgp = FULL.attack("ig", "dgp")
    for seed, commit in ((0, "aaaaaaaaaa"), (1, "bbbbbbbbbb")):
        result = fake(dgp, 0.5, 0.5, seed)
        store.write(
            store.path_of(tmp_path, "full", replace(dgp, seed=seed)),
            result | {"environment": result["environment"] | {"commit": commit}},
        )
    assert "| 0, 1 | NVIDIA H200, 2026-01-02, `aaaaaaaaaa`, `bbbbbbbbbb` |" in pages.render(tmp_path)


def test_identification_stands_beside_its_blind_floor(tmp_path: Path) -> None:
    dgp = FULL.attack("ig", "dgp")
    result = fake(dgp, 0.5, 0.5)
    result["scores"]["identified"] = [1.0, 0.0, 0.0, 0.0]
    result["floor"] = {"grey": {"ssim": 0.1, "identified": 0.0}, "mean": {"ssim": 0.2, "identified": 0.12}}
    store.write(store.path_of(tmp_path, "full", dgp), result)
    assert "| 0.200 | 25 (12) | 4 |" in pages.render(tmp_path)


def test_a_reason_is_written_once_and_pointed_at_afterwards(tmp_path: Path) -> None:
    for cell in (FULL.attack("rob", "none"), FULL.attack("rob", "dgp"), FULL.attack("rob", "dgp", data="cifar100")):
        result = fake(cell, 0.5, 0.1)
        store.write(store.path_of(tmp_path, "full", cell), result | {"digests": LAYOUTS[cell.data].digests})
    text = pages.render(tmp_path)
    (entry,) = (e for e in entries("models", FULL) if e.cell == FULL.attack("rob", "dgp", data="cifar100"))
    assert text.count(figures.reason(entry, "ssim")) == 1
    part = text.partition("### Rob, CIFAR-100")[2].partition("###")[0]
    assert "- resnet18, dgp (LPIPS, SSIM7): as for dgp under [Rob on ResNet18](#rob-on-resnet18)." in part


def test_a_reason_for_nearly_all_lines_names_the_others(tmp_path: Path) -> None:
    run: list[tuple[Entry, dict[str, Figure]]] = []
    for i in range(6):
        paper = {"mib": 1.0, **({"seconds": 1.0} if i < 2 else {})}
        run.append((Entry("", f"line {i}", FULL.price("dgp", "lenet"), paper), {}))
    mib = {entry.label: ["mib"] for entry, _ in run}
    assert pages._which(mib, run) == "all lines (MiB)"
    last = mib.popitem()
    assert pages._which(mib, run) == "all lines but line 5 (MiB)"
    assert pages._which(dict([last]), run) == "line 5 (MiB)"
    assert pages._which({"line 0": ["seconds"], "line 1": ["seconds"]}, run) == "all lines (seconds)"
    assert pages._which({"line 0": ["mib"], "line 1": ["mib"]}, run) == "line 0 (MiB); line 1 (MiB)"
    assert pages._which({"line 0": ["mib", "seconds"], "line 1": ["mib"]}, run[:2]).startswith("line 0 (MiB, seconds);")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[]", "got list"),
        ("null", "got NoneType"),
        ("{}", "got kind None"),
        ('{"kind": []}', r"got kind \[\]"),
        ('{"kind": "attack", "cell": {}, "seed": 0}', "lacks definition, environment, n, scores"),
        ("[" * 100_000, "cannot read"),
    ],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str, complaint: str) -> None:
    cell = FULL.attack("ig", "dgp")
    path = store.path_of(tmp_path, "full", cell)
    path.parent.mkdir()
    path.write_text(content)
    for read in (lambda: pages.render(tmp_path), lambda: do(FULL, tmp_path, key(cell), "main", minutes=0.0)):
        with pytest.raises(ConfigError, match=complaint) as error:
            read()
        assert str(path) in str(error.value)


def test_a_page_is_not_overwritten_by_one_without_results(in_scratch: Path) -> None:
    (in_scratch / "full").mkdir()
    page = in_scratch / "results.md"
    page.write_text("kept")
    refused = CliRunner().invoke(app, ["reproduce", "render", "--out", str(in_scratch), "--page", str(page)])
    assert isinstance(refused.exception, ConfigError)
    assert "holds no result of full scale" in str(refused.exception)
    assert page.read_text() == "kept"


def fake(cell: AttackCell, ssim: float, lpips: float, seed: int = 0) -> dict[str, Any]:
    cell = replace(cell, seed=seed)
    scores = {"ssim": [ssim] * 4, "paper_ssim": [ssim] * 4, "lpips": [lpips] * 4, "psnr": [20.0] * 4, "mse": [0.01] * 4}
    where = {"gpu": "NVIDIA H200", "cores": 16, "commit": "0123456789abcdef", "time": "2026-01-02T03:04:05+00:00"}
    return {
        "kind": "attack",
        "scale": "full",
        "cell": vars(cell),
        "environment": where,
        "device": "cuda",
        "date": "2026-01-02",
        "seconds": 60.0,
        "seed": seed,
        "n": 4,
        "victims": [1, 2, 3, 4],
        "definition": definition(cell),
        "digests": {"test": LAYOUTS["cifar10"].digests["test"]},
        "scores": scores,
        "transformed_scores": None,
        "floor": {"grey": {"ssim": 0.1}},
        "distance": [0.9] * 4,
        "bytes_up": 10.0,
        "bytes_dense": 40.0,
    }


def test_the_page_sets_the_paper_beside_ours_and_says_why_they_differ(tmp_path: Path) -> None:
    dgp = FULL.attack("ig", "dgp")
    for seed, lpips in ((0, 0.310), (1, 0.322)):
        store.write(store.path_of(tmp_path, "full", replace(dgp, seed=seed)), fake(dgp, 0.09, lpips, seed))
    none = FULL.attack("rob", "none")
    store.write(store.path_of(tmp_path, "full", none), fake(none, 1.0, 0.0))
    text = pages.render(tmp_path).partition("### IG on ResNet18")[2]
    line = next(row for row in text.splitlines() if row.startswith("| dgp |"))
    assert "0.316 ± 0.006" in line
    assert "0.316 |" in line
    assert "0.287" in line
    assert "NVIDIA H200, 2026-01-02, `0123456789`" in line
    assert "| 8 | 0, 1 |" in line
    sentences = [row for row in text.splitlines() if row.startswith("- dgp ")]
    assert len(sentences) == 1, "one line of the page differs"
    assert sentences[0].startswith("- dgp (SSIM7): "), "LPIPS agrees, SSIM does not"
    assert "tested (`results/reasons/ig_smooth_deep.json`): the weight of the total variation" in sentences[0]
    assert "never isolates the last bin" in text
    assert "not run" in text
    # A result of an older definition of the cell is not passed off as this one.
    other = fake(dgp, 0.5, 0.5)
    other["cell"] = {**other["cell"], "attack_text": "inverting_gradients(steps=3)"}
    store.write(store.path_of(tmp_path, "full", dgp), other)
    assert len(figures.results_of(tmp_path, "full", Entry("", "", dgp))) == 1


def test_a_changed_default_makes_an_old_result_another_cell(tmp_path: Path) -> None:
    cell = FULL.attack("ig+mask", "hardened1")
    old = fake(cell, 0.2, 0.4)
    old["definition"]["defense"]["noise"] = 1.0
    store.write(store.path_of(tmp_path, "full", cell), old)
    assert figures.results_of(tmp_path, "full", Entry("", "", cell)) == []


def test_results_on_another_copy_of_the_data_stand_apart(tmp_path: Path) -> None:
    dgp = FULL.attack("ig", "dgp")
    path = store.path_of(tmp_path, "full", dgp)
    for digests in ({}, {"test": "0" * 16}):
        store.write(path, fake(dgp, 0.5, 0.5) | {"digests": digests})
        assert figures.results_of(tmp_path, "full", Entry("", "", dgp)) == []
        text = pages.render(tmp_path)
        assert f"| `{key(dgp)}` |  | 0.500 | 0.100 | 0.500 | 4 |" in text.partition("## Another copy of CIFAR-10")[2]
    store.write(path, fake(dgp, 0.5, 0.5))
    assert len(figures.results_of(tmp_path, "full", Entry("", "", dgp))) == 1
    assert "## Another copy" not in pages.render(tmp_path)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two tiny datasets in CIFAR-10's layout; the one in `A` counts as the original."""
    layout = LAYOUTS["cifar10"]
    rng = np.random.default_rng(0)
    for copy in "AB":
        folder = tmp_path / copy / layout.folder
        folder.mkdir(parents=True)
        for file in (*layout.train, *layout.test):
            records = rng.integers(0, 256, (20, 3073), dtype=np.uint8)
            records[:, 0] %= 10
            records.tofile(folder / file)
        (folder / layout.label_names).write_text("\n".join("abcdefghij"))
    digests = {split: data.load("cifar10", split=split, root=tmp_path / "A").digest for split in ("train", "test")}
    monkeypatch.setitem(LAYOUTS, "cifar10", replace(layout, digests=digests))
    pictures.load_split.cache_clear()
    runner.copy_at_hand.cache_clear()
    return tmp_path


def test_results_on_two_copies_of_the_data_never_take_each_others_place(copies: Path, in_scratch: Path) -> None:
    training = {**QUICK.training, "data": "cifar10", "batch_size": 4}
    scale = replace(TINY, data="cifar10", training=training)
    attack, train = "rob_none_lenet_cifar10_seed0", "train_none_lenet_cifar10_seed0"
    for copy, place in (("A", "quick"), ("B", "other-copy")):
        for _ in range(2):
            outcomes = [
                *do(scale, in_scratch / "r", attack, "models", root=str(copies / copy)),
                *do(scale, in_scratch / "r", train, "figures", root=str(copies / copy)),
            ]
        assert [o.status for o in outcomes] == ["recorded", "recorded"]
        for name in (attack, train):
            result = store.load(in_scratch / "r" / place / f"{name}.json")
            assert store.on_original(result) is (copy == "A")
            assert result["digests"]["test"] == data.load("cifar10", split="test", root=copies / copy).digest
    assert store.on_original(store.load(in_scratch / "r" / "quick" / f"{train}.json"))  # still
    runs = [json.loads((path / "result.json").read_text()) for path in Path("runs/reproduce").glob(f"{train}_*")]
    assert {run["digests"]["test"] for run in runs} == {
        data.load("cifar10", split="test", root=copies / copy).digest for copy in "AB"
    }


def test_listing_the_cells_downloads_nothing(in_scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.copy_at_hand.cache_clear()
    monkeypatch.delenv("GRADVEIL_DATA", raising=False)
    monkeypatch.setenv("HOME", str(in_scratch))
    monkeypatch.setattr("gradveil.data.cifar._fetch", lambda *_: pytest.fail("a download"))
    cell = FULL.attack("ig", "dgp")
    store.write(store.path_of(in_scratch / "results", "full", cell), fake(cell, 0.5, 0.5))
    listed = CliRunner().invoke(app, ["reproduce", "main", "--dry", "--scale", "full"])
    assert listed.exit_code == 0, listed.output
    assert "recorded" in listed.output


def test_a_run_that_diverges_is_a_result_without_accuracy(in_scratch: Path) -> None:
    wild = replace(QUICK, training={**QUICK.training, "lr": "1e30"})
    (outcome,) = do(wild, in_scratch, "train_dgp-nofeedback_cnn6_digits_seed0", "figures")
    assert outcome.status == "done", outcome.note
    entry = Entry("", "", outcome.cell)
    (result,) = figures.results_of(in_scratch, "quick", entry)
    assert result["status"] == "diverged"
    assert math.isnan(figures.figures_of(entry, [result])["accuracy"].mean)
    assert [o.status for o in do(wild, in_scratch, key(outcome.cell), "figures")] == ["recorded"]


def test_spread_is_of_pictures_or_of_seeds_whichever_is_wider() -> None:
    assert figures.summarise([[0.0, 1.0] * 50]) == Figure(0.5, pytest.approx(0.1))
    assert figures.summarise([[0.0] * 50, [1.0] * 50]).spread == pytest.approx(0.5)
    assert Figure(0.4, 0.05).leaves(0.3)
    assert not Figure(0.34, 0.05).leaves(0.3)
    assert not Figure(0.3004, 0.0).leaves(0.3)


def test_every_reason_belongs_to_some_cell() -> None:
    stems = {e.cell.stem for e in entries("all", FULL)}
    for known in figures.reasons():
        assert any(fnmatch(stem, known["cells"]) for stem in stems), known["cells"]


def test_a_reason_that_was_tested_names_recorded_experiments() -> None:
    tested = [known for known in figures.reasons() if "tested" in known]
    assert tested
    for known in tested:
        assert "checked" not in known, "one or the other"
        for name in (known["tested"], *re.findall(r"(\w+)\.json", known["reason"])):
            recorded = store.load(RESULTS / "reasons" / f"{name}.json")
            assert recorded["experiment"] == name
            assert recorded["lines"], name


def test_the_view_shows_originals_from_the_readers_copy(in_scratch: Path) -> None:
    (outcome,) = do(TINY, in_scratch, "rob_none_*_seed0", "main")
    assert outcome.status == "done"
    page = view.page("main", TINY, in_scratch, None)
    assert 'alt="originals"' in page
    assert "QUICK SCALE" in page
    assert "cnn6 in place of resnet18" in page
    result = store.load(store.path_of(in_scratch, "quick", outcome.cell))
    originals = store.strip_bytes(data.load("photos", split="test").pixels(result["victims"]))
    assert base64.b64encode(originals).decode() in page


@pytest.mark.parametrize(("attack", "local_steps"), [("rob", 1), ("ig", 2)])
def test_the_view_shows_what_ats_made_of_the_originals(in_scratch: Path, attack: str, local_steps: int) -> None:
    cell = replace(TINY.attack(attack, "ats"), local_steps=local_steps)
    place, strip = attacked.Place(TINY, None, torch.device("cpu"), None), in_scratch / "strip.webp"
    case = attacked.prepare(cell, place)
    result = scored.report(case, attacked.guess([case], place)[0], place, strip)
    result |= {"cell": vars(cell), "device": "cpu"}
    source = data.load("photos", split="test")
    changed = view.trained_on(result, source)
    assert changed is not None
    used = data.to_pixels(torch.cat([one.trained_on.inputs for one in case.sent]), source.mean, source.std)
    assert torch.equal(changed, used[: store.STRIP])
    assert not torch.equal(changed, source.pixels(result["victims"][: store.STRIP]))
    shown = view._strips(result, strip, source)
    names = ["originals", "the originals as the defense changed them"]
    assert list(shown) == [*names, "reconstructions, in the order of the changed pictures"]
    (older,) = list(view._strips({**result, "strip_order": ""}, strip, source))[2:]
    assert older == "reconstructions, in the order of the originals"
    if not torch.cuda.is_available():
        above, below = view._strips({**result, "device": "cuda"}, strip, source)
        assert above == "originals"
        assert "cannot be shown" in below


def test_a_strip_is_in_the_order_of_the_pictures_trained_on() -> None:
    """The first picture, once changed, looks more like the second original than like itself."""
    photos = data.load("photos", split="test")
    one, two = photos.batch([0]).inputs, photos.batch([1]).inputs
    batch, labels = torch.cat([one, two]), torch.tensor([0, 1])
    near = 0.05 * torch.randn(batch.shape, generator=torch.Generator().manual_seed(0))
    used = torch.cat([two, one])
    sent = SimpleNamespace(batch=Batch(batch, labels), trained_on=Batch(used, labels))
    tiles = scored._tiles(sent, Reconstruction((used + near).flip(0)), photos)
    wanted = data.to_pixels(used + near, photos.mean, photos.std)
    assert torch.allclose(tiles, wanted, atol=1e-5)


# Leaderboard


def identifying(cell: AttackCell, ssim: float, lpips: float) -> dict[str, Any]:
    """A result that may stand on a card."""
    result = fake(cell, ssim, lpips) | {"n": 20}
    result["scores"]["identified"] = [0.0] * 4
    return result


@pytest.fixture
def card(tmp_path: Path) -> dict[str, Any]:
    for attack, ssim in (("ig+mask", 0.98), ("gi+mask", 0.7), ("rob+fit", 0.97)):
        cell = FULL.attack(attack, "dgp")
        store.write(store.path_of(tmp_path, "full", cell), identifying(cell, ssim, 0.01))
    return own_cards.make("dgp", tmp_path)


def test_a_card_takes_the_worst_adaptive_attack_of_each_kind(card: dict[str, Any], tmp_path: Path) -> None:
    assert cards.problems(card) == []
    worst = {t["threat"]: (t["ssim"], t["attack"].partition("(")[0]) for t in card["threats"]}
    assert worst == {"first upload": (0.98, "inverting_gradients"), "active": (0.97, "imprint")}
    assert card["text"] == "error_feedback(dual_prune)"
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "dgp.json").write_text(json.dumps(card))
    page = board.render(tmp_path)
    assert "0.980 (blind 0.100), identified 0 % (0 to 16), `inverting_gradients`, n 20 |" in page
    assert "0.970 (blind 0.100), identified 0 % (0 to 16), `imprint`, batches of 9, n 20 |" in page
    assert "0.250" in page
    with pytest.raises(ConfigError, match="no adaptive attack on topk"):
        own_cards.make("topk", tmp_path)


def test_a_score_is_the_mean_over_all_seeds_and_names_their_files(tmp_path: Path) -> None:
    def record(attack: str, seed: int, ssim: float, **fields: Any) -> None:
        cell = replace(FULL.attack(attack, "dgp"), seed=seed)
        store.write(store.path_of(tmp_path, "full", cell), fake(cell, ssim, 0.1, seed) | {"n": 20} | fields)

    for seed, ssim in ((0, 0.9), (1, 0.5), (2, 0.1)):  # one seed alone would be the worst of all
        record("ig+mask", seed, ssim)
    record("gi+mask", 0, 0.4)
    (threat,) = own_cards.make("dgp", tmp_path)["threats"]
    assert (threat["ssim"], threat["n"], threat["batch_size"]) == (0.5, 60, 1)
    assert threat["evidence"] == "results/full/ig+mask_dgp_resnet18_cifar10_seed*.json"
    record("gi+mask", 0, 0.6)
    (threat,) = own_cards.make("dgp", tmp_path)["threats"]
    assert threat["evidence"] == "results/full/gi+mask_dgp_resnet18_cifar10_seed0.json"
    record("gi+mask", 1, 0.8)
    record("gi+mask", 2, 0.9, digests={"test": "0" * 16})  # of another copy of the data: the pattern would match it
    (threat,) = own_cards.make("dgp", tmp_path)["threats"]
    assert (threat["ssim"], threat["n"]) == (0.7, 40)
    name = "results/full/gi+mask_dgp_resnet18_cifar10_seed"
    assert threat["evidence"] == f"{name}0.json, {name}1.json"


def test_a_card_names_the_runs_behind_its_accuracy_and_what_was_trained(tmp_path: Path) -> None:
    for defense in ("hardened", "none"):
        run = FULL.train(defense)
        ended = {"kind": "training", "status": "finished", "seed": 0, "accuracy": 0.9, "settings": vars(run.settings)}
        ended |= {"environment": {}, "curve": []}
        for place, digests in (("full", LAYOUTS["cifar10"].digests), (store.OTHER_COPY, {})):
            store.write(store.path_of(tmp_path, place, run), ended | {"digests": digests})
    for defense in ("hardened1", "none"):
        cell = FULL.attack("ig+mask", defense)
        store.write(store.path_of(tmp_path, "full", cell), identifying(cell, 0.2, 0.4))
    card = own_cards.make("hardened", tmp_path)
    assert cards.problems(card) == []
    names = [f"results/full/train_{defense}_resnet18_cifar10_seed0.json" for defense in ("hardened", "none")]
    assert card["accuracy"]["evidence"] == ", ".join(names)
    assert (card["text"], card["accuracy"]["text"]) == ("hardened(examples=1)", "hardened")
    assert "text" not in own_cards.make("none", tmp_path)["accuracy"]
    put(tmp_path, hardened=card)
    shown = "| 90.00 (90.00)<br>trained `hardened`, resnet18, cifar10, 100 epochs, 1 seed |"
    assert shown in board.render(tmp_path)


def test_a_card_is_of_the_defense_it_names(tmp_path: Path) -> None:
    for defense, ssim in (("hardened", 0.9), ("hardened1", 0.2)):
        cell = FULL.attack("ig+mask", defense)
        store.write(store.path_of(tmp_path, "full", cell), fake(cell, ssim, 0.4) | {"n": 20})
    card = own_cards.make("hardened", tmp_path)
    assert (card["text"], [t["ssim"] for t in card["threats"]]) == ("hardened(examples=1)", [0.2])


def put(folder: Path, **found: dict[str, Any]) -> None:
    """Write cards by the names of their files."""
    (folder / "cards").mkdir(exist_ok=True)
    for name, card in found.items():
        (folder / "cards" / f"{name}.json").write_text(json.dumps(card))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"schema": 2}, "schema must be 1"),
        ({"extra": 1}, "unknown field 'extra'"),
        ({"text": "dgpp"}, "unknown defense"),
        ({"threats": []}, "first upload"),
        ({"bytes": {"up": 0, "dense": 4}}, "above 0"),
        ({"bytes": {"up": True, "dense": 4}}, "type number"),
        ({"bytes": {"up": math.nan, "dense": 4}}, "finite"),
        ({"by": "me\n\n# A heading"}, "one line"),
        ({"defense": "best | 1.000"}, "one line without |"),
        ({"text": "a:b`<img src=x>"}, "one line without |"),
        ({"source": " "}, "1 to 300 characters"),
        ({"defense": "[best](https://example.org)"}, "defense must be without [ ] ! and backslashes"),
        ({"by": "me!"}, "by must be without [ ] !"),
        ({"by": "me\\"}, "by must be without [ ] !"),
        ({"date": "yesterday"}, "date must look like"),
        ({"date": "9999-01-01"}, "date must not lie in the future"),
        ({"bytes": {"up": 41, "dense": 10}}, "up must be at most 4 times dense"),
        (
            {"setting": {"model": "resnet18", "data": "cifar10", "batch_size": 1, "pictures": 21}},
            "n must be at least 21",
        ),
        ({"setting": {"model": "lenet", "data": "digits", "batch_size": 0, "pictures": 20}}, "batch_size must be"),
        ({"setting": {"model": "resnet18"}}, "data is missing"),
        (
            {"accuracy": {"percent": 930, "undefended_percent": 93, "setting": "", "evidence": ""}},
            "percents must lie in 0..100",
        ),
        (
            {"accuracy": {"percent": 9, "undefended_percent": 9, "text": "dgpp", "setting": "x", "evidence": "x"}},
            "accuracy: unknown defense 'dgpp'",
        ),
    ],
)
def test_the_validator_says_what_is_wrong(card: dict[str, Any], change: dict[str, Any], complaint: str) -> None:
    assert any(complaint in text for text in cards.problems({**card, **change}, date(2026, 1, 2)))


@pytest.mark.parametrize(
    ("field", "value"), [("n", 19), ("lpips", -0.1), ("identified", 2), ("batch_size", 0), ("batch_size", 1.5)]
)
def test_the_validator_looks_at_the_scores(card: dict[str, Any], field: str, value: float) -> None:
    threat = {**card["threats"][0], field: value}
    assert any(f"threats[0]: {field} must" in text for text in cards.problems({**card, "threats": [threat]}))


def test_code_may_hold_brackets(card: dict[str, Any]) -> None:
    threat = {**card["threats"][0], "attack": "my.attacks:Best(sizes=[8, 4])"}
    assert cards.problems({**card, "text": "my.code:Mine(shares=[0.1])", "threats": [threat]}) == []


def test_the_same_attack_counts_once_for_each_batch_size(card: dict[str, Any]) -> None:
    threat = {name: value for name, value in card["threats"][0].items() if name != "batch_size"}

    def wrong(**fields: Any) -> list[str]:
        return cards.problems({**card, "threats": [threat, {**threat, "ssim": 0.1, **fields}]})

    assert any("threats[1]: threat, attack and batch size are those of threats[0]" in text for text in wrong())
    assert wrong(batch_size=1), "the setting's"
    assert wrong(batch_size=2) == []
    assert wrong(threat="later upload") == []


def test_one_author_has_one_card_for_a_defense(card: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path, a=card, b={**card, "by": "somebody else"}, c={**card, "defense": "another"})
    assert board.render(tmp_path).count("<br>`error_feedback(dual_prune)`") == 3
    (tmp_path / "new.json").write_text(json.dumps({**card, "defense": " DGP"}))
    words = ["leaderboard", "check", str(tmp_path / "new.json"), "--results", str(tmp_path)]
    checked = CliRunner().invoke(app, words)
    assert checked.exit_code == 1
    assert f"{tmp_path / 'cards' / 'a.json'} is of the same defense by the same author" in checked.output
    assert "b.json" not in checked.output
    put(tmp_path, d={**card, "defense": " DGP"})
    with pytest.raises(ConfigError, match=r"a\.json is not a valid card: .*d\.json is of the same defense by the same"):
        board.render(tmp_path)


@pytest.mark.parametrize(
    "evidence",
    [
        "results/full/nothing_seed0.json",
        "results/**/ig+mask_dgp_resnet18_cifar10_seed*.json",
        "results/*/ig+mask_dgp_resnet18_cifar10_seed*.json",
        "results/full/ig+mask_dgp_resnet18_cifar10_seed0.json, results/nothing.json",
        "results/full",
        "results/",
        "results//full",
        "results/../outside.json",
    ],
)
def test_evidence_in_this_repository_is_there(
    card: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evidence: str
) -> None:
    (tmp_path.parent / "outside.json").write_text("{}")
    put(tmp_path, dgp=card)
    board.render(tmp_path)
    path = str(tmp_path / "cards" / "dgp.json")
    put(tmp_path, dgp={**card, "threats": [{**card["threats"][0], "evidence": evidence}]})
    with pytest.raises(ConfigError, match="names no file in"):
        board.render(tmp_path)
    checked = CliRunner().invoke(app, ["leaderboard", "check", path, "--results", str(tmp_path)])
    assert checked.exit_code == 1
    assert "threats[0]: evidence results/" in checked.output
    monkeypatch.chdir(tmp_path)
    unseen = CliRunner().invoke(app, ["leaderboard", "check", path])
    assert unseen.exit_code == 0
    assert "there is no folder results: nobody looked for evidence" in unseen.output


def test_a_file_that_is_no_card_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    assert isinstance(CliRunner().invoke(app, ["leaderboard", "check", str(path)]).exception, ConfigError)


def test_leaving_threats_out_is_no_way_up_the_board(card: dict[str, Any], tmp_path: Path) -> None:
    assert {t["threat"] for t in card["threats"]} == {"first upload", "active"}
    broken = [{**of(card, name), "ssim": 0.9, "blind_ssim": 0.1} for name in cards.THREATS]
    whole = [{**threat, "ssim": 0.1, "identified": 0.01} for threat in broken]
    named = [{**threat, "identified": 0.5} for threat in whole]
    wanted = {"e": whole, "d": [*whole[:2], named[2]], "c": whole[:2], "b": broken, "a": broken[:2]}  # best first
    put(tmp_path, **{name: {**card, "defense": name, "threats": threats} for name, threats in wanted.items()})
    assert order(tmp_path) == list(wanted)
    # A score may lie more than 1 above blind, where blind is below 0; that is no reason to leave it out either.
    far = [{**threat, "ssim": 1.0, "blind_ssim": -0.9} for threat in broken]
    put(tmp_path, b={**card, "defense": "b", "threats": far}, a={**card, "defense": "z", "threats": far[:2]})
    assert order(tmp_path)[-2:] == ["b", "z"]


def of(card: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return what a card says of a threat, or of the first upload where it says nothing."""
    return {**card["threats"][1 if kind == "active" else 0], "threat": kind}


def order(folder: Path) -> list[str]:
    """Return the names of the page's rows from the top."""
    return re.findall(r"^\| (\S+)<br>", board.render(folder), re.MULTILINE)


def test_scores_alike_to_one_decimal_stand_by_their_bytes(card: dict[str, Any], tmp_path: Path) -> None:
    def row(name: str, ssim: float, up: float) -> dict[str, Any]:
        threats = [{**of(card, kind), "ssim": ssim, "blind_ssim": 0.1} for kind in cards.THREATS]
        return {**card, "defense": name, "threats": threats, "bytes": {"up": up, "dense": 40}}

    put(tmp_path, w=row("w", 0.92, 10), x=row("x", 0.90, 20), y=row("y", 0.5, 40), a=row("a", 0.90, 20))
    assert order(tmp_path) == ["y", "w", "a", "x"]


def test_a_card_keeps_the_attack_that_identifies_most(tmp_path: Path) -> None:
    for attack, ssim, picked in (("ig+mask", 0.2, 0.0), ("ig+coarse", 0.1, 1.0)):
        cell = FULL.attack(attack, "dgp")
        result = fake(cell, ssim, 0.4) | {"n": 20}
        result["scores"]["identified"] = [picked] * 4
        store.write(store.path_of(tmp_path, "full", cell), result)
    card = own_cards.make("dgp", tmp_path)
    assert [(t["ssim"], t["identified"]) for t in card["threats"]] == [(0.2, 0.0), (0.1, 1.0)]
    (tmp_path / "cards").mkdir()
    (tmp_path / "cards" / "dgp.json").write_text(json.dumps(card))
    assert "0.200 (blind 0.100), identified 100 %" in board.render(tmp_path)


@pytest.mark.parametrize(("defense", "later"), [("soteria", [0.2]), ("dgp", [])])
def test_a_defense_without_memory_sends_later_uploads_like_the_first(
    defense: str, later: list[float], tmp_path: Path
) -> None:
    cell = FULL.attack("ig+mask", defense)
    store.write(store.path_of(tmp_path, "full", cell), fake(cell, 0.2, 0.4) | {"n": 20})
    threats = own_cards.make(defense, tmp_path)["threats"]
    assert [t["ssim"] for t in threats if t["threat"] == "later upload"] == later


def test_the_cards_of_this_repository_follow_its_results() -> None:
    for card in cards.load_all(RESULTS):
        if card["by"] == "gradveil":
            made = own_cards.make(card["defense"], RESULTS)
            assert card == made, f"run: gradveil leaderboard card {card['defense']}, then gradveil leaderboard render"


def test_the_example_on_the_page_is_valid() -> None:
    assert cards.problems(board.EXAMPLE) == []


def test_only_attackers_who_know_the_defense_count(card: dict[str, Any]) -> None:
    naive = {**card["threats"][0], "adaptive": False}
    assert any("only attackers who know" in text for text in cards.problems({**card, "threats": [naive]}))


def test_a_card_cannot_make_the_validator_import_anything(card: dict[str, Any]) -> None:
    assert cards.problems({**card, "text": "no.such.module:Thing"}) == []


# Command line


def test_commands(in_scratch: Path, card: dict[str, Any]) -> None:
    runner = CliRunner()
    listed = runner.invoke(app, ["reproduce", "main", "--dry", "--scale", "full", "--out", str(in_scratch / "x")])
    assert listed.exit_code == 0, listed.output
    assert "ig_dgp_resnet18_cifar10_seed0" in listed.output
    quick = runner.invoke(app, ["reproduce", "main", "--cells", "rob_none_*", "--device", "cpu", "--out", "results"])
    assert quick.exit_code == 0, quick.output
    assert "QUICK SCALE" in quick.output
    assert ("the LPIPS columns are empty" in quick.output) is not metrics.lpips_available()
    page = (in_scratch / "runs" / "reproduce" / "main-quick.md").read_text()
    assert "QUICK SCALE" in page
    assert "cnn6 in place of resnet18" in page
    assert "| none |" in page.partition("### Rob on ResNet18")[2]
    assert "| 0.023 |" in page.partition("### Rob on ResNet18")[2], "the paper's value"
    strip = re.search(r"\((\S*rob_none_\S*webp)\)", page)
    assert strip
    assert (in_scratch / "runs" / "reproduce" / strip[1]).exists()
    (in_scratch / "docs").mkdir()
    active = FULL.attack("rob+fit", "adgp")
    store.write(store.path_of(in_scratch / "results", "full", active), fake(active, 0.9, 0.0))
    for words in (["reproduce", "render"], ["leaderboard", "render"], ["reproduce", "view", "main"]):
        done = runner.invoke(app, words)
        assert done.exit_code == 0, done.output
    assert "rob_none" not in (in_scratch / "docs" / "results.md").read_text(), "quick results are no results"
    good, bad = in_scratch / "good.json", in_scratch / "bad.json"
    good.write_text(json.dumps(card))
    bad.write_text(json.dumps({**card, "by": 3}))
    words = ["reproduce", "models", "--scale", "full", "--cells", "rob_dgp_lenet_cifar100_*", "--device", "cpu"]
    blind = runner.invoke(app, [*words, "--root", str(in_scratch), "--out", "results"])
    assert "no data" in blind.output
    assert blind.exit_code == 1
    unready = runner.invoke(app, ["leaderboard", "card", "adgp"])
    assert isinstance(unready.exception, ConfigError)
    assert "first upload" in str(unready.exception)
    assert not (in_scratch / "results" / "cards" / "adgp.json").exists()
    assert runner.invoke(app, ["leaderboard", "check", str(good), "--results", "."]).exit_code == 0
    assert runner.invoke(app, ["leaderboard", "check", str(good), str(bad), "--results", "."]).exit_code == 1
    assert isinstance(runner.invoke(app, ["reproduce", "main", "--scale", "huge"]).exception, ValueError)
    assert "--dry" in str(runner.invoke(app, ["reproduce", "main", "--cells", "nothing"]).exception)
    assert "no picture or curve of cost" in str(runner.invoke(app, ["reproduce", "view", "cost"]).exception)
    assert "there is no folder" in str(runner.invoke(app, ["reproduce", "render", "--out", "nowhere"]).exception)
    assert (in_scratch / "docs" / "results.md").read_text().startswith("# Results"), "not overwritten"


def test_cifar100_files_of_the_official_layout_are_attacked(in_scratch: Path) -> None:
    folder = in_scratch / "cifar-100-binary"
    folder.mkdir()
    rng = torch.Generator().manual_seed(0)
    for name, count in (("train.bin", 40), ("test.bin", 20)):
        records = torch.randint(256, (count, 2 + 3072), generator=rng, dtype=torch.uint8)
        records[:, 1] = torch.arange(count, dtype=torch.uint8)
        (folder / name).write_bytes(records.numpy().tobytes())
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)))
    scale = replace(TINY, data100="cifar100")
    (missing,) = do(scale, in_scratch, "rob_dgp_lenet_cifar100_*", "models", root=str(in_scratch / "elsewhere"))
    assert missing.status == "no data"
    outcomes = do(scale, in_scratch, "rob_dgp_lenet_cifar100_*", "models", root=str(in_scratch))
    assert [o.status for o in outcomes] == ["done"], [o.note for o in outcomes]
    text = pages.render_table("models", scale, in_scratch, "")
    assert text.count("Of CIFAR-100 the first 20 test pictures and the first 40 training pictures were at hand") == 1
    # A reader who has more of it is shown the originals; one whose pictures are others is not.
    file = folder / "test.bin"
    first, more = file.read_bytes(), bytes([0, 1, *range(256)] + [0] * 2816)
    for content, shown in ((first + more, True), (more + first, False)):
        file.write_bytes(content)
        pictures.load_split.cache_clear()
        assert ("no originals" in view.page("models", scale, in_scratch, str(in_scratch))) != shown


def test_an_accuracy_from_part_of_a_dataset_is_refused(in_scratch: Path) -> None:
    folder = in_scratch / "cifar-100-binary"
    folder.mkdir()
    for name in ("train.bin", "test.bin"):
        (folder / name).write_bytes(bytes(20 * 3074))
    (folder / "fine_label_names.txt").write_text("\n".join(f"class{i}" for i in range(100)))
    scale = replace(TINY, data100="cifar100")
    (outcome,) = do(scale, in_scratch, "train_dgp_lenet_cifar100_*", "topk95", root=str(in_scratch))
    assert outcome.status == "impossible"
    assert outcome.note == "cifar100 has 20 train pictures here, and an accuracy needs all 50000"
