"""Cards of the leaderboard: what a defense withstands, and what it costs, with the evidence named."""

import json
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

from ..attacks import ATTACKS
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build

SCHEMA = 1
FEWEST = 20  # pictures of an attack on the first upload
LONGEST = 300  # characters of a text
OURS = "results/"  # evidence that begins so lies in this repository
THREATS = {
    "first upload": "an honest but curious server that sees one client's first upload and knows the defense",
    "later upload": "the same server a round or more later, with all earlier uploads, where what the client held back "
    "is of other pictures; of a defense without memory every upload is like the first",
    "active": "a server that may also change the model it sends, to a client without a [guard](guard.md), which is "
    "there to refuse such models",
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
    "batch_size": (int, False),  # of the attacked uploads; without it the setting's
    "evidence": (str, True),
}
ACCURACY: Fields = {
    "percent": (NUMBER, True),
    "undefended_percent": (NUMBER, True),
    "text": (str, False),  # what was trained, where that is not what was attacked
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


def files(evidence: str, results: Path) -> list[Path]:
    """Return the files in the folder `results` that a path or pattern `results/...` names, never files elsewhere.

    A pattern stays within one folder: one that spans several names nothing, since it would match copies of a file too.
    """
    *folders, name = evidence.removeprefix(OURS).split("/")
    inside = not {"", ".", ".."} & {*folders, name}
    if not evidence.startswith(OURS) or not inside or set("".join(folders)) & set("*?") or "**" in name:
        return []
    return sorted(path for path in results.joinpath(*folders).glob(name) if path.is_file())


def measurement(threat: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells the scores of one card apart: no two of them have this in common."""
    return threat["threat"], threat["attack"], threat.get("batch_size")


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
