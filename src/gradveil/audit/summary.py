"""The report in plain sentences. Each one is true whatever the numbers are; none says that a defense is safe."""

from ..defenses.advice import WARNING, follows_examples, is_published
from .report import Judgement, Report, Verdict
from .verdict import BASELINE, against_floor, counts
from .words import label, listed, number, percent

SUSPECT = 0.1  # readable share from which the fast score doubts a defense that holds


def headline(report: Report) -> str:
    """Return the one sentence a reader should take away."""
    if not _control_leaks(report):
        return "The attacks did not work even without a defense, so nothing here is evidence of privacy"
    groups = {verdict: _judged(report, verdict) for verdict in ("leaks", "holds", "incomplete")}
    if not any(groups.values()):
        return "This model's gradient gives its pictures away"
    parts = []
    if groups["leaks"]:
        every = not groups["holds"] and not groups["incomplete"] and len(groups["leaks"]) > 1
        parts.append(f"Pictures leak under {'every defense tested' if every else listed(groups['leaks'])}")
    if groups["holds"]:
        verb = "holds" if len(groups["holds"]) == 1 else "hold"
        parts.append(f"{listed(groups['holds'])} {verb} against these attacks{_behind(report)}")
    if groups["incomplete"]:
        parts.append(f"{listed(groups['incomplete'])} cannot be judged yet")
    return "; ".join(parts)


def what_leaks(report: Report) -> str:
    """Return how many private pictures the best attack recognisably rebuilt, with and without each defense.

    Empty where the attacks do not work: their counts would say nothing.
    """
    found = {d.name: _recognised(report, d.name) for d in report.defenses}
    n = len(report.column("diagnostic").pictures)
    bare = found.pop(BASELINE, None)
    if not bare or not _control_leaks(report):
        return ""
    text = (
        f"Without a defense, an attacker who reads one upload rebuilds its picture well enough to pick {bare} of {n} "
        f"out of a line-up of {report.lineup}."
    )
    rest = [f"{name} {count} of {n}" for name, count in found.items() if count is not None]
    # Guesses made for other pictures, or from the label alone, may hit more often than the size of the line-up says.
    mistaken = [row.mistaken for row in report.rows if row.column == "diagnostic"]
    luck = f"Luck alone picks up to {percent(max([report.chance, *mistaken]))}."
    return f"{text} With a defense: {', '.join(rest)}. {luck}" if rest else f"{text} {luck}"


def advice(report: Report) -> list[str]:
    """Return what to do now, the most urgent first."""
    if not _control_leaks(report):
        return [
            'Make the attacks work first: the section "Why attacks failed" names causes and remedies.'
            if report.findings
            else "Let the attacks on the bare gradient run to their end first.",
            "Until then treat every gradient as if it gave its pictures away.",
            *_published(report),
        ]
    leaks, holds, unjudged = (_judged(report, verdict) for verdict in ("leaks", "holds", "incomplete"))
    out = []
    if leaks:
        out.append(f"Do not count on {listed(leaks, 'or')} to keep pictures private.")
    if holds:
        out.append(_choice(report, holds))
        out += [_doubt(report, name) for name in holds if _readable(report, name) > SUSPECT]
        out.append("Before you rely on it, audit again with more pictures, longer attacks and another seed.")
        out += _unsearched(report)
    elif not unjudged:
        tried = "these settings" if leaks else "no protection"
        out.append(
            f"Do not share gradients of private pictures under {tried}. Try the hardened release or stronger noise, "
            "larger batches, or secure aggregation, and audit again."
        )
    if unjudged:
        why = report.judgement(unjudged[0]).reasons
        cut = " Run the same command with --resume and a larger budget." if report.cut else ""
        out.append(f"{listed(unjudged)} cannot be judged: {why[0] if why else 'no result'}.{cut}")
    return out + _published(report) + _guard_advice(report) + _engines(report)


def _unsearched(report: Report) -> list[str]:
    """Say that the attack is missing which finds most under noise."""
    if any(column.grants.get("prior") for column in report.columns):
        return []
    return [
        "No generator of such pictures was searched, which finds most under noise: make one with gradveil generator "
        "train, and audit again with --generator."
    ]


def _published(report: Report) -> list[str]:
    """Warn of dual pruning as published, whatever the attacks of this audit found."""
    return [f"{d.name} {WARNING}: use hardened." for d in report.defenses if is_published(d.spec)]


