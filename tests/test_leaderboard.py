"""The leaderboard: what a card must show to count, and that somebody else can submit one."""

import json
import re
import shlex
import sys
from copy import deepcopy
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from gradveil.attacks import ATTACKS
from gradveil.cli import app, commands  # noqa: F401
from gradveil.errors import ConfigError
from gradveil.reproduce import board, cards, own_cards
from gradveil.spec import build

REPOSITORY = Path(__file__).parents[1]
RESULTS = REPOSITORY / "results"
PAGE = (REPOSITORY / "docs" / "leaderboard.md").read_text(encoding="utf-8")
MINE = """
from dataclasses import dataclass

from gradveil.core import Defense


@dataclass(frozen=True)
class Mine(Defense):
    def apply(self, grads, state, step):
        return {name: grad / 2 for name, grad in grads.items()}, state
"""


@pytest.fixture
def card() -> dict[str, Any]:
    """The card of hardened, all of whose threats have 40 pictures or more."""
    return shipped("hardened")


def shipped(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "cards" / f"{name}.json").read_text())
    return found


def changed(card: dict[str, Any], kind: str, **fields: Any) -> dict[str, Any]:
    """Return the card with fields of one threat changed; None leaves a field out."""
    made = deepcopy(card)
    (threat,) = [t for t in made["threats"] if t["threat"] == kind]
    threat.update(fields)
    for name in [name for name, value in fields.items() if value is None]:
        del threat[name]
    return made


def lost(card: dict[str, Any]) -> int:
    return board._rank(card)[0]


# What a card must show


@pytest.mark.parametrize(
    ("kind", "attack"),
    [
        ("first upload", "blind"),
        ("first upload", "blind(guess='random')"),
        ("first upload", "ggl(search='none')"),
        ("later upload", "repeated_rounds(blind)"),
        ("active", "fishing(inner=ggl(search='none'))"),
        ("active", "fishing(inner=blind)"),
    ],
)
def test_an_attack_that_never_looks_at_the_gradient_is_none(card: dict[str, Any], kind: str, attack: str) -> None:
    assert any("must look at the gradient" in text for text in cards.problems(changed(card, kind, attack=attack)))


def test_every_other_attack_looks() -> None:
    assert [name for name in ATTACKS if not cards.looks(build(ATTACKS, name, "attack"))] == ["blind"]


@pytest.mark.parametrize("attack", ["imprint", "rob", "spotlight(batch=1)", "fishing", "trap_weights"])
def test_an_active_server_is_one_that_changes_what_it_sends(card: dict[str, Any], attack: str) -> None:
    assert cards.problems(changed(card, "active", attack=attack)) == []
    (wrong,) = cards.problems(changed(card, "first upload", attack=attack))
    assert wrong.startswith("threats[0]: threat must be active for")
    (wrong,) = cards.problems(changed(card, "active", attack="inverting_gradients(steps=9)"))
    assert wrong.startswith("threats[2]: attack must be active")
    assert "inverting_gradients leaves the model as it is" in wrong


def test_leaving_out_what_was_identified_is_no_way_up() -> None:
    dp = shipped("dp")
    assert lost(dp) == 3
    (wrong,) = cards.problems(changed(dp, "first upload", identified=None))
    assert wrong.startswith("threats[0]: identified is missing: the share of pictures")


@pytest.mark.parametrize("field", ["threats", "accuracy"])
@pytest.mark.parametrize("evidence", ["nonsense", "ftp://example.org/x", "results", "results/full/a.json, nonsense"])
def test_evidence_is_an_address_or_a_file_of_this_repository(card: dict[str, Any], field: str, evidence: str) -> None:
    (card["threats"][0] if field == "threats" else card["accuracy"])["evidence"] = evidence
    (wrong,) = cards.problems(card)
    assert "evidence must be addresses (https://...) or files in results/, got" in wrong


