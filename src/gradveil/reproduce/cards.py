"""Cards of the leaderboard: what a defense withstands, and what it costs, with the evidence named."""

import json
from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from pathlib import Path
from typing import Any

from ..attacks import ATTACKS, Blind
from ..core import Attack
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build

SCHEMA = 1
FEWEST = 20  # pictures of an attack on the first upload, and of one that shows that a threat is held
LARGEST = 4  # times dense: an upload above that is a mistake in the units
LONGEST = 300  # characters of a text
CODE = ("text", "attack")  # fields that the page shows as code, where nothing is markup
OURS = "results/"  # evidence that begins so lies in this repository
ADDRESSES = ("http://", "https://")
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
    "identified": (NUMBER, True),  # share of pictures picked out of 100
    "n": (int, True),
    "batch_size": (int, False),  # of the attacked uploads; without it the setting's
    "evidence": (str, True),
}
WANTED = {"identified": "the share of pictures that are the nearest of a line-up; gradveil attack measures it"}
ACCURACY: Fields = {
    "percent": (NUMBER, True),
    "undefended_percent": (NUMBER, True),
    "text": (str, False),  # what was trained, where that is not what was attacked
    "setting": (str, True),
    "evidence": (str, True),
}
BYTES: Fields = {"up": (NUMBER, True), "dense": (NUMBER, True)}


