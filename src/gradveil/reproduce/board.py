"""docs/leaderboard.md, rendered from the cards."""

from pathlib import Path
from typing import Any

from . import cards
from .figures import shown
from .pages import table

HEAD = """# Leaderboard

<!-- Rendered from results/cards/ by `gradveil leaderboard render`: change a card or the renderer, not this page. -->

How much of a private picture the strongest known attacker recovers who knows the defense, what the defense costs in
accuracy, and what it sends. SSIM, mean over the attacked pictures: 1 is a copy, "blind" is what a guess reaches that
never looks at the gradient. The best defenses come first: those whose worst score lies least above blind guessing.

{threats}
"""
SUBMIT = """
## Submit a card

1. Attack your defense with the strongest adaptive attackers you can find, at least one on the client's first upload:
   `gradveil reproduce beyond --scale full`, `gradveil audit`, or code of your own. An attacker who does not know the
   defense does not count. 20 pictures or more, none chosen by hand.
2. Write `results/cards/NAME.json`. `gradveil leaderboard card DEFENSE` makes one from recorded results; the fields are
   those of any card there. `source` says where the code is, `evidence` where the scores of every single picture are.
3. `gradveil leaderboard check results/cards/NAME.json` must find nothing wrong; `gradveil leaderboard render` rewrites
   this page. Open a pull request with the card, the page and the evidence.

A card is replaced when somebody shows a stronger attack on it: send the result file, whoever made the defense.
"""


def render(folder: Path) -> str:
    """Return the page for the cards in `folder / "cards"`; raises `ConfigError` for one that is not valid."""
    found = [cards.load(path) for path in sorted((folder / "cards").glob("*.json"))]
    threats = "\n".join(f"- **{name}**: {text}." for name, text in cards.THREATS.items())
    text = HEAD.format(threats=threats)
    if not found:
        return text + "\nNo card yet.\n" + SUBMIT
    rows = [["defense", *cards.THREATS, "accuracy, % (undefended)", "upload / dense", "setting", "by"]]
    rows += [_row(card) for card in sorted(found, key=lambda card: (_excess(card), card["defense"]))]
    return text + "\n" + table(rows) + SUBMIT


def _excess(card: dict[str, Any]) -> float:
    return max(float(t["ssim"]) - float(t["blind_ssim"]) for t in card["threats"])


def _row(card: dict[str, Any]) -> list[str]:
    setting, size, accuracy = card["setting"], card["bytes"], card.get("accuracy")
    return [
        f"{card['defense']}<br>`{card['text']}`",
        *(_score([t for t in card["threats"] if t["threat"] == name]) for name in cards.THREATS),
        f"{accuracy['percent']:.2f} ({accuracy['undefended_percent']:.2f})" if accuracy else "not measured",
        f"{size['up'] / size['dense']:.3f}",
        f"{setting['model']}, {setting['data']}, batch {setting['batch_size']}",
        f"{card['by']}, {card['date']}",
    ]


def _score(threats: list[dict[str, Any]]) -> str:
    if not threats:
        return "not measured"
    worst = max(threats, key=lambda t: float(t["ssim"]))
    attack = worst["attack"].partition("(")[0]
    return f"{shown(worst['ssim'])} (blind {shown(worst['blind_ssim'])}), {attack}, n {worst['n']}"
