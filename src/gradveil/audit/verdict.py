"""The rule that turns scores into "leaks", "holds" or "incomplete". It never gives a defense the benefit of a doubt.

An attack *beats* blind guessing when at least one of these is true, each measured on the same pictures:

1. mean lead: the mean SSIM lead over the best blind guess is above `MARGIN` and above `t` standard errors, where `t`
   is the 97.5 % point of Student's distribution (a one-sided paired test at 2.5 %);
2. one picture: any single picture leads by at least `CLEAR` (a mean must not hide the one that leaked);
3. identification: more pictures are picked out of the line-up than chance explains (one-sided binomial, 2.5 %), where
   chance is at least how often guesses made for other uploads pick the same pictures;
4. contrast: pictures look more like the guess made for them than like the guesses the same attack made for other
   uploads, by more than `OWN` SSIM and `t` standard errors. This finds leaks under noise that a blind guess outscores.

A defense *leaks* if any attack beats blind guessing. It *holds* only if every attack ran on two uploads or more (on one
most parts of the rule can never be true), each beats blind guessing without the defense, and none does with it.
Everything else is *incomplete*. Holding is a statement about these attacks
on these pictures, not a proof. What a guard refuses was not withstood by the defense behind it: with refusals only, the
verdict is *incomplete*.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scipy import special

from .report import COLUMNS, Column, Judgement, Report, Row, Verdict

MARGIN = 0.02  # telling a picture's mean colour gains less than 0.01 SSIM over mid-grey
OWN = 0.05  # a right tint under noise gains about 0.03
CLEAR = 0.25  # a 4x4 thumbnail leads mid-grey by about 0.17, an 8x8 thumbnail by about 0.41
ERROR = 0.025
BASELINE = "none"  # the name of the undefended control


@dataclass(frozen=True)
class Comparison:
    """The outcome of comparing one row with the blind guess."""

    beats: bool
    why: str
    mean: float
    lead: float
    best: float
    detectable: float | None


def counts(report: Report, row: Row) -> bool:
    """Say whether the verdict goes by this row. Of an active attack's two rows it is the one the settings ask for.

    The bare client is the control that shows what the attack can do: it is judged without a guard.
    """
    active = any(attack.active for attack in report.attacks if attack.name == row.attack)
    return row.guarded == (active and bool(report.settings.get("guard")) and row.defense != BASELINE)


def counted(report: Report, column: Column, defense: str, attack: str) -> Row | None:
    """Return the row of an attack on a defense that the verdict goes by."""
    rows = (report.find(column, defense, attack, guarded=guarded) for guarded in (False, True))
    return next((row for row in rows if row is not None and counts(report, row)), None)


def best_floor(report: Report, column: Column) -> tuple[str, list[float]]:
    """Return the blind guess with the highest mean SSIM, and its SSIM per picture."""
    floors = [(f.guess, f.scores["ssim"]) for f in report.floors if f.column == column and "ssim" in f.scores]
    return max(floors, key=lambda f: fmean(f[1])) if floors else ("none", [])


def compare(
    ssim: list[float], floor: list[float], identified: list[bool], chance: float, contrast: Sequence[float] = ()
) -> Comparison:
    """Say whether an attack beats blind guessing, and by which part of the rule.

    >>> compare([0.9, 0.8, 0.7], [0.1, 0.1, 0.1], [True, True, True], chance=0.05).beats
    True
    >>> compare([0.11, 0.09, 0.10], [0.1, 0.1, 0.1], [False, False, False], chance=0.05).beats
    False
    """
    # A reconstruction that is not a number shows nothing: it scores 0, the SSIM of unrelated pictures.
    ssim = [value if math.isfinite(value) else 0.0 for value in ssim]
    leads = [a - b for a, b in zip(ssim, floor, strict=True)]
    mean, hits = fmean(leads), sum(identified)
    why = []
    if mean > _bar(leads, MARGIN):
        why.append(f"mean SSIM leads blind guessing by {mean:.2f}")
    if max(leads) >= CLEAR:
        why.append(f"one picture leads by {max(leads):.2f}")
    # bdtrc(k - 1, n, p) is the probability of k or more hits.
    if hits and float(special.bdtrc(hits - 1, len(identified), chance)) < ERROR:
        why.append(f"{hits} of {len(identified)} pictures were picked out of the line-up")
    own = [value if math.isfinite(value) else 0.0 for value in contrast]
    if own and fmean(own) > _bar(own, OWN):
        why.append(f"guesses resemble their own picture by {fmean(own):.2f} more than other guesses do")
    detectable = _bar(own, OWN) if own else None
    return Comparison(bool(why), "; ".join(why), fmean(ssim), mean, max(ssim), detectable)


def _bar(values: Sequence[float], least: float) -> float:
    """Return what a mean must exceed to be above `least` and above chance; nothing does with a single value."""
    n = len(values)
    if n < 2:
        return math.inf
    return max(least, float(special.stdtrit(n - 1, 1 - ERROR)) * stdev(values) / math.sqrt(n))


def against_floor(report: Report, row: Row) -> Comparison | None:
    """Return the comparison of a row with blind guessing; None if it holds no result."""
    if row.status == "refused" and row.floor:  # nothing left the client: the attacker is left with a blind guess
        return Comparison(False, "", fmean(row.floor), 0.0, max(row.floor), None)
    ssim = row.scores.get("ssim", [])
    if row.status != "ok" or not ssim or len(ssim) != len(row.floor):
        return None
    return compare(ssim, row.floor, row.identified, max(report.chance, row.mistaken), row.contrast)


def judge(report: Report) -> list[Judgement]:
    """Return the verdict on every defense: overall first, then per column."""
    out = []
    for defense in report.defenses:
        parts = [_judge_column(report, defense.name, column) for column in COLUMNS]
        out += [_overall(defense.name, parts), *parts]
    return out


def _judge_column(report: Report, defense: str, column: Column) -> Judgement:
    guess, floor = best_floor(report, column)
    tests: dict[str, Comparison] = {}
    beaten, missing, refused = [], [], 0
    for attack in report.attacks:
        row = counted(report, column, defense, attack.name)
        test = None if row is None else against_floor(report, row)
        if test is None:
            missing.append(f"{attack.name} has no result: {row.note if row and row.note else 'it did not run'}")
            continue
        tests[attack.name] = test
        refused += row is not None and row.status == "refused"
        if test.beats:
            beaten.append(f"{attack.name}: {test.why}")
        control = report.find(column, BASELINE, attack.name)
        proof = None if control is None else against_floor(report, control)
        if proof is None or not proof.beats:
            missing.append(f"{attack.name} is not shown to work here without a defense")
    if tests and refused == len(tests):
        missing.append("the guard refused every attack, so the defense itself was not attacked: add a passive attack")
    setting = report.column(column)
    if len(setting.pictures) <= setting.batch_size:
        missing.append(
            f"one upload cannot show that nothing leaks: attack at least {2 * setting.batch_size} pictures, better more"
        )
    verdict: Verdict = "leaks" if beaten else "incomplete" if missing or not tests else "holds"
    worst = max(tests, key=lambda name: tests[name].mean, default=None)
    reasons = beaten if beaten else missing or [f"no attack beats blind guessing ({guess})"]
    bars = [t.detectable for t in tests.values() if t.detectable is not None]
    return Judgement(
        defense=defense,
        column=column,
        verdict=verdict,
        reasons=reasons,
        worst_attack=worst,
        worst=tests[worst].mean if worst else None,
        worst_picture=max((t.best for t in tests.values()), default=None),
        floor=fmean(floor) if floor else None,
        detectable=max(bars, default=None),
    )


def _overall(defense: str, parts: list[Judgement]) -> Judgement:
    verdicts = [part.verdict for part in parts]
    verdict: Verdict = "leaks" if "leaks" in verdicts else "incomplete" if "incomplete" in verdicts else "holds"
    reasons = [f"{part.column}: {reason}" for part in parts if part.verdict == verdict for reason in part.reasons]
    # The headline is the worst lead of any attack in any column.
    worst = max(parts, key=lambda p: -math.inf if p.worst is None else p.worst - (p.floor or 0.0))
    pictures = [p.worst_picture for p in parts if p.worst_picture is not None]
    return Judgement(
        defense=defense,
        column=None,
        verdict=verdict,
        reasons=reasons,
        worst_attack=worst.worst_attack,
        worst=worst.worst,
        worst_picture=max(pictures, default=None),
        floor=worst.floor,
        detectable=worst.detectable,
    )
