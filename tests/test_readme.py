"""The README's example runs as it stands, and its links lead somewhere."""

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

README = Path(__file__).parents[1] / "README.md"
DOCS, RESULTS = README.parent / "docs", README.parent / "results"


def test_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert int(capsys.readouterr().out.split()[0]) < 32 * 3 * 32 * 32


@pytest.mark.parametrize("page", [README, *sorted((README.parent / "docs").glob("*.md"))], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        assert target.exists(), link
        assert not anchor or anchor in _anchors(target), link


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _runs(folder: str, *names: str) -> list[dict[str, Any]]:
    return [json.loads((RESULTS / folder / f"train_{name}_resnet18_cifar10_seed0.json").read_text()) for name in names]


def test_accuracies_and_uploads_are_the_recorded_ones() -> None:
    page = (DOCS / "hardened.md").read_text()
    runs = _runs("full", "none", "dgp", "adgp", "dgp-nofeedback", "hardened")
    exact = [f"{100 * run['accuracy']:.2f} %" for run in runs]
    assert f"| accuracy | {' | '.join(exact)} |" in page
    upload = [f"{run['per_user_and_round']['bytes_up'] / 1e6:.1f} MB" for run in runs]
    assert f"| upload per user and round, measured | {' | '.join(upload)} |" in page
    short = [f"{100 * run['accuracy']:.1f} %" for run in runs]
    assert all(figure in (DOCS / "defenses.md").read_text() for figure in short)
    for figure in (short[0], short[1], short[-1], *(size.split()[0] for size in (upload[0], upload[1], upload[-1]))):
        assert figure in README.read_text()


@pytest.mark.parametrize("model", ["VGG11", "CNN6", "LeNet"])
def test_accuracies_of_other_models_are_the_recorded_ones(model: str) -> None:
    def shown(defense: str) -> str:
        name = f"train_{defense}_{model.lower()}_cifar10_seed0.json"
        (file,) = [RESULTS / folder / name for folder in ("full", "training") if (RESULTS / folder / name).exists()]
        run = json.loads(file.read_text())
        return f"{100 * run['accuracy']:.2f} %" if run["status"] == "finished" else run["status"]

    row = " | ".join([model, *map(shown, ("none", "dgp", "adgp", "dgp-nofeedback", "hardened"))])
    assert f"| {row} |" in (DOCS / "hardened.md").read_text()


def _scores(cell: str, metric: str, setting: str = "", seed: str = "*") -> list[float]:
    """Return what an attack scored with all seeds; of what the client trained on, where its defense changes it."""
    files = sorted((RESULTS / "full").glob(f"{cell}_cifar10{setting}_seed{seed}.json"))
    results = [json.loads(file.read_text()) for file in files]
    return [score for result in results for score in (result["transformed_scores"] or result["scores"])[metric]]


def _mean(cell: str, metric: str, setting: str = "", seed: str = "*") -> float:
    return statistics.mean(_scores(cell, metric, setting, seed))


def _row(label: str, cell: str, setting: str) -> str:
    """Return a line of a table: SSIM, LPIPS, identified, and of how many pictures."""
    ssim, lpips, identified = (_mean(cell, metric, setting) for metric in ("ssim", "lpips", "identified"))
    return f"| {label} | {ssim:.3f} | {lpips:.3f} | {100 * identified:.0f} % | {len(_scores(cell, 'ssim', setting))} |"


def test_the_first_table_is_of_the_seeds_whose_first_is_beside_it() -> None:
    rows = re.findall(r"\(results/full/(.*)_cifar10_seed0.webp\) \| (.*) \| (.*) % \|", README.read_text())
    assert len(rows) == 4
    for cell, ssim, identified in rows:
        assert len(_scores(cell, "ssim")) == 60
        assert (ssim, identified) == (f"{_mean(cell, 'ssim'):.2f}", f"{100 * _mean(cell, 'identified'):.0f}"), cell


def test_what_a_generator_finds_is_recorded_in_the_first_page() -> None:
    names = [f"short_{defense}_{model}" for defense in ("hardened1", "hardened") for model in ("cnn6", "resnet18")]
    found = [f"{100 * _mean(f'ggl+{name}', 'identified'):.0f} %" for name in (*names, "blind_none_resnet18")]
    text = " ".join(README.read_text().split())
    assert f"identifies {found[0]} of single ones behind the same noise on CNN6, {found[1]} on ResNet18" in text
    assert f"and of mixed ones {found[2]} and {found[3]}, where {found[4]} follow from the label" in text


ATTACKED = {
    "raw gradient": "ig+mask_none",
    "Top-k": "ig+mask_topk",
    "published DGP, first round": "ig+mask_dgp",
    "the same, an attacker who also uses the band": "ig+band_dgp",
    "the same, a generator searched: GGL": "ggl_dgp",
    "ADGP, first round": "ig+mask_adgp",
    "ADGP, after 4 rounds of other pictures": "ig+mask_adgp_round4",
    "ADGP, a generator searched: GGL": "ggl_adgp",
    "Outpost, its gate open": "ig+mask_outpost",
    "Soteria": "ig+mask_soteria",
    "PRECODE": "ig+mask_precode",
    "ATS, the transformed picture": "ig+mask_ats",
    "DP, noise of 0.01": "ig+mask_dp",
    "DP, an attacker who looks for 8x8 pictures": "ig+coarse_dp",
    "DP, a generator searched: GGL": "ggl+short_dp",
    "the noise and rounding of `hardened`, without mixing": "ig+mask_hardened1",
    "the same, an attacker who looks for 8x8 pictures": "ig+coarse_hardened1",
    "without mixing, a generator searched: GGL": "ggl+short_hardened1",
    "published DGP, after 1 round of other pictures": "ig+mask_dgp_round1",
    "published DGP, after 4 rounds of other pictures": "ig+mask_dgp_round4",
    "without mixing, 8x8 pictures, after 1 round of other pictures": "ig+coarse_hardened1_round1",
    "without mixing, 8x8 pictures, after 4 rounds of other pictures": "ig+coarse_hardened1_round4",
    "without mixing, GGL, after 1 round of other pictures": "ggl+short_hardened1_round1",
    "without mixing, GGL, after 4 rounds of other pictures": "ggl+short_hardened1_round4",
}


@pytest.mark.parametrize(("label", "cell"), ATTACKED.items())
def test_what_an_attacker_gets_who_knows_the_defense_is_recorded(label: str, cell: str) -> None:
    name, later, rounds = cell.partition("_round")
    assert _row(label, f"{name}_resnet18", later + rounds) in (DOCS / "hardened.md").read_text()


PAINTED = {
    "the label alone": "ggl+blind_none_resnet18",
    "CNN6, raw gradient": "ggl+short_none_cnn6",
    "CNN6, DP, noise of 0.01": "ggl+short_dp_cnn6",
    "CNN6, `hardened` without mixing": "ggl+short_hardened1_cnn6",
    "CNN6, `hardened`": "ggl+short_hardened_cnn6",
    "LeNet, raw gradient": "ggl+short_none_lenet",
    "LeNet, DP, noise of 0.01": "ggl+short_dp_lenet",
    "LeNet, `hardened` without mixing": "ggl+short_hardened1_lenet",
    "LeNet, `hardened`": "ggl+short_hardened_lenet",
    "ResNet18, raw gradient": "ggl+short_none_resnet18",
    "ResNet18, DP, noise of 0.01": "ggl+short_dp_resnet18",
    "ResNet18, `hardened` without mixing": "ggl+short_hardened1_resnet18",
    "ResNet18, `hardened`": "ggl+short_hardened_resnet18",
    "the labels alone": "ggl+blind_none_resnet18_batch32",
}


PAINTED_BATCHES = {
    f"{shown}, {defense}": f"ggl+all_{name}_{model}_batch32"
    for shown, model in (("CNN6", "cnn6"), ("ResNet18", "resnet18"))
    for defense, name in (("raw gradient", "none"), ("published DGP", "dgp"), ("`hardened`", "hardened"))
}


@pytest.mark.parametrize(("label", "cell"), (PAINTED | PAINTED_BATCHES).items())
def test_what_a_generator_finds_is_recorded(label: str, cell: str) -> None:
    name, batch, size = cell.partition("_batch")
    assert _row(label, name, batch + size) in (DOCS / "hardened.md").read_text()


FISHED = {
    "the label alone": "the label alone",
    "raw gradient": "none",
    "published DGP": "dgp",
    "`hardened` without that, `balance=0`": "hardened(balance=0)",
    "`hardened`": "hardened",
    "`hardened(balance=1)`": "hardened(balance=1)",
}


def _fished(release: str) -> str:
    found = json.loads((RESULTS / "guard" / "fishing-cnn6.json").read_text())
    assert (found["refused"], found["n"]) == (0, 60)
    return f"{100 * sum(found['identified'][release]) / found['n']:.0f} %"


@pytest.mark.parametrize(("label", "release"), FISHED.items())
def test_what_fishing_finds_is_recorded(label: str, release: str) -> None:
    _, _, section = (DOCS / "hardened.md").read_text().partition("## What fishing finds")
    assert f"| {label} | {_fished(release)} | 60 |" in section


def test_what_fishing_finds_differs_by_seed() -> None:
    found = json.loads((RESULTS / "guard" / "fishing-cnn6.json").read_text())["identified"]["hardened"]
    *most, last = (str(round(100 * hits / 20)) for hits in found)
    seeds = f"{', '.join(most)} and {last} % by seed"
    assert all(seeds in page.read_text() for page in (README, DOCS / "hardened.md"))


def test_what_fishing_finds_stands_on_the_first_page() -> None:
    text = " ".join(README.read_text().split())
    assert f"has {_fished('hardened(balance=0)')} identified" in text
    assert f"{_fished('hardened')} where" in text


@pytest.mark.parametrize(
    ("label", "defense"),
    [("raw gradient", "none"), ("published DGP", "dgp"), ("ADGP", "adgp"), ("`hardened` without mixing", "hardened1")],
)
def test_what_trained_models_give_away_is_recorded(label: str, defense: str) -> None:
    def shown(after: str) -> str:
        cell = f"ig+mask_{defense}_resnet18"
        ssim, identified = (_mean(cell, metric, after, seed="0") for metric in ("ssim", "identified"))
        return f"{ssim:.3f}, {100 * identified:.0f} %"

    row = " | ".join([label, *map(shown, ("", "_epochs1", "_epochs10", "_epochs100"))])
    assert f"| {row} |" in (DOCS / "hardened.md").read_text()


@pytest.mark.parametrize(
    ("run", "name"), [("none", "undefended"), ("soteria", "`soteria`"), ("soteria1", "`soteria(probes=1)`")]
)
def test_what_soteria_costs_is_recorded(run: str, name: str) -> None:
    files = sorted((RESULTS / "training").glob(f"{run}_lenet_digits_seed*.json"))
    found = [100 * json.loads(file.read_text())["accuracy"] for file in files]
    row = f"| {name} | {statistics.mean(found):.2f} ± {statistics.stdev(found):.2f} % |"
    assert row in (DOCS / "training.md").read_text()


@pytest.mark.parametrize(
    ("label", "model", "runs"),
    [
        ("LeNet, 100 epochs", "lenet", ("training/train_none", "full/train_hardened", "training/weighed_default")),
        ("CNN6, 100 epochs", "cnn6", ("full/train_none", "full/train_hardened", "training/weighed_default")),
        (
            "residual network with BatchNorm, 12 epochs at rate 0.1 (`examples/small_resnet.py`)",
            "small_resnet",
            tuple(f"training/weighed_{how}" for how in ("none", "off", "default", "balance1")),
        ),
    ],
)
def test_what_following_single_examples_costs_is_recorded(label: str, model: str, runs: tuple[str, ...]) -> None:
    files = [RESULTS / f"{run}_{model}_cifar10_seed0.json" for run in runs]
    found = [f"{100 * json.loads(file.read_text())['accuracy']:.2f} %" for file in files]
    row = " | ".join([label, *found, *["not run"] * (4 - len(found))])
    assert f"| {row} |" in (DOCS / "training.md").read_text()


@pytest.mark.parametrize("defense", ["hardened", "adgp"])
def test_what_precision_moves_on_lenet_is_recorded(defense: str) -> None:
    name = f"{defense}_lenet_cifar10_seed0.json"
    runs = [json.loads((RESULTS / file).read_text()) for file in (f"full/train_{name}", f"training/bf16_{name}")]
    exact, half = (f"{100 * run['accuracy']:.2f} %" for run in runs)
    text = " ".join((DOCS / "training.md").read_text().split())
    assert f"{exact} in float32 and {half} in bf16" in text or f"{exact} and {half}" in text


@pytest.mark.parametrize("defense", ["none", "topk", "dgp", "adgp", "hardened"])
def test_accuracies_in_other_settings_are_the_recorded_ones(defense: str) -> None:
    def shown(setting: str) -> str:
        file = RESULTS / "full" / f"train_{defense}_cnn6_cifar10{setting}_seed0.json"
        if not file.exists():
            return "not run"
        run = json.loads(file.read_text())
        return f"{100 * run['accuracy']:.2f} %" if run["status"] == "finished" else run["status"]

    name = {"none": "undefended", "topk": "Top-k", "hardened": "`hardened`"}.get(defense, defense.upper())
    row = " | ".join([name, *map(shown, ("", "_alpha0.5", "_alpha0.1", "_local4"))])
    assert f"| {row} |" in (DOCS / "training.md").read_text()


def test_what_an_upload_costs_is_recorded() -> None:
    times = {name: statistics.median(each) for name, each in _bench("protect-cpu")["ms"].items()}
    weighed, plain = (times[name] / times["gradient alone"] for name in ("hardened", "hardened(balance=0)"))
    for page in ("training.md", "hardened.md"):
        text = " ".join((DOCS / page).read_text().split())
        assert f"{weighed:.1f} times" in text, page
        assert f"{plain:.1f} times without" in text, page


def test_speeds_are_the_recorded_ones() -> None:
    rounds = {row["defense"]: row["ms_per_round"] for row in _bench("round-h200")["rows"]}
    row = (
        f"| one round on an H200 | {rounds['none']:.1f} ms | {rounds['dgp']:.1f} ms | | | {rounds['hardened']:.1f} ms |"
    )
    assert row in (DOCS / "hardened.md").read_text()
    training = (DOCS / "training.md").read_text()
    for name, ms in rounds.items():
        over = "" if name == "none" else f"{100 * (ms / rounds['none'] - 1):.1f} %"
        assert f"| {ms:.2f} | {over} | {157 * ms / 1000:.2f} |".replace("|  |", "| |") in training
    reached, plain = (
        100 * json.loads((RESULTS / "full" / f"train_{name}_resnet18_cifar10_seed0.json").read_text())["accuracy"]
        for name in ("soteria", "none")
    )
    assert f"reaches {reached:.2f} %" in training
    assert f"undefended {plain:.2f} %" in training
    soteria = json.loads((RESULTS / "full" / "cost_soteria_resnet18_seed0.json").read_text())["defense_seconds"]
    assert f"{soteria:.2f} s for one upload" in training
    assert f"{soteria * 10 * 157 * 100 / 3600:.0f} hours" in training
    small, large = _bench("select-h200")["ms"], _bench("select-1b-h200")["ms"]
    concepts = (DOCS / "concepts.md").read_text()
    assert f"take {small['gradveil in a CUDA graph']:.2f} ms" in concepts
    assert f"{small['gradveil']:.1f} ms launched one by one" in concepts
    assert f"{large['gradveil in a CUDA graph']:.0f} ms as a graph and {large['gradveil']:.0f} ms without" in concepts
    steps = _bench("attack-h200")["milliseconds"]
    attacks = (DOCS / "attacks.md").read_text()
    assert f"{min(steps['layer rules, CUDA graph']):.0f} ms on an H200" in attacks
    assert f"the pictures {sum(steps['one by one']) / 3:.0f} ms" in attacks


def _bench(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "bench" / f"{name}.json").read_text())
    return found


def test_what_rgap_reads_through_pruning_is_recorded() -> None:
    def read(defense: str) -> str:
        files = (RESULTS / "full").glob(f"rgap+mask_{defense}_cnn6_cifar10_seed*.json")
        scores = [score for file in files for score in json.loads(file.read_text())["scores"]["ssim"]]
        found = sum(score > 0.95 for score in scores)
        return f"all of {len(scores)}" if found == len(scores) else f"{found} of {len(scores)}"

    text = " ".join((DOCS / "attacks.md").read_text().split())
    assert f"gives away {read('dgp')} pictures through dual pruning, {read('topk')} through Top-k" in text
    assert f"{read('adgp')} through ADGP and {read('soteria')} through Soteria" in text
