"""The card of a defense, made from the results recorded here or from what `gradveil attack` wrote."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..attacks import ATTACKS
from ..core import Attack, Defense
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build, to_text
from . import cards, store
from .cells import AttackCell
from .entry import Entry
from .figures import figures_of, results_of
from .scales import SCALES, TEXTS, Scale
from .tables import entries

MODEL = "resnet18"  # the model of every card this repository makes
ELSEWHERE = ("seed", "pictures", "root", "device", "group")  # settings that make no other attack of a run
Results = list[dict[str, Any]]  # of one cell, one for each seed


def make(defense: str, folder: Path, scale: str = "full") -> dict[str, Any]:
    """Return the card of a defense from the recorded results.

    A score is the mean over all recorded seeds of an attack. For each threat the adaptive attack with the highest SSIM
    counts and, if that is another one, the attack that identifies the most pictures.
    """
    measured = _measured(defense, folder, scale)
    found: dict[str, list[dict[str, Any]]] = {}
    for entry, results in measured:
        threat = _threat(entry, results, folder, scale)
        found.setdefault(threat["threat"], []).append(threat)
    first = next((results[0] for _, results in measured if _kind(results[0]["cell"]) == "first upload"), None)
    if first is None:
        raise ConfigError(
            f"no adaptive attack on {defense} at its first upload is recorded in {folder / scale}: "
            f"run gradveil reproduce beyond --scale {scale}"
        )
    cell = first["cell"]
    attacked = build(DEFENSES, cell["defense_text"], "defense")
    card = {
        "schema": cards.SCHEMA,
        "defense": defense,
        "text": to_text(attacked),
        "by": "gradveil",
        "date": max(result["date"] for _, results in measured for result in results),
        "source": "this repository",
        "setting": {name: cell[name] for name in cards.SETTING},
        "threats": _listed(found, attacked),
        "bytes": {"up": first["bytes_up"], "dense": first["bytes_dense"]},
    }
    accuracy = _accuracy(defense, card["text"], folder, scale)
    return store.plain(card | ({"accuracy": accuracy} if accuracy else {}))  # type: ignore[no-any-return]


def draft(name: str, found: Mapping[str, dict[str, Any]], by: str, source: str) -> dict[str, Any]:
    """Return the card of somebody's own defense from results of `gradveil attack`, each named as evidence.

    Runs that differ in nothing but the seed are one attack, whose pictures count together. For each threat the card has
    the attacks that count in `make`.
    """
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for evidence, scores in found.items():
        told = {k: v for k, v in _checked(evidence, scores).items() if k not in ELSEWHERE}
        groups.setdefault(json.dumps(told, sort_keys=True), {})[evidence] = scores
    for same in groups.values():
        if len({scores["settings"]["seed"] for scores in same.values()}) < len(same):
            raise ConfigError(f"{', '.join(same)} hold the same attack with the same seed: name one of them")
    settings = [scores["settings"] for scores in found.values()]
    for field in ("defense", "model", "data"):
        if len(values := sorted({s[field] for s in settings})) > 1:
            raise ConfigError(f"a card is of one {field}, and these runs have {' and '.join(values)}: draft two cards")
    threats: dict[str, list[dict[str, Any]]] = {}
    for same in groups.values():
        threat = _drafted(same)
        threats.setdefault(threat["threat"], []).append(threat)
    first = next((scores for scores in found.values() if _kind_of_run(scores["settings"]) == "first upload"), None)
    if first is None:
        raise ConfigError("a card needs an attack on the first upload: run gradveil attack without --rounds")
    setting = first["settings"]
    attacked = build(DEFENSES, setting["defense"], "defense")
    card = {
        "schema": cards.SCHEMA,
        "defense": name,
        "text": setting["defense"] if ":" in setting["defense"] else to_text(attacked),
        "by": by,
        "date": max(scores["environment"]["time"] for scores in found.values())[: len("2026-01-31")],
        "source": source,
        "setting": {field: setting[field] for field in cards.SETTING},
        "threats": _listed(threats, attacked),
        "bytes": {"up": first["bytes_up"], "dense": first["bytes_dense"]},
    }
    return store.plain(card)  # type: ignore[no-any-return]


def _checked(evidence: str, scores: Any) -> dict[str, Any]:
    """Return the settings of a result that may stand on a card, or say why it may not."""
    needed = {"settings", "attack", "scores", "floor", "bytes_up", "bytes_dense", "environment"}
    if not isinstance(scores, dict) or needed - scores.keys():
        raise ConfigError(f"{evidence} is no scores.json of this gradveil attack: run the attack again")
    settings: dict[str, Any] = scores["settings"]
    if settings["train_mode"]:
        raise ConfigError(f"{evidence} is of a model in training mode, where attacks that work elsewhere find nothing")
    if settings["freeze"] and _kind_of_run(settings) != "active":
        raise ConfigError(f"{evidence} is of repeated pictures (--freeze), which none of the threats is: leave it out")
    return settings


def _drafted(same: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the threat that runs of one attack with several seeds make; as in `_threat` scores are means."""
    results = list(same.values())
    settings, scores = results[0]["settings"], [result["scores"] for result in results]
    attack: Attack = build(ATTACKS, results[0]["attack"] if settings["steps"] else settings["attack"], "attack")
    blind = [max(fmean(card["ssim"]) for card in result["floor"].values()) for result in results]
    return {
        "threat": _kind_of_run(settings),
        "attack": settings["attack"] if ":" in settings["attack"] else to_text(attack),
        "adaptive": attack.adaptive or "active" in attack.needs,  # it plants what suits the defense
        "batch_size": settings["batch_size"],
        "ssim": _mean(scores, "ssim"),
        "blind_ssim": fmean(blind),
        **({"lpips": _mean(scores, "lpips")} if all("lpips" in card for card in scores) else {}),
        "identified": _mean(scores, "identified"),
        "n": sum(len(card["ssim"]) for card in scores),
        "evidence": ", ".join(same),
    }