def problems(card: Any, today: date | None = None) -> list[str]:
    """Return everything that is wrong with a card; an empty list means that it can be shown.

    The card is data from somebody else: nothing it names is imported, and unknown fields are refused. With `today` its
    date must not lie in the future; pages are made without, lest they depend on a machine's clock.
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
    return found or [*_values(card, "card"), *_meaning(card), *_date_problems(card["date"], today)]


def problems_together(
    found: Mapping[Path, Any], results: Path | None, today: date | None = None
) -> dict[Path, list[str]]:
    """Return for each card everything that is wrong with it, alone, beside the others and in its evidence.

    Evidence that begins with `results/` must be there, in the folder `results`; without a folder nobody looks.
    """
    wrong = {path: problems(card, today) for path, card in found.items()}
    fit = {path: card for path, card in found.items() if not wrong[path]}
    named: dict[tuple[str, str], list[Path]] = {}
    for path, card in fit.items():
        named.setdefault((_folded(card["defense"]), _folded(card["by"])), []).append(path)
        wrong[path] += _missing(card, results) if results else []
    for paths in named.values():
        for path in paths:
            others = [other for other in paths if other != path]
            wrong[path] += [f"card: {other} is of the same defense by the same author; keep one" for other in others]
    return wrong


def _folded(text: str) -> str:
    return " ".join(text.casefold().split())


def _missing(card: Mapping[str, Any], results: Path) -> list[str]:
    pieces = [(f"threats[{i}]", threat) for i, threat in enumerate(card["threats"])]
    pieces += [("accuracy", card["accuracy"])] if "accuracy" in card else []
    return [
        f"{where}: evidence {name} names no file in {results}"
        for where, piece in pieces
        for name in piece["evidence"].split(", ")
        if name.startswith(OURS) and not files(name, results)
    ]


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
            wanted = f": {WANTED[name]}" if name in WANTED else ""
            found += [f"{where}: {name} is missing{wanted}"] if needed else []
        elif not isinstance(value[name], kind) or (isinstance(value[name], bool) and kind is not bool):
            wanted = "number" if kind is NUMBER else kind.__name__  # type: ignore[union-attr]
            found.append(f"{where}: {name} must be of type {wanted}")
    return found


def _values(value: Any, where: str) -> list[str]:
    """Return what would spoil the page: it is a Markdown table, and the texts come from anybody."""
    found = []
    for name, item in _leaves(value):
        if isinstance(item, str):
            found += [f"{where}: {name} {text}" for text in _markup(name, item)]
        elif isinstance(item, int | float) and not abs(item) < 1e15:  # nor NaN, which JSON files may hold
            found.append(f"{where}: {name} must be a finite number")
    return found


def _markup(name: str, text: str) -> list[str]:
    if not 0 < len(text.strip()) <= LONGEST:
        return [f"must have 1 to {LONGEST} characters"]
    if not text.isprintable() or set(text) & set("|<>`"):
        return ["must be one line without | < > and `"]
    if name.rpartition(".")[2] not in CODE and set(text) & set("[]!\\"):  # of links and pictures
        return ["must be without [ ] ! and backslashes"]
    return []


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for step, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(item, f"{name}.{step}" if name else str(step))
    else:
        yield name, value


def _date_problems(text: str, today: date | None) -> list[str]:
    try:
        day = date.fromisoformat(text)
    except ValueError:
        day = None
    if day is None or day.isoformat() != text:
        return ["card: date must look like 2026-01-31"]
    late = today is not None and day > today + timedelta(days=1)  # east of Greenwich it may be tomorrow already
    return ["card: date must not lie in the future"] if late else []


def _meaning(card: Mapping[str, Any]) -> list[str]:
    found = [] if card["schema"] == SCHEMA else [f"card: schema must be {SCHEMA}"]
    found += [f"setting: {name} must be at least 1" for name in ("batch_size", "pictures") if card["setting"][name] < 1]
    found += _known_text(card["text"], DEFENSES, "defense")
    seen: dict[tuple[Any, ...], int] = {}
    for i, threat in enumerate(card["threats"]):
        found += [f"threats[{i}]: {text}" for text in _threat_problems(threat, card["setting"])]
        full = {"batch_size": card["setting"]["batch_size"], **threat}
        same = seen.setdefault(measurement(full), i)
        if same != i:
            found.append(f"threats[{i}]: threat, attack and batch size are those of threats[{same}]; keep the worse")
    if not any(threat["threat"] == "first upload" for threat in card["threats"]):
        found.append("card: an adaptive attack on the first upload must be among the threats")
    if min(card["bytes"].values()) <= 0:
        found.append("bytes: must be above 0")
    elif card["bytes"]["up"] > LARGEST * card["bytes"]["dense"]:
        found.append(f"bytes: up must be at most {LARGEST} times dense; both are bytes of one upload")
    return found + (_accuracy_problems(card["accuracy"]) if "accuracy" in card else [])


def _threat_problems(threat: Mapping[str, Any], setting: Mapping[str, Any]) -> list[str]:
    found = _attack_problems(threat) + _evidence_problems(threat["evidence"])
    if not threat["adaptive"]:
        found.append("only attackers who know the defense count; leave this one out")
    found += [f"{name} must lie in -1..1" for name in ("ssim", "blind_ssim") if not -1 <= threat[name] <= 1]
    if not 0 <= threat["identified"] <= 1:
        found.append("identified must lie in 0..1")
    if threat.get("lpips", 0) < 0:
        found.append("lpips must be at least 0")
    if threat.get("batch_size", 1) < 1:
        found.append("batch_size must be at least 1")
    fewest = max(FEWEST, setting["pictures"]) if threat["threat"] == "first upload" else 1
    if threat["n"] < fewest:
        found.append(f"n must be at least {fewest}")
    return found


def _attack_problems(threat: Mapping[str, Any]) -> list[str]:
    found = _known_text(threat["attack"], ATTACKS, "attack")
    if threat["threat"] not in THREATS:
        found.append(f"threat must be one of {', '.join(THREATS)}")
    if found or ":" in threat["attack"]:  # what code elsewhere does, whoever reviews the card must look up
        return found
    attack = build(ATTACKS, threat["attack"], "attack")
    active, name = "active" in attack.needs, threat["attack"].partition("(")[0]
    if not looks(attack):
        found.append(f"attack must look at the gradient, and {threat['attack']} does not: it is a floor")
    if threat["threat"] == "active" and not active:
        found.append(f"attack must be active, such as imprint or spotlight, and {name} leaves the model as it is")
    if threat["threat"] != "active" and active:
        found.append(f"threat must be active for {name}, with which the server does not follow the protocol")
    return found


def looks(attack: Attack) -> bool:
    """Say whether an attack looks at the gradient, and so does the one inside it, if there is one."""
    inner = getattr(attack, "inner", None)
    return not isinstance(attack, Blind) and attack != attack.blind() and (inner is None or looks(inner))


def _evidence_problems(evidence: str) -> list[str]:
    strange = [name for name in evidence.split(", ") if not name.startswith((OURS, *ADDRESSES))]
    return [f"evidence must be addresses (https://...) or files in {OURS}, got {name!r}" for name in strange]


def _accuracy_problems(accuracy: Mapping[str, Any]) -> list[str]:
    found = _evidence_problems(accuracy["evidence"])
    found += _known_text(accuracy["text"], DEFENSES, "defense") if "text" in accuracy else []
    if not all(0 <= accuracy[name] <= 100 for name in ("percent", "undefended_percent")):
        found.append("percents must lie in 0..100")
    return [f"accuracy: {text}" for text in found]


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


def load_all(results: Path) -> list[dict[str, Any]]:
    """Return the cards in `results / "cards"`, or raise `ConfigError` with everything that is wrong with one."""
    found = {path: read(path) for path in sorted((results / "cards").glob("*.json"))}
    for path, wrong in problems_together(found, results).items():
        if wrong:
            raise ConfigError(f"{path} is not a valid card: " + "; ".join(wrong))
    return list(found.values())
