"""Cards of the leaderboard: what a defense withstands, and what it costs, with the evidence named."""

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build, to_text
from . import store
from .cells import AttackCell
from .entry import Entry
from .figures import figures_of, results_of
from .scales import SCALES, Scale
from .tables import entries

SCHEMA = 1
FEWEST = 20  # pictures of an attack on the first upload
LONGEST = 300  # characters of a text
MODEL = "resnet18"  # the model of every card this repository makes
THREATS = {
    "first upload": "an honest but curious server that sees one client's first upload and knows the defense",
    "later upload": "the same server some rounds later, with all earlier uploads; the residual holds other pictures",
    "active": "a server that may also change the model it sends, to a client without a guard (the guard refuses these)",
}
Fields = dict[str, tuple[type | tuple[type, ...], bool]]  # name -> (type, whether it must be there)
NUMBER = (int, float)
CARD: Fields = {
    "schema": (int, True),
    "defense": (str, True),
    "text": (str, True),
    "by": (str, True),
    "date": (str, True),
    "source": (str, True),
    "setting": (dict, True),
    "threats": (list, True),
    "accuracy": (dict, False),
    "bytes": (dict, True),
}
SETTING: Fields = {"model": (str, True), "data": (str, True), "batch_size": (int, True), "pictures": (int, True)}
THREAT: Fields = {
    "threat": (str, True),
    "attack": (str, True),
    "adaptive": (bool, True),
    "ssim": (NUMBER, True),
    "blind_ssim": (NUMBER, True),
    "lpips": (NUMBER, False),
    "identified": (NUMBER, False),  # share of pictures picked out of 100
    "n": (int, True),
    "evidence": (str, True),
}
ACCURACY: Fields = {
    "percent": (NUMBER, True),
    "undefended_percent": (NUMBER, True),
    "setting": (str, True),
    "evidence": (str, True),
}
BYTES: Fields = {"up": (NUMBER, True), "dense": (NUMBER, True)}


def problems(card: Any) -> list[str]:
    """Return everything that is wrong with a card; an empty list means that it can be shown.

    The card is data from somebody else: nothing it names is imported, and unknown fields are refused.
    """
    if not isinstance(card, dict):
        return ["a card is a JSON object"]
    found = _shape(card, CARD, "card")
    for name, fields in (("setting", SETTING), ("accuracy", ACCURACY), ("bytes", BYTES)):
        if isinstance(card.get(name), dict):
            found += _shape(card[name], fields, name)
    threats = card.get("threats")
    for i, threat in enumerate(threats if isinstance(threats, list) else []):
        found += _shape(threat, THREAT, f"threats[{i}]") if isinstance(threat, dict) else [f"threats[{i}]: an object"]
    return found or [*_values(card, "card"), *_meaning(card)]


def _shape(value: Mapping[str, Any], fields: Fields, where: str) -> list[str]:
    found = [f"{where}: unknown field {name!r}" for name in value if name not in fields]
    for name, (kind, needed) in fields.items():
        if name not in value:
            found += [f"{where}: {name} is missing"] if needed else []
        elif not isinstance(value[name], kind) or (isinstance(value[name], bool) and kind is not bool):
            wanted = "number" if kind is NUMBER else kind.__name__  # type: ignore[union-attr]
            found.append(f"{where}: {name} must be of type {wanted}")
    return found


def _values(value: Any, where: str) -> list[str]:
    """Return what would spoil the page: it is a Markdown table, and the texts come from anybody."""
    found = []
    for name, item in _leaves(value):
        if isinstance(item, str) and not 0 < len(item.strip()) <= LONGEST:
            found.append(f"{where}: {name} must have 1 to {LONGEST} characters")
        elif isinstance(item, str) and (not item.isprintable() or set(item) & set("|<>`")):
            found.append(f"{where}: {name} must be one line without | < > and `")
        elif isinstance(item, int | float) and not abs(item) < 1e15:  # nor NaN, which JSON files may hold
            found.append(f"{where}: {name} must be a finite number")
    return found


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{name}.{step}" if name else str(step))
    else:
        yield name, value


def _is_date(text: str) -> bool:
    try:
        return date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _meaning(card: Mapping[str, Any]) -> list[str]:
    found = [] if card["schema"] == SCHEMA else [f"card: schema must be {SCHEMA}"]
    found += [] if _is_date(card["date"]) else ["card: date must look like 2026-01-31"]
    found += [f"setting: {name} must be at least 1" for name in ("batch_size", "pictures") if card["setting"][name] < 1]
    found += _known_text(card["text"], DEFENSES, "defense")
    for i, threat in enumerate(card["threats"]):
        where = f"threats[{i}]"
        if threat["threat"] not in THREATS:
            found.append(f"{where}: threat must be one of {', '.join(THREATS)}")
        found += [f"{where}: {text}" for text in _known_text(threat["attack"], ATTACKS, "attack")]
        if not threat["adaptive"]:
            found.append(f"{where}: only attackers who know the defense count; leave this one out")
        found += [
            f"{where}: {name} must lie in -1..1" for name in ("ssim", "blind_ssim") if not -1 <= threat[name] <= 1
        ]
        if not 0 <= threat.get("identified", 0) <= 1:
            found.append(f"{where}: identified must lie in 0..1")
        if threat.get("lpips", 0) < 0:
            found.append(f"{where}: lpips must be at least 0")
        fewest = FEWEST if threat["threat"] == "first upload" else 1
        if threat["n"] < fewest:
            found.append(f"{where}: n must be at least {fewest}")
    if not any(threat["threat"] == "first upload" for threat in card["threats"]):
        found.append("card: an adaptive attack on the first upload must be among the threats")
    if min(card["bytes"].values()) <= 0:
        found.append("bytes: must be above 0")
    accuracy = card.get("accuracy")
    if accuracy and not all(0 <= accuracy[name] <= 100 for name in ("percent", "undefended_percent")):
        found.append("accuracy: percents must lie in 0..100")
    return found


def _known_text(text: str, table: Any, kind: str) -> list[str]:
    """Check a text without importing anything: one with a colon names code elsewhere, which `source` must show."""
    if ":" in text:
        return []
    try:
        build(table, text, kind)
    except ConfigError as error:
        return [str(error)]
    return []


def read(path: Path) -> Any:
    """Return what a file holds, unchecked."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read the card {path}: {error}") from error


def load(path: Path) -> dict[str, Any]:
    """Return the card in a file, or raise `ConfigError` with everything that is wrong with it."""
    card = read(path)
    wrong = problems(card)
    if wrong:
        raise ConfigError(f"{path} is not a valid card: " + "; ".join(wrong))
    checked: dict[str, Any] = card
    return checked


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
    card = {
        "schema": SCHEMA,
        "defense": defense,
        "text": to_text(build(DEFENSES, cell["defense_text"], "defense")),
        "by": "gradveil",
        "date": first["date"],
        "source": "this repository",
        "setting": {name: cell[name] for name in SETTING},
        "threats": [threat for name in THREATS if name in found for threat in _worst(found[name])],
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
