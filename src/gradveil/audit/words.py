"""The report in plain sentences. Each one is true whatever the numbers are; none says that a defense is safe."""

import math
from collections.abc import Sequence

from .report import Judgement, Report
from .verdict import BASELINE

VERDICT_WORDS = {
    "leaks": "leaks",
    "holds": "holds against these attacks",
    "incomplete": "incomplete: cannot be judged",
}
COLUMN_WORDS = {
    "diagnostic": "Worst case: one picture per upload, evaluation mode, labels known, a fresh client.",
    "realistic": "Everyday case: a batch of pictures, training mode, labels unknown, a client that has sent before.",
}
METRIC_WORDS = {
    "ssim": "structural similarity, 1 = identical",
    "psnr": "peak signal-to-noise ratio in dB, higher = closer",
    "mse": "mean squared pixel error, 0 = identical",
    "lpips": "learned perceptual distance, 0 = identical",
}


def label(defense: str) -> str:
    """Return how a defense is called in running text."""
    return "no defense" if defense == BASELINE else defense


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for people; a dash where there is none.

    >>> number(0.1234), number(-0.001), number(None)
    ('0.12', '0.00', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:z.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share for people; a small share never reads as zero.

    >>> percent(0.2), percent(0.0004), percent(0.0)
    ('20 %', '0.04 %', '0 %')
    """
    if share is None or not math.isfinite(share):
        return "–"
    value = 100 * share
    digits = 0 if value >= 10 or value == 0 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} %"


def size(count: float) -> str:
    """Return a number of bytes for people.

    >>> size(999), size(12_345), size(44_695_848)
    ('999 B', '12.3 kB', '44.7 MB')
    """
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(0.25), duration(48), duration(150)
    ('0.2 s', '48 s', '2 min 30 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def listed(names: Sequence[str]) -> str:
    """Return names as a phrase.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "nothing"


def headline(report: Report) -> str:
    """Return the one sentence a reader should take away."""
    overall = {j.defense: j for j in report.judgements if j.column is None}
    control = overall.get(BASELINE)
    if control is None or control.verdict != "leaks":
        return "The attacks did not work without a defense, so nothing here is evidence of privacy"
    groups = {v: [d for d, j in overall.items() if d != BASELINE and j.verdict == v] for v in VERDICT_WORDS}
    if not any(groups.values()):
        return "This model's gradient gives its pictures away"
    parts = []
    if groups["leaks"]:
        every = not groups["holds"] and not groups["incomplete"] and len(groups["leaks"]) > 1
        names = "Every defense tested" if every else listed(groups["leaks"])
        parts.append(f"{names} leak{'s' if every or len(groups['leaks']) == 1 else ''}")
    if groups["holds"]:
        parts.append(f"{listed(groups['holds'])} hold{'s' if len(groups['holds']) == 1 else ''} against these attacks")
    if groups["incomplete"]:
        parts.append(f"{listed(groups['incomplete'])} cannot be judged")
    return "; ".join(parts)


def explain(judgement: Judgement) -> str:
    """Return one sentence on what the strongest attack got under a defense."""
    if judgement.worst is None:
        return f"No attack has a result. {judgement.reasons[0] if judgement.reasons else ''}".strip()
    got = f"SSIM {number(judgement.worst)} on average and {number(judgement.worst_picture)} on the best picture"
    if judgement.verdict == "leaks":
        return (
            f"The strongest attack ({judgement.worst_attack}) gets {got}; a blind guess gets {number(judgement.floor)}."
        )
    if judgement.verdict == "holds":
        limit = ""
        if judgement.detectable is not None:
            limit = f" A contrast under {number(judgement.detectable)} would have gone unseen."
        return f"The strongest attack ({judgement.worst_attack}) gets {got}, no better than guessing.{limit}"
    return f"The strongest attack with a result gets {got}. {judgement.reasons[0]}."


def summary(report: Report) -> str:
    """Return what was done, in two sentences."""
    settings = report.settings
    defended = [d.name for d in report.defenses if d.name != BASELINE]
    n = len(report.column("diagnostic").pictures)
    return (
        f"A client's gradient of {n} {'picture' if n == 1 else 'pictures'} was computed on {settings.get('model')}, "
        f"protected, sent through the wire format and attacked as it arrived: "
        f"{len(report.attacks)} {'attack' if len(report.attacks) == 1 else 'attacks'} on "
        f"{len(defended)} {'defense' if len(defended) == 1 else 'defenses'} and on the bare gradient. "
        "A score counts only where it beats a guess that never looked at the gradient."
    )