def explain(judgement: Judgement) -> str:
    """Return what the strongest attack got under a defense."""
    column, _, why = (judgement.reasons or ["each: no attack ran"])[0].partition(": ")
    if judgement.worst is None:
        return f"No attack has a result. In the {column} column {why}."
    got = f"SSIM {number(judgement.worst)} on average and {number(judgement.worst_picture)} on the best picture"
    if judgement.verdict == "leaks":
        text = f"The strongest attack ({judgement.worst_attack}) gets {got}; a blind guess gets "
        text += f"{number(judgement.floor)}."
        if judgement.floor is not None and judgement.worst <= judgement.floor:
            text += f" It leaks all the same: in the {column} column {why}."
        return text
    if judgement.verdict == "holds":
        limit = ""
        if judgement.detectable is not None:
            limit = f" A leak below a contrast of {number(judgement.detectable)} would have gone unseen."
        return f"The strongest attack ({judgement.worst_attack}) gets {got}, no better than guessing.{limit}"
    return f"The strongest attack with a result gets {got}. In the {column} column {why}."


def method(report: Report) -> str:
    """Return what was done."""
    defended = len([d for d in report.defenses if d.name != BASELINE])
    n = len(report.column("diagnostic").pictures)
    return (
        f"A client's gradient of {n} {'picture' if n == 1 else 'pictures'} was computed on "
        f"{report.settings.get('model')}, protected, sent through the wire format and attacked as it arrived: "
        f"{len(report.attacks)} {'attack' if len(report.attacks) == 1 else 'attacks'} on "
        f"{defended} {'defense' if defended == 1 else 'defenses'} and on the bare gradient. "
        "A score counts only where it beats a guess that never looked at the gradient."
    )


def _control_leaks(report: Report) -> bool:
    return any(j.verdict == "leaks" for j in report.judgements if j.defense == BASELINE and j.column is None)


def _judged(report: Report, verdict: Verdict) -> list[str]:
    overall = [j for j in report.judgements if j.column is None and j.defense != BASELINE]
    return [j.defense for j in overall if j.verdict == verdict]


def _recognised(report: Report, defense: str) -> int | None:
    rows = [r for r in report.rows if r.column == "diagnostic" and r.defense == defense and counts(report, r)]
    ran = [sum(row.identified) for row in rows if row.status in ("ok", "refused")]
    return max(ran, default=None)


def _choice(report: Report, holds: list[str]) -> str:
    """Name the defense that holds at the lowest cost in accuracy, where that was measured."""
    known = {d.name: d.accuracy for d in report.defenses if d.accuracy is not None}
    bare = known.get(BASELINE)
    able = [name for name in holds if name in known]
    if not able or bare is None:
        names = f"{listed(holds)}{_behind(report)}"
        return f"{names} stopped every attack tried here; measure the cost in accuracy with gradveil train."
    best = max(able, key=known.__getitem__)
    alone = f"{best}{_behind(report)} stopped every attack tried here"
    first = alone if len(holds) == 1 else f"Of those that hold, {best} costs least"
    return f"{first}: a small test network reaches {percent(known[best])} accuracy under it, {percent(bare)} without."


def _behind(report: Report) -> str:
    """Say that part of the credit is the guard's, where clients with one were judged."""
    guarded = bool(report.settings.get("guard")) and any(attack.active for attack in report.attacks)
    return " behind the guard" if guarded else ""


def _readable(report: Report, defense: str) -> float:
    values = [
        v for risk in (report.fast.risks if report.fast else []) if risk.defense == defense for v in risk.readable
    ]
    return sum(values) / len(values) if values else 0.0


def _doubt(report: Report, defense: str) -> str:
    share = percent(_readable(report, defense))
    return f"Doubt {defense}: by the fast score {share} of the coarse picture is still readable to a better attack."


def _guard_advice(report: Report) -> list[str]:
    """Say what servers that change the model get from clients without and with a guard."""
    active = [attack.name for attack in report.attacks if attack.active]
    open_door = [r for r in report.rows if r.attack in active and not r.guarded]
    hits = [row for row in open_door if (test := against_floor(report, row)) and test.beats]
    if not hits:
        return []
    attacks = [name for name in active if any(row.attack == name for row in hits)]
    read = [label(d.name) for d in report.defenses if any(row.defense == d.name for row in hits)]
    behind = [row for row in report.rows if row.attack in attacks and row.guarded]
    refused = sum(row.status == "refused" for row in behind)
    then = (
        "With the guard the client refuses such a model and sends nothing: keep the guard on."
        if behind and refused == len(behind)
        else f"The guard refuses it in {refused} of {len(behind)} cases only."
    )
    return [f"A server that changes the model ({listed(attacks)}) reads pictures under {listed(read)}. {then}"]


def _engines(report: Report) -> list[str]:
    """Say where clients elsewhere send less protected uploads than those attacked here."""
    following = [d.name for d in report.defenses if follows_examples(d.spec)]
    if not following or not any(attack.active for attack in report.attacks):
        return []
    return [
        f"{listed(following)} was attacked as Veil.protect sends it, with noise that follows single examples. DDP and "
        "Flower do so with follow=True only, NVFlare never: audit hardened(balance=0) for what they send otherwise."
    ]