def _mean(scores: list[dict[str, list[float]]], name: str) -> float:
    return fmean(value for card in scores for value in card[name])


def _listed(found: Mapping[str, list[dict[str, Any]]], attacked: Defense) -> list[dict[str, Any]]:
    """Return what stands on a card of all that was measured, in the order of the threats."""
    later = list(found.get("later upload", []))
    if not attacked.init({"any": torch.zeros(1)}):  # it remembers nothing: every later upload is like the first
        later += [threat | {"threat": "later upload"} for threat in found["first upload"]]
    found = {**found, **({"later upload": later} if later else {})}
    return [threat for name in cards.THREATS if name in found for threat in _worst(found[name])]


def _measured(defense: str, folder: Path, scale: str) -> list[tuple[Entry, Results]]:
    """Return the lines that belong on the card of a defense, each with its results of all seeds, at least one."""
    # A defense that waits before it sends is attacked as its mechanism on one example: the card's text names that one.
    name = f"{defense}1" if f"{defense}1" in TEXTS else defense
    found = []
    for entry in entries("all", SCALES[scale]):
        if isinstance(entry.cell, AttackCell) and entry.cell.defense == name and _counts(entry.cell, SCALES[scale]):
            found.append((entry, results_of(folder, scale, entry)))
    return [(entry, results) for entry, results in found if results]


def _worst(threats: list[dict[str, Any]]) -> list[dict[str, Any]]:
    seen = max(threats, key=lambda t: float(t["ssim"]))
    picked = max(threats, key=lambda t: float(t.get("identified", -1)))
    more = picked.get("identified", -1) > seen.get("identified", -1)
    other = cards.measurement(picked) != cards.measurement(seen)  # not the same attack some rounds later
    return [seen, picked] if more and other else [seen]


def _counts(cell: AttackCell, scale: Scale) -> bool:
    """Say whether a cell belongs on a card: adaptive, on the common model, and the client's usual single step.

    Without a defense there is nothing to know, so every attacker counts that looks at the gradient.
    """
    attack = build(ATTACKS, cell.attack_text, "attack")
    unusual = cell.epochs or cell.one_label or cell.mode == "train" or cell.local_steps > 1 or cell.labels != "given"
    common = cell.model == scale.stand_ins.get(MODEL, MODEL) and cell.data == scale.data
    return (cell.adaptive or cell.defense == "none") and common and not unusual and cards.looks(attack)


def _kind_of_run(settings: dict[str, Any]) -> str:
    return _kind({"attack_text": settings["attack"], "rounds": settings["rounds"]})


def _kind(cell: dict[str, Any]) -> str:
    if "active" in build(ATTACKS, cell["attack_text"], "attack").needs:
        return "active"
    return "later upload" if cell["rounds"] else "first upload"


def _threat(entry: Entry, results: Results, folder: Path, scale: str) -> dict[str, Any]:
    cell = results[0]["cell"]
    found = figures_of(entry, results)
    return {
        "threat": _kind(cell),
        "attack": cell["attack_text"],
        "adaptive": True,
        "batch_size": cell["batch_size"],
        "ssim": found["plain_ssim"].mean,
        "blind_ssim": found["blind"].mean,
        **({"lpips": found["lpips"].mean} if "lpips" in found else {}),
        **({"identified": found["identified"].mean / 100} if "identified" in found else {}),
        "n": sum(result["n"] for result in results),
        "evidence": _evidence(results, folder, (folder / scale).glob(f"{entry.cell.stem}_seed*.json")),
    }


def _accuracy(defense: str, attacked: str, folder: Path, scale: str) -> dict[str, Any] | None:
    """Return the accuracy of a card, with the text of what was trained where that is not what was attacked."""
    cells = [SCALES[scale].train(name) for name in dict.fromkeys((defense, "none"))]
    runs = [results_of(folder, scale, Entry("", "", cell)) for cell in cells]
    if not all(runs) or any(r["status"] != "finished" for results in runs for r in results):
        return None
    percents = [fmean(100 * r["accuracy"] for r in results) for results in runs]
    s, seeds = cells[0].settings, len(runs[0])
    trained = to_text(build(DEFENSES, s.defense, "defense"))
    length = f"{s.rounds} rounds" if s.rounds else f"{s.epochs} epochs"
    return {
        "percent": percents[0],
        "undefended_percent": percents[-1],
        **({"text": trained} if trained != attacked else {}),
        "setting": f"{s.model}, {s.data}, {length}, {seeds} seed{'' if seeds == 1 else 's'}",
        "evidence": ", ".join(
            _evidence(results, folder, [*_training_files(folder), *(folder / scale).glob(f"{cell.stem}_seed*.json")])
            for cell, results in zip(cells, runs, strict=True)
        ),
    }


def _training_files(folder: Path) -> Iterable[Path]:
    return (folder / "training").glob("**/*.json")  # as `trained.recorded` looks for runs


def _evidence(results: Results, folder: Path, candidates: Iterable[Path]) -> str:
    """Name the files that hold these results and no others.

    Several seeds are one pattern where it matches nothing else, and otherwise a list of files.
    """
    held = [(path, store.load(path)) for path in sorted(candidates)]
    files = [next(path for path, content in held if content == result) for result in results]
    names = [f"results/{path.relative_to(folder).as_posix()}" for path in files]
    pattern = names[0].rpartition("_seed")[0] + "_seed*.json"
    together = len(files) > 1 and set(cards.files(pattern, folder)) == set(files)
    return pattern if together else ", ".join(names)
