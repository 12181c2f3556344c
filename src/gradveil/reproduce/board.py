"""docs/leaderboard.md, rendered from the cards."""

import json
import math
from pathlib import Path
from statistics import fmean
from typing import Any

from ..errors import ConfigError
from . import cards
from .figures import shown
from .pages import table

LOST_SSIM, LOST_IDENTIFIED = 0.1, 0.5  # from here on a threat counts as lost
SURE = 1.96  # standard deviations of a normal variable, either way, that hold 95 %
UNMEASURED = 1.0  # SSIM above blind of a threat that was not measured, and the most that counts of one that was
HEAD = """# Leaderboard

<!-- Rendered from results/cards/ by `gradveil leaderboard render`: change a card or the renderer, not this page. -->

How much of a private picture somebody recovers who knows the defense, what the defense costs in accuracy, and what it
sends. Every row is a card in [results/cards](../results/cards), which names the files behind its scores and accuracy.
The threats, each with the recorded attack that reaches the highest SSIM:

{threats}

How to read the table:

- **Scores.** SSIM, the mean over `n` pictures of all recorded seeds: 1 is a copy, "blind" is what the best guess
  reaches that never looks at the upload. "identified" is how often the private picture is the nearest of 100 or so, by
  whichever recorded attack does that best, in brackets with the 95 % interval that so many pictures leave (Wilson). The
  column "setting" has the batch size, unless the cell names another. ATS is scored against the picture as ATS changed
  it, which is no less private. Fewer attacks were run on later uploads than on first ones: a lower score later does not
  mean that later uploads are safer.
- **ResNet18 is not the worst case.** On CNN6 the attack `ggl` of the first upload identifies 80 % behind the noise of
  `hardened` without mixing ([measured](hardened.md#what-a-generator-finds)).
- **What was attacked** is the text under the name. `hardened` by default mixes 32 examples before it sends; here it
  sends each alone, the harder case. Outpost's gate is open: shut, it defends nothing.
- **Order.** By the number of threats lost, fewest first. A threat is lost if SSIM reaches {ssim} above blind, if the
  upper end of the interval of "identified" reaches {half} % (it is then not told from lost), or if it was not measured:
  an attack that was not run proves nothing. Fewer than {fewest} pictures count only where {ssim} or {half} % is reached
  on them: they can show that a defense is broken, not that it holds. Then by SSIM above blind, least first: the mean
  over the three threats, where one that was not measured counts as 1, rounded to one decimal. Then by upload / dense,
  least first, then by name.
- **Accuracy** is on test pictures; in brackets that of the same training without a defense. "Trained" names the
  defense where it is not exactly what was attacked. Where it is of one seed, small differences say nothing.
- **Upload / dense** is the bytes of one first upload as the [wire](wire-format.md) codes it, over four bytes for each
  parameter. At batch 1 many entries of a gradient are exact zeros, which is why `none` is below 1.
"""
SUBMIT = """
## Submit a card

1. Write the [defense](defenses.md) as a class in a module of your own; below it is `Mine` in `mine.py` in the current
   folder.
2. Attack it with the strongest attackers of each threat that you can find, at least one on the first upload. Each run
   is a folder; `--seed 1`, `--seed 2` add pictures. A threat without a run, or with fewer than {fewest} pictures and
   little found, counts as lost. No picture is chosen by hand: the seed draws them.

   ```
{commands}
   ```

   An attacker who does not know the defense does not count; `gradveil attack` tells it. [Attacks](attacks.md) of your
   own are named like the defense. A defense that mixes pictures first is attacked on one. A defense that keeps nothing
   between uploads needs no run with `--rounds`.
3. `gradveil leaderboard draft` makes the card, `results/cards/NAME.json`, and keeps the scores beside it, but none of
   the pictures:

   ```
{draft}
   ```

   Accuracy is added by hand, as in the example below, from `gradveil train` with and without the defense; without it
   the page says "not measured". Where another defense was trained than attacked, a `text` in `accuracy` says which.
4. Check the card and render this page, then open a pull request with the card, the evidence and the page. One author
   has one card for a defense.

   ```
{check}
   ```

For scores from other code, write the card by hand. `text` builds the defense in gradveil, or names it as
`package.module:Class`, which the validator does not import. `source` says where its code is, `evidence` where the
scores of every single picture are: an address (`https://...`), or files of this repository (`results/...`), which must
be there. SSIM, LPIPS and `identified`, the share of pictures that are the nearest of 100, are means over `n` pictures,
of all seeds you ran; `blind_ssim` is the best blind guess at the same pictures; bytes are of one upload. May be left
out: `lpips`, `accuracy`, the `batch_size` of a threat where it is the setting's.

A card is replaced when somebody shows a stronger attack on it: send the result file, whoever made the defense.

```json
{example}
```
"""
SETTING = "--model resnet18 --data cifar10 --defense mine:Mine --pictures 20"
RUNS = (
    "--attack 'inverting_gradients(steps=2500)' --out runs/mine-ig",
    "--attack 'ggl(steps=150, restarts=2, pool=32)' --out runs/mine-ggl",
    "--attack 'chained(inverting_gradients(steps=2500))' --rounds 1 --out runs/mine-later",
    "--attack imprint --no-guard --out runs/mine-imprint",
    "--attack 'spotlight(batch=1)' --no-guard --out runs/mine-spotlight",
)
ATTACKS = (f'SETTING="{SETTING}"', *(f"gradveil attack $SETTING {run}" for run in RUNS))
DRAFT = "gradveil leaderboard draft mine runs/mine-* --by 'your name' --source https://example.org/your/code"
CHECK = ("gradveil leaderboard check results/cards/mine.json", "gradveil leaderboard render")
EXAMPLE: dict[str, Any] = {
    "schema": 1,
    "defense": "my pruning",
    "text": "error_feedback(top_k(keep=0.1))",
    "by": "your name",
    "date": "2026-01-31",
    "source": "https://example.org/where-the-code-is",
    "setting": {"model": "resnet18", "data": "cifar10", "batch_size": 1, "pictures": 20},
    "threats": [
        {
            "threat": "first upload",
            "attack": "inverting_gradients(steps=2500)",
            "adaptive": True,
            "ssim": 0.93,
            "lpips": 0.01,
            "identified": 1.0,
            "blind_ssim": 0.12,
            "n": 20,
            "batch_size": 1,
            "evidence": "https://example.org/scores.json",
        }
    ],
    "accuracy": {
        "percent": 92.9,
        "undefended_percent": 93.5,
        "setting": "resnet18, cifar10, 100 epochs, 3 seeds",
        "evidence": "https://example.org/training.json",
    },
    "bytes": {"up": 3500000, "dense": 44695848},
}