@pytest.mark.parametrize("address", ["https://example.org/scores.json", "http://example.org/a, https://example.org/b"])
def test_evidence_may_lie_elsewhere(card: dict[str, Any], address: str) -> None:
    assert cards.problems(changed(card, "first upload", evidence=address)) == []


# What counts as lost


def test_few_pictures_show_that_a_defense_is_broken_but_not_that_it_holds(card: dict[str, Any]) -> None:
    """The later upload of hardened is its one threat that is not lost."""
    nothing = changed(card, "later upload", identified=0.0)
    enough, few = (changed(nothing, "later upload", n=n) for n in (20, 19))
    assert (lost(enough), lost(few)) == (2, 3)
    assert cards.problems(few) == [], "a costly attack on few pictures may stand there"
    assert board._rank(few)[1] > board._rank(enough)[1], "as if it had not been run"
    broken = changed(few, "later upload", ssim=0.9)
    assert (lost(broken), lost(changed(few, "later upload", identified=0.6))) == (3, 3)
    shown = [board._row(c)[2] for c in (enough, few, broken)]
    assert [cell.endswith("n 19, too few to count as measured") for cell in shown] == [False, True, False]


def test_a_share_that_may_be_half_is_lost(card: dict[str, Any]) -> None:
    assert (card["threats"][0]["identified"], card["threats"][0]["n"]) == (0.45, 60)
    assert lost(card) == 2
    assert lost(changed(card, "first upload", n=600)) == 1, "the same share of many pictures is told from half"
    assert "identified 45 % (33 to 58)" in board._row(card)[1]


@pytest.mark.parametrize(
    ("share", "n", "ends"), [(0.0, 4, (0.0, 0.4899)), (1.0, 4, (0.5101, 1.0)), (0.5, 100, (0.4038, 0.5962))]
)
def test_intervals_are_wilsons(share: float, n: int, ends: tuple[float, float]) -> None:
    assert board.interval(share, n) == pytest.approx(ends, abs=1e-4)  # as tables of it have them


def test_the_page_says_that_another_model_is_worse() -> None:
    files = list((RESULTS / "full").glob("ggl+short_hardened1_cnn6_cifar10_seed*.json"))
    found = fmean(v for file in files for v in json.loads(file.read_text())["scores"]["identified"])
    said = " ".join(PAGE.split())
    assert f"On CNN6 the attack `ggl` of the first upload identifies {100 * found:.0f} % behind" in said


# Submitting one


@pytest.fixture
def submitter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Somebody with a defense of their own in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "docs").mkdir()
    return tmp_path


def call(line: str) -> str:
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, (line, done.output, done.exception)
    return done.output


def test_the_steps_on_the_page_lead_to_a_row(submitter: Path) -> None:
    blocks = re.findall(r"^   ```\n(.*?)^   ```", PAGE, re.MULTILINE | re.DOTALL)
    setting, *lines = [line.strip() for block in blocks for line in block.splitlines()]
    setting = setting.removeprefix("SETTING=").strip('"').replace("resnet18", "lenet").replace("cifar10", "photos")
    assert len(lines) == 8
    for line in lines:
        quick = re.sub(r"(steps|pool)=\d+", r"\1=2", line.removeprefix("gradveil "))
        runs = " ".join(sorted(str(path) for path in Path("runs").glob("mine-*")))
        call(quick.replace("$SETTING", f"{setting} --no-progress").replace("runs/mine-*", runs))
    made = json.loads(Path("results/cards/mine.json").read_text())
    assert {t["threat"] for t in made["threats"]} == set(cards.THREATS)
    assert {t["n"] for t in made["threats"]} == {20}
    page = Path("docs/leaderboard.md").read_text()
    assert "| mine<br>`mine:Mine` |" in page
    assert not [p for p in Path("results").glob("**/*") if p.is_file() and p.suffix != ".json"], "no picture"


