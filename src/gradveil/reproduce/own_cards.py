"""The card of a defense, made from the results recorded here."""

from pathlib import Path
from typing import Any

import torch

from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build, to_text
from . import cards, store
from .cells import AttackCell
from .entry import Entry
from .figures import figures_of, results_of
from .scales import SCALES, Scale
from .tables import entries

MODEL = "resnet18"  # the model of every card this repository makes


def make(defense: str, folder: Path, scale: str = "full") -> dict[str, Any]:
    """Return the card of a defense from the recorded results.

    For each threat the adaptive attacker with the highest SSIM counts and, if that is another one, the one who
    identifies the most pictures.
    """
    # Where a defense waits before it sends, its mechanism on one example (see `TEXTS`) stands for the first upload.
    lines = [e for e in entries("all", SCALES[scale]) if e.cell.defense in (defense, f"{defense}1")]
    found: dict[str, list[dict[str, Any]]] = {}
    first: dict[str, Any] | None = None
    for entry in lines:
        if not isinstance(entry.cell, AttackCell) or not _counts(entry.cell, SCALES[scale]):
            continue
        for result in results_of(folder, scale, entry):
            threat = _threat(entry, result, scale)
            first = first or result
            found.setdefault(threat["threat"], []).append(threat)
    if first is None:
        raise ConfigError(
            f"no adaptive attack on {defense} is recorded in {folder / scale}: run gradveil reproduce beyond"
        )
    cell = first["cell"]
    attacked = build(DEFENSES, cell["defense_text"], "defense")
    if not attacked.init({"any": torch.zeros(1)}):  # it remembers nothing: every later upload is like the first
        found["later upload"] = [threat | {"threat": "later upload"} for threat in found["first upload"]]
    card = {
        "schema": cards.SCHEMA,
        "defense": defense,
        "text": to_text(attacked),
        "by": "gradveil",
        "date": first["date"],
        "source": "this repository",
        "setting": {name: cell[name] for name in cards.SETTING},
        "threats": [threat for name in cards.THREATS if name in found for threat in _worst(found[name])],
        "bytes": {"up": first["bytes_up"], "dense": first["bytes_dense"]},
    }
    accuracy = _accuracy(defense, folder, scale)
    return store.plain(card | ({"accuracy": accuracy} if accuracy else {}))  # type: ignore[no-any-return]


def _worst(threats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen = max(threats, key=lambda t: float(t["ssim"]))
    picked = max(threats, key=lambda t: float(t.get("identified", -1)))
    more = picked.get("identified", -1) > seen.get("identified", -1)
    return [seen, picked] if more else [seen]


def _counts(cell: AttackCell, scale: Scale) -> bool:
    """Say whether a cell belongs on a card: adaptive, on the common model, and the client's usual single step.

    Without a defense there is nothing to know, so every attacker counts.
    """
    usual = cell.labels == "given" and cell.local_steps == 1 and not (cell.epochs or cell.one_label)
    common = cell.model == scale.stand_ins.get(MODEL, MODEL) and cell.data == scale.data
    return (cell.adaptive or cell.defense == "none") and usual and common


def _threat(entry: Entry, result: dict[str, Any], scale: str) -> dict[str, Any]:
    cell = result["cell"]
    found = figures_of(entry, [result])
    active = "active" in build(ATTACKS, cell["attack_text"], "attack").needs
    return {
        "threat": "active" if active else "later upload" if cell["rounds"] else "first upload",
        "attack": cell["attack_text"],
        "adaptive": True,
        "ssim": found["plain_ssim"].mean,
        "blind_ssim": found["blind"].mean,
        **({"lpips": found["lpips"].mean} if "lpips" in found else {}),
        **({"identified": found["identified"].mean / 100} if "identified" in found else {}),
        "n": result["n"],
        "evidence": f"results/{scale}/{entry.cell.stem}_seed{result['seed']}.json",
    }


def _accuracy(defense: str, folder: Path, scale: str) -> dict[str, Any] | None:
    chosen = SCALES[scale].train(defense)
    bare = SCALES[scale].train("none")
    pair = [results_of(folder, scale, Entry("", "", cell)) for cell in (chosen, bare)]
    if not all(pair) or any(r["status"] != "finished" for results in pair for r in results):
        return None
    own, undefended = (sum(100 * r["accuracy"] for r in results) / len(results) for results in pair)
    s = chosen.settings
    setting = f"{s.model}, {s.data}, {s.rounds or s.epochs} {'rounds' if s.rounds else 'epochs'}, seeds {len(pair[0])}"
    return {
        "percent": own,
        "undefended_percent": undefended,
        "setting": setting,
        "evidence": f"results/**/{chosen.stem}_seed*.json",
    }