def render(folder: Path) -> str:
    """Return the page for the cards in `folder / "cards"`; raises `ConfigError` for one that is not valid."""
    if not folder.is_dir():  # a wrong path would write a page without cards over the real one
        raise ConfigError(f"there is no folder {folder}: cards lie in cards/ of the recorded results (--results)")
    found = cards.load_all(folder)
    threats = "\n".join(f"- **{name}**: {text}." for name, text in cards.THREATS.items())
    text = HEAD.format(threats=threats, ssim=LOST_SSIM, half=f"{100 * LOST_IDENTIFIED:.0f}", fewest=cards.FEWEST)
    submit = SUBMIT.format(
        fewest=cards.FEWEST,
        commands=_indented(*ATTACKS),
        draft=_indented(DRAFT),
        check=_indented(*CHECK),
        example=json.dumps(EXAMPLE, indent=2),
    )
    if not found:
        return text + "\nNo card yet.\n" + submit
    rows = [["defense", *cards.THREATS, "accuracy, % (undefended)", "upload / dense", "setting", "by"]]
    rows += [_row(card) for card in sorted(found, key=_rank)]
    return text + "\n" + table(rows) + submit


def _indented(*commands: str) -> str:
    return "\n".join(f"   {command}" for command in commands)


def _rank(card: dict[str, Any]) -> tuple[int, float, float, str]:
    """Return what cards are sorted by: leaving a threat out must not be a way up.

    Scores above blind are rounded, since a few pictures more or less move them by hundredths.
    """
    lost, above = 0, []
    for name in cards.THREATS:
        found = [t for t in card["threats"] if t["threat"] == name and _counts(t)]
        above.append(max((min(UNMEASURED, _above(t)) for t in found), default=UNMEASURED))
        picked = max((interval(t["identified"], t["n"])[1] for t in found), default=1.0)
        lost += above[-1] >= LOST_SSIM or picked >= LOST_IDENTIFIED
    return lost, round(fmean(above), 1), card["bytes"]["up"] / card["bytes"]["dense"], card["defense"]


def _above(threat: dict[str, Any]) -> float:
    return float(threat["ssim"] - threat["blind_ssim"])


def _counts(threat: dict[str, Any]) -> bool:
    """Say whether scores count: few pictures show that a defense is broken, but not that it holds."""
    broken = _above(threat) >= LOST_SSIM or threat["identified"] >= LOST_IDENTIFIED
    return broken or threat["n"] >= cards.FEWEST


def interval(share: float, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of `n` pictures, after Wilson (1927), who keeps it within 0 and 1.

    >>> [round(end, 3) for end in interval(0.45, 60)]
    [0.331, 0.575]
    """
    center = (share + SURE**2 / (2 * n)) / (1 + SURE**2 / n)
    away = SURE * math.sqrt(share * (1 - share) / n + (SURE / (2 * n)) ** 2) / (1 + SURE**2 / n)
    return max(center - away, 0.0), min(center + away, 1.0)


def _row(card: dict[str, Any]) -> list[str]:
    setting, size = card["setting"], card["bytes"]
    return [
        f"{card['defense']}<br>`{card['text']}`",
        *(_score([t for t in card["threats"] if t["threat"] == name], setting) for name in cards.THREATS),
        _accuracy(card["accuracy"]) if "accuracy" in card else "not measured",
        f"{size['up'] / size['dense']:.3f}",
        f"{setting['model']}, {setting['data']}, batch {setting['batch_size']}",
        f"{card['by']}, {card['date']}",
    ]


def _score(threats: list[dict[str, Any]], setting: dict[str, Any]) -> str:
    if not threats:
        return "not measured"
    worst = max(threats, key=lambda t: float(t["ssim"]))
    most = max(threats, key=lambda t: (t["identified"], t["n"]))
    low, high = (f"{100 * end:.0f}" for end in interval(most["identified"], most["n"]))
    size = worst.get("batch_size", setting["batch_size"])
    words = [
        f"{shown(worst['ssim'])} (blind {shown(worst['blind_ssim'])})",
        f"identified {100 * most['identified']:.0f} % ({low} to {high})",
        f"`{worst['attack'].partition('(')[0]}`",
        *([f"batches of {size}"] if size != setting["batch_size"] else []),
        f"n {worst['n']}",
        *([] if any(_counts(t) for t in threats) else ["too few to count as measured"]),
    ]
    return ", ".join(words)


def _accuracy(accuracy: dict[str, Any]) -> str:
    trained = f"trained `{accuracy['text']}`, " if "text" in accuracy else ""
    return f"{accuracy['percent']:.2f} ({accuracy['undefended_percent']:.2f})<br>{trained}{accuracy['setting']}"