def attack(name: str, words: str = "", pictures: int = 20) -> Path:
    """Run one of two steps on small pictures."""
    what = "" if "--attack" in words else "--attack 'inverting_gradients(steps=1)'"
    common = f"--model 'mlp(hidden=4)' --data digits --defense mine:Mine --pictures {pictures} --no-progress"
    call(f"attack {common} {what} {words} --out runs/{name}")
    return Path("runs") / name


def draft(*runs: Path, name: str = "mine") -> Any:
    words = ["leaderboard", "draft", name, *map(str, runs), "--by", "me", "--source", "https://example.org"]
    return CliRunner().invoke(app, words)


def test_a_draft_says_what_the_runs_say(submitter: Path) -> None:
    runs = [attack("a"), attack("b", "--seed 1")]
    assert draft(*runs).exit_code == 0
    found = [json.loads((run / "scores.json").read_text()) for run in runs]
    made = json.loads(Path("results/cards/mine.json").read_text())
    first, later = made["threats"]
    assert (first["threat"], later["threat"]) == ("first upload", "later upload"), "it remembers nothing"
    for name in ("ssim", "identified"):
        assert first[name] == pytest.approx(fmean(v for f in found for v in f["scores"][name]), abs=1e-5)
    floors = [max(fmean(card["ssim"]) for card in f["floor"].values()) for f in found]
    assert first["blind_ssim"] == pytest.approx(fmean(floors), abs=1e-5)
    assert (first["n"], first["attack"]) == (40, "gradient_matching(steps=1)")
    assert made["bytes"] == {"up": found[0]["bytes_up"], "dense": found[0]["bytes_dense"]}
    kept = [Path("results") / "submitted" / "mine" / f"{name}.json" for name in "ab"]
    assert first["evidence"] == ", ".join(map(str, kept))
    assert [json.loads(path.read_text()) for path in kept] == found
    assert "is there already" in str(draft(*runs).exception), "a card is not written over"


def test_a_draft_refuses_what_is_no_card(submitter: Path) -> None:
    good = attack("good")

    def refused(*runs: Path, name: str = "mine") -> str:
        error = draft(*runs, name=name).exception
        assert isinstance(error, ConfigError), error
        assert not Path("results").exists(), "nothing is written"
        return str(error)

    assert "n must be at least 20" in refused(attack("few", pictures=19))
    assert "attack must look at the gradient" in refused(attack("blind", "--attack blind"))
    assert "only attackers who know" in refused(
        attack("naive", "--attack \"inverting_gradients(steps=1, masked='never', weighting='none')\"")
    )
    assert "on the first upload" in refused(attack("later", "--rounds 1"))
    assert "training mode" in refused(good, attack("train", "--train-mode"))
    assert "--freeze" in refused(good, attack("frozen", "--rounds 1 --freeze"))
    assert "of one defense" in refused(good, attack("other", "--defense topk"))
    assert "same seed" in refused(good, attack("again", "--device cpu"))
    assert "different names" in refused(good, good)
    assert "letters, digits" in refused(good, name="../mine")
    old = Path("runs/old")
    old.mkdir()
    (old / "scores.json").write_text("{}")
    assert "is no scores.json of this gradveil attack" in refused(old)


def test_recorded_runs_on_later_uploads_stand_beside_those_on_the_first(submitter: Path) -> None:
    found = {f"results/{name}.json": read(attack(name, words)) for name, words in (("a", ""), ("b", "--rounds 1"))}
    for value, evidence in ((0.9, "results/b.json"), (-0.9, "results/a.json")):
        found["results/b.json"]["scores"]["ssim"] = [value] * 20
        threats = own_cards.draft("mine", found, "me", "here")["threats"]
        (worst,) = [t for t in threats if t["threat"] == "later upload"][:1]
        assert worst["evidence"] == evidence


def read(run: Path) -> Any:
    return json.loads((run / "scores.json").read_text())
