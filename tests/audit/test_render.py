"""Pages and tables are pure functions of the report, and nothing in it can become markup."""

import re
from html.parser import HTMLParser

from gradveil.audit.compare import compare_reports
from gradveil.audit.render import to_html, to_markdown
from gradveil.audit.report import Report


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


def test_compare(report: Report) -> None:
    same = compare_reports(report, report)
    assert not any(change.kind != "same" for change in same)
    from dataclasses import replace

    from gradveil.audit.verdict import judge

    better = [
        replace(row, scores={"ssim": [0.1] * 4}, identified=[], contrast=[]) if row.defense == "dgp" else row
        for row in report.rows
    ]
    after = replace(report, rows=better, defenses=[d for d in report.defenses if d.name != "dp"])
    after = replace(after, judgements=judge(after))
    kinds = {change.defense: change.kind for change in compare_reports(report, after)}
    assert kinds == {"none": "same", "topk": "same", "dgp": "better", "hardened": "same", "dp": "gone"}
    assert {c.defense: c.kind for c in compare_reports(after, report)}["dgp"] == "worse"
