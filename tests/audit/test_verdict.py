"""The verdict never gives a defense the benefit of a doubt."""

from dataclasses import replace

import pytest

from gradveil.audit.report import Report, Row
from gradveil.audit.verdict import compare, judge


def change(report: Report, where, **values) -> Report:
    rows = [replace(row, **values) if where(row) else row for row in report.rows]
    return replace(report, rows=rows)


def verdict(report: Report, defense: str) -> str:
    found = {j.defense: j.verdict for j in judge(report) if j.column is None}
    return found[defense]


def test_made_up_report(report: Report) -> None:
    assert {d.name: verdict(report, d.name) for d in report.defenses} == {
        "none": "leaks",
        "topk": "leaks",
        "dgp": "leaks",  # the naive attack alone would have called it safe
        "hardened": "holds",
        "dp": "holds",
    }


def test_headline_is_the_worst_attack(report: Report) -> None:
    dgp = next(j for j in judge(report) if j.defense == "dgp" and j.column is None)
    assert dgp.worst_attack == "mask_aware"
    assert dgp.worst == pytest.approx(0.55, abs=0.05)


@pytest.mark.parametrize("status", ["skipped", "failed"])
def test_missing_attack_is_incomplete(report: Report, status: str) -> None:
    def one(row: Row) -> bool:
        return (row.column, row.defense, row.attack) == ("realistic", "hardened", "mask_aware")

    assert verdict(change(report, one, status=status, note="no time"), "hardened") == "incomplete"
    gone = replace(report, rows=[row for row in report.rows if not one(row)])
    assert verdict(gone, "hardened") == "incomplete"


def test_attack_that_fails_without_defense_proves_nothing(report: Report) -> None:
    weak = change(report, lambda r: r.defense == "none" and r.attack == "mask_aware", scores={"ssim": [0.1] * 4})
    weak = change(weak, lambda r: r.defense == "none" and r.attack == "mask_aware", identified=[], contrast=[])
    assert verdict(weak, "hardened") == "incomplete"
    assert verdict(weak, "dgp") == "leaks"  # a leak is a leak all the same


def test_refused_counts_as_nothing_recovered_but_not_as_withstood(report: Report) -> None:
    def refused(which):
        return change(report, which, status="refused", scores={}, identified=[])

    assert verdict(refused(lambda r: r.defense == "hardened" and r.attack == "mask_aware"), "hardened") == "holds"
    assert verdict(refused(lambda r: r.defense == "hardened"), "hardened") == "incomplete"


def test_one_upload_cannot_hold(report: Report) -> None:
    columns = [replace(c, batch_size=len(c.pictures)) for c in report.columns]
    single = replace(report, columns=columns)
    assert verdict(single, "hardened") == "incomplete"
    assert verdict(single, "dgp") == "leaks"  # a leak is a leak all the same
    reasons = next(j.reasons for j in judge(single) if j.defense == "hardened" and j.column == "realistic")
    assert reasons == ["one upload cannot show that nothing leaks: attack at least 8 pictures, better more"]


def test_one_leaked_picture_among_many_is_a_leak() -> None:
    found = compare([0.1] * 19 + [0.95], [0.1] * 20, [False] * 20, chance=0.05)
    assert found.beats
    assert "one picture" in found.why


def test_tiny_but_steady_lead_is_no_leak() -> None:
    assert not compare([0.11] * 8, [0.10] * 8, [False] * 8, chance=0.05).beats
    assert compare([0.14] * 8, [0.10] * 8, [False] * 8, chance=0.05).beats


def test_identification_alone_is_a_leak() -> None:
    found = compare([0.1] * 8, [0.1] * 8, [True] * 4 + [False] * 4, chance=0.05)
    assert found.beats
    assert "line-up" in found.why
    assert not compare([0.1] * 8, [0.1] * 8, [True] + [False] * 7, chance=0.05).beats


def test_contrast_finds_what_a_blind_guess_outscores() -> None:
    quiet = [0.01, -0.02, 0.03, 0.0, 0.02, -0.01]
    loud = [value + 0.12 for value in quiet]
    for own, beats in ((quiet, False), (loud, True)):
        found = compare([0.1] * 6, [0.3] * 6, [False] * 6, chance=0.03, contrast=own)
        assert found.beats == beats
    assert "resemble their own picture" in found.why


def test_not_a_number_never_beats() -> None:
    assert not compare([float("nan")] * 4, [0.1] * 4, [False] * 4, chance=0.05).beats


def test_false_alarms_are_rare() -> None:
    import numpy as np

    rng = np.random.default_rng(0)
    alarms = 0
    for _ in range(400):
        ssim = 0.1 + 0.05 * rng.standard_normal(8)
        found = compare(ssim.tolist(), [0.1] * 8, (rng.random(8) < 0.03).tolist(), chance=0.03)
        alarms += found.beats
    assert alarms / 400 < 0.06
