"""Pages and tables are pure functions of the report, and nothing in it can become markup."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from typer.testing import CliRunner

from gradveil.audit.compare import compare_reports
from gradveil.audit.render import to_html, to_markdown
from gradveil.audit.report import Report
from gradveil.audit.summary import advice, what_leaks
from gradveil.audit.verdict import judge
from gradveil.cli import app, commands  # noqa: F401
from gradveil.defenses import DEFENSES
from gradveil.defenses.advice import is_published
from gradveil.spec import build, to_spec


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.found.append((tag, dict(attrs)))


def test_page_is_complete_and_alone(report: Report) -> None:
    page = to_html(report)
    tags = Tags(page).found
    links = [a.get("src") or a.get("href") or "" for _, a in tags if a.get("src") or a.get("href")]
    assert all(link.startswith(("data:image/png;base64,", "#")) for link in links)
    assert "http://" not in page
    assert "https://" not in page
    assert sum(tag == "script" for tag, _ in tags) == 1
    pictures = [a for tag, a in tags if tag == "img"]
    assert all(a.get("alt") for a in pictures)
    expected = sum(len(row.pictures) for row in report.rows) + 2 * len(report.originals)
    assert len(pictures) == expected + 1 + len(report.defenses) + 2  # the strip on top, and the viewer's two
    for section in ("verdicts", "pictures", "tradeoff", "attacks", "layers", "fast", "costs", "threat", "settings"):
        assert f'id="{section}"' in page


def test_every_link_has_a_target(report: Report) -> None:
    tags = Tags(to_html(report)).found
    ids = [a["id"] for _, a in tags if a.get("id")]
    assert len(ids) == len(set(ids))
    assert all(a["href"][1:] in ids for tag, a in tags if tag == "a")


def test_hostile_text_stays_text(report: Report, hostile_report: Report) -> None:
    clean, hostile = Tags(to_html(report)).found, Tags(to_html(hostile_report)).found
    assert {tag for tag, _ in hostile} <= {tag for tag, _ in clean} | {"aside"}
    assert not any(name.startswith("on") for _, attrs in hostile for name in attrs)
    assert sum(tag == "script" for tag, _ in hostile) == 1
    assert "<script>" not in to_markdown(hostile_report)


def test_hostile_text_cannot_break_a_markdown_table(hostile_report: Report) -> None:
    lines = [line for line in to_markdown(hostile_report).splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in lines}) == 1


def test_markdown(report: Report) -> None:
    text = to_markdown(report)
    assert text.startswith("### Pictures leak under topk and dgp; hardened and dp hold against these attacks")
    assert "| dgp | **leaks** | 0.5" in text
    assert "- Do not count on topk or dgp to keep pictures private." in text


def test_the_first_screen_says_what_leaks_and_what_to_do(report: Report) -> None:
    assert "pick 4 of 4 out of a line-up of 20. With a defense: topk 4 of 4, dgp 4 of 4, hardened 0" in what_leaks(
        report
    )
    todo = advice(report)
    assert todo[1].startswith("Of those that hold, hardened costs least: a small test network reaches 84 % accuracy")
    assert "Doubt hardened: by the fast score 90 %" in todo[2]  # holding is not the last word
    dgp_only = replace(report, defenses=report.defenses[:3], judgements=report.judgements[:9])
    assert "Do not share gradients of private pictures" in advice(dgp_only)[1]
    idle = replace(report, rows=[replace(row, status="skipped", scores={}) for row in report.rows], cut=["all of it"])
    idle = replace(idle, judgements=judge(idle))
    assert what_leaks(idle) == ""
    assert "Make the attacks work first" in advice(idle)[0]
    half = replace(report, rows=[row for row in report.rows if row.defense != "dp"], cut=["dp: no time"])
    assert "Run the same command with --resume" in advice(replace(half, judgements=judge(half)))[-1]


@pytest.mark.parametrize("text", ["dgp", "adgp", "dual_prune(top=0.1)"])
def test_published_pruning_is_warned_of_whatever_was_found(report: Report, text: str) -> None:
    spec = to_spec(build(DEFENSES, text, "defense"))
    holding = replace(next(d for d in report.defenses if d.name == "hardened"), spec=spec)
    told = advice(replace(report, defenses=[d if d.name != "hardened" else holding for d in report.defenses]))
    assert any("does not withstand" in line and "use hardened" in line for line in told)
    for other in ("hardened", "topk", "dp"):
        assert not is_published(to_spec(build(DEFENSES, other, "defense")))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hardened", True),
        ("chain(hardened, gaussian_noise(std=0.1))", True),
        ("hardened(balance=0)", False),
        ("hardened(examples=1)", False),
        ("dgp", False),
    ],
)
def test_an_audit_says_where_engines_send_less_than_it_attacked(report: Report, text: str, said: bool) -> None:
    defense = build(DEFENSES, text, "defense")
    assert defense.weighs_examples == said
    attacked = [replace(report.defenses[0], spec=to_spec(defense))]
    active = [replace(report.attacks[0], active=True)]
    assert any("follow=True" in line for line in advice(replace(report, defenses=attacked, attacks=active))) == said
    assert not any("follow=True" in line for line in advice(replace(report, defenses=attacked)))


@pytest.mark.parametrize("line", [["--help"], ["train", "--help"], ["audit", "--help"]])
def test_the_help_warns_of_published_pruning(line: list[str]) -> None:
    words = re.findall(r"\w+", CliRunner().invoke(app, line).output)
    assert {"not", "withstand", "attacker", "arrived"} <= set(words)


def test_compare(report: Report) -> None:
    same = compare_reports(report, report)
    assert not any(change.kind != "same" for change in same)
    better = [
        replace(row, scores={"ssim": [0.1] * 4}, identified=[], contrast=[]) if row.defense == "dgp" else row
        for row in report.rows
    ]
    after = replace(report, rows=better, defenses=[d for d in report.defenses if d.name != "dp"])
    after = replace(after, judgements=judge(after))
    kinds = {change.defense: change.kind for change in compare_reports(report, after)}
    assert kinds == {"none": "same", "topk": "same", "dgp": "better", "hardened": "same", "dp": "gone"}
    assert {c.defense: c.kind for c in compare_reports(after, report)}["dgp"] == "worse"
