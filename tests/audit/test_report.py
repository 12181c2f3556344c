"""The report file: what is written is what is read, and nothing else is accepted."""

import json
from dataclasses import replace

import pytest

from gradveil.audit.report import Report
from gradveil.errors import ConfigError


def test_round_trip(report: Report) -> None:
    assert Report.from_json(report.to_json()) == report


def test_save_and_load(report: Report, tmp_path) -> None:
    report.save(tmp_path / "report.json")
    assert Report.load(tmp_path / "report.json") == report
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_not_a_number_is_null(report: Report) -> None:
    row = replace(report.rows[0], scores={"ssim": [float("nan"), float("inf"), 0.5, 0.5]})
    text = replace(report, rows=[row]).to_json()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = Report.from_json(text).rows[0].scores["ssim"]
    assert back[2:] == [0.5, 0.5]
    assert all(value != value for value in back[:2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema=99), "schema"),
        (lambda d: d.update(surprise=1), "unknown key 'surprise'"),
        (lambda d: d.pop("rows"), "incomplete"),
        (lambda d: d.update(seed="0"), "report: seed must be int"),
        (lambda d: d["rows"][0].update(status="fine"), r"rows\[0\]: status must be Literal\['ok'"),
        (lambda d: d["rows"][0].update(scores=[1]), r"rows\[0\]: scores must be dict"),
        (lambda d: d["originals"].__setitem__(0, 3), r"originals\[0\] must be a table"),
    ],
)
def test_wrong_files_are_refused_by_name(report: Report, change, message: str) -> None:
    data = json.loads(report.to_json())
    change(data)
    with pytest.raises(ConfigError, match=message):
        Report.from_json(json.dumps(data))


def test_other_files_are_refused(tmp_path) -> None:
    for text in ("", "[]", "{}", "\x00"):
        with pytest.raises(ConfigError):
            Report.from_json(text)
    with pytest.raises(ConfigError, match="cannot read"):
        Report.load(tmp_path / "missing.json")
