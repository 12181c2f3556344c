"""The page that shows reconstructions beside the originals, and the plots beside the tables."""

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradveil import data
from gradveil.cli import app, commands  # noqa: F401
from gradveil.errors import ConfigError
from gradveil.reproduce import NAMES, SCALES, entries, plots, store, view
from gradveil.reproduce.cells import key
from gradveil.reproduce.tables import FEEDBACK

FULL = SCALES["full"]
RESULTS = Path(__file__).parents[1] / "results"
PANEL = "cnn6, cifar10"


@pytest.fixture
def other_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader's pictures are not those that were attacked, so that no test needs CIFAR."""
    photos = data.load("photos", split="test")
    monkeypatch.setattr(view, "load_split", lambda *_: photos)


def trained(defense: str, curve: list[tuple[int, float]]) -> dict[str, Any]:
    return {"defense": defense, "curve": [{"epoch": epoch, "accuracy": accuracy} for epoch, accuracy in curve]}


@pytest.mark.usefixtures("other_copy")
@pytest.mark.parametrize("name", NAMES)
def test_every_recorded_table_can_be_viewed(name: str) -> None:
    if name == "cost":
        with pytest.raises(ConfigError, match="no picture or curve of cost"):
            view.page(name, FULL, RESULTS, None)
        return
    page = view.page(name, FULL, RESULTS, None)
    assert "data:image/webp" in page
    assert page.count('class="plot"') == (2 if name in ("figures", "all") else 0)


@pytest.mark.parametrize("name", ["beyond", "all"])
def test_the_accuracy_plot_holds_the_runs_of_its_own_part_only(name: str) -> None:
    of_figures = plots.accuracies(entries("figures", FULL), RESULTS, "full")
    assert plots.accuracies(entries(name, FULL), RESULTS, "full") == ({} if name == "beyond" else of_figures)


def test_a_run_that_diverged_before_its_first_evaluation_has_an_empty_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [e for e in entries("figures", FULL) if e.part == FEEDBACK and e.label in ("cnn6, none", "cnn6, dgp")]
    recorded = {"cnn6, none": [(4, 0.5), (8, 0.6)], "cnn6, dgp": []}
    monkeypatch.setattr(plots, "results_of", lambda _, __, e: [trained(e.cell.defense, recorded[e.label])])
    curves = plots.accuracies(lines, tmp_path, "full")
    assert curves == {PANEL: {"none": [(4, 50.0), (8, 60.0)], "dgp": []}}
    assert plots.draw_accuracies(curves).startswith(b"\x89PNG")


def test_plots_of_both_scales_stand_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    linked: dict[str, set[str]] = {}
    (tmp_path / "results").mkdir()
    for name in ("full", "training"):
        (tmp_path / "results" / name).symlink_to(RESULTS / name)
    for scale, minutes in (("quick", "1"), ("full", "0")):  # what is recorded, only
        words = ["--scale", scale, "--cells", "train_none_lenet_*", "--minutes", minutes]
        done = CliRunner().invoke(app, ["reproduce", "figures", "--device", "cpu", *words])
        assert done.exit_code == 0, done.output
        page = (tmp_path / "runs" / "reproduce" / f"figures-{scale}.md").read_text(encoding="utf-8")
        linked[scale] = set(re.findall(r"\]\(([^)]+\.png)\)", page))
    assert linked["quick"]
    assert len(linked["full"]) == 2
    assert not linked["quick"] & linked["full"]
    written = {path.name for path in (tmp_path / "runs" / "reproduce").glob("*.png")}
    assert written == linked["quick"] | linked["full"]


@pytest.mark.usefixtures("other_copy")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("defense", ["none", "ats"])
def test_strips_are_named_where_the_defense_changes_pictures(
    defense: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view, "_is_copy", lambda *_: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    entry = next(e for e in entries("main", FULL) if key(e.cell) == f"ig_{defense}_resnet18_cifar10_seed0")
    path = store.path_of(RESULTS, "full", entry.cell)
    result = {**store.load(path), "victims": list(range(20)), "device": device}
    row = view._row(entry, [result], path.with_suffix(".webp"), None)
    read = re.sub("<img[^>]*>", "", row)  # what stands in the page without the alt texts
    assert ("originals</small>" in read) == (defense == "ats")
    assert ("cannot be shown" in read) == (defense == "ats" and device == "cuda")


def test_a_row_says_of_what_its_pictures_and_scores_are(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = next(e for e in entries("main", FULL) if key(e.cell) == "ig_dgp_resnet18_cifar10_seed0")
    path = store.path_of(RESULTS, "full", entry.cell)
    result = store.load(path) | {"victims": [0], "floor": {"grey": {"ssim": 0.1, "identified": 0.07}}}
    result["scores"]["identified"] = [1.0, 0.0, 0.0, 0.0]
    seeds = [result | {"seed": seed, "victims": [seed]} for seed in (0, 1, 2)]
    photos = data.load("photos", split="test")
    monkeypatch.setattr(view, "load_split", lambda *_: photos)
    monkeypatch.setattr(view, "_is_copy", lambda *_: True)
    assert "identified 25 % (blind 7)<br>pictures: seed 0; scores: seeds 0, 1, 2<" in view._row(
        entry, seeds, path.with_suffix(".webp"), None
    )
    alone, reordered = (view._row(entry, found, path.with_suffix(".webp"), None) for found in (seeds[:1], seeds[::-1]))
    assert "seed" not in re.sub("<img[^>]*>", "", alone)
    assert re.findall("<img[^>]*>", alone) == re.findall("<img[^>]*>", reordered), "those of the strip's own seed"
    monkeypatch.setattr(view, "results_of", lambda *_: seeds[1:])
    with pytest.raises(ConfigError, match="no picture"):
        view.page("main", FULL, RESULTS, None)


@pytest.mark.usefixtures("other_copy")
def test_strips_scroll_in_a_box_of_their_own_and_are_not_shrunk() -> None:
    page = view.page("models", FULL, RESULTS, None)
    style = re.sub(r"\s", "", page.partition("<style>")[2].partition("</style>")[0])
    assert ".wide{overflow-x:auto}" in style
    assert "table-layout:fixed" in style, "without it a cell grows with its strip, and the page scrolls"
    of_strips = re.findall(r"(?<![\w.])img\{([^}]*)\}", style)
    assert of_strips == ["display:block;height:48px;image-rendering:pixelated"], "nothing that depends on the width"
    cells = re.findall("<td>(<div.*?)</td>", page)
    assert len(cells) == page.count("data:image/webp")
    assert all(cell.startswith('<div class="wide">') and cell.endswith("</div>") for cell in cells)
