"""The result files of `frontier.py`: one per attack and per training run; and the tables written from them."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from gradveil import record

Entry = dict[str, Any]
GALLERY = 99  # other pictures in the line-up of the identification
KINDS = ("pixels", "coarse", "history")
MARKED = re.compile(r"(<!-- frontier model=(\S+) batch=(\d+)( tables)? -->\n)(.*?)(<!-- /frontier -->)", re.DOTALL)
MIXED = re.compile(r"(<!-- uploads model=(\S+) batch=(\d+) -->\n)(.*?)(<!-- /uploads -->)", re.DOTALL)
NAMES = {"none": "raw gradient", "dgp": "published DGP"}
# What is trained under one text and attacked under another. Uploads of 32 examples leave `hardened` without mixing as
# they leave the default; Outpost is attacked with its gate open; Soteria's exact scores are too dear to train with.
ATTACKED_AS = {
    "hardened": "hardened(examples=1)",
    "outpost": "outpost(always=True)",
    "soteria(probes=1)": "soteria",
}


@dataclass(frozen=True)
class Store:
    """A folder with one folder per defense, one file per entry: two writers never touch the same file."""

    folder: Path
    tables: Path | None = None  # results of `gradveil reproduce` that count too

    @staticmethod
    def slug(text: str) -> str:
        """Return a file name for a text."""
        return re.sub(r"[^a-z0-9.]+", "_", text.lower()).strip("_")

    def path(self, kind: str, defense: str, setting: Entry, attack: str = "") -> Path:
        """Return where an entry lies."""
        words = [kind, attack, *(f"{name}-{value}" for name, value in setting.items())]
        return self.folder / self.slug(defense) / (self.slug(" ".join(words)) + ".json")

    def has(self, kind: str, defense: str, setting: Entry, attack: str = "") -> bool:
        """Say whether an entry is recorded."""
        return self.path(kind, defense, setting, attack).exists()

    def write(self, kind: str, defense: str, setting: Entry, found: Entry, attack: str = "") -> None:
        """Record an entry."""
        head = {"kind": kind, "defense": defense, **({"attack": attack} if attack else {}), "setting": setting}
        record.write_json(self.path(kind, defense, setting, attack), {**head, **found})

    def entries(self, kind: str, **setting: Any) -> Iterator[Entry]:
        """Yield the entries of a kind whose setting agrees with this one."""
        own = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(self.folder.glob("*/*.json")))
        for entry in itertools.chain(own, () if self.tables is None else of_tables(self.tables)):
            if entry["kind"] == kind and all(entry["setting"].get(name) == value for name, value in setting.items()):
                yield entry


def of_tables(folder: Path) -> Iterator[Entry]:
    """Yield the cells of the paper's tables as entries: trainings, and attackers who know what they attack."""
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        if result["kind"] == "training":
            chosen = result["settings"]
            setting = {name: chosen[name] for name in ("model", "data", "lr", "seed", "alpha", "algorithm")}
            setting["rounds"] = result["resolved"]["rounds"]
            text = chosen["defense"]
            for defense in dict.fromkeys((text, ATTACKED_AS.get(text, text))):
                yield {"kind": "training", "defense": defense, "setting": setting, "result": result}
        elif result["kind"] == "attack" and _first_upload(result["cell"]):
            cell = result["cell"]
            # Where the defense changes the pictures, the changed ones are what the attacker finds, and no less private.
            scores = result["transformed_scores"] or result["scores"]
            yield {
                "kind": "attack",
                "defense": cell["defense_text"],
                "attack": cell["attack_text"],
                "setting": {"model": cell["model"], "batch": cell["batch_size"], "n": result["n"]},
                "mean": {metric: fmean(values) for metric, values in scores.items() if None not in values},
                "floor": result["floor"],
            }


def _first_upload(cell: Entry) -> bool:
    """Say whether a cell is of a passive search at a new client's upload, by somebody who knows the defense.

    On CIFAR-10: the frontiers of a model are of one dataset.
    """
    knows = cell["data"] == "cifar10" and (cell["adaptive"] or cell["defense"] == "none")
    other = (cell["rounds"], cell["epochs"], cell["labels"] == "inferred", cell["local_steps"] > 1, cell["one_label"])
    searches = cell["attack"].startswith(("ig", "gi")) and cell.get("mode", "eval") == "eval"
    return knows and searches and not any(other)


def floor(entry: Entry, metric: str = "ssim") -> float:
    """Return the best score of guesses that know nothing of the pictures; of MSE and LPIPS the least is the best."""
    return float(max(row[metric] for row in entry["floor"].values()))


def gain(entry: Entry, metric: str = "ssim") -> float:
    """Return what an attack reached beyond its floor."""
    return float(entry["mean"][metric] - floor(entry, metric))


def kind_of(attack: str) -> str:
    """Return which column an attack belongs to."""
    if attack.startswith(("chained", "joint", "repeated_rounds")):
        return "history"
    return "coarse" if "coarse=" in attack else "pixels"


def accuracies(store: Store, model: str) -> dict[str, Entry]:
    """Return the training entry of each defense, all trained alike: the setting that most defenses share."""
    entries = list(store.entries("training", model=model))
    alike = Counter(json.dumps(e["setting"]) for e in entries)
    if not alike:
        return {}
    common = max(alike, key=lambda setting: (alike[setting], json.loads(setting)["rounds"]))
    return {e["defense"]: e for e in entries if json.dumps(e["setting"]) == common}


def worst(store: Store, model: str, batch: int = 1) -> dict[str, dict[str, Entry]]:
    """Return, for each defense and kind of attack on a fresh model, the entry that gained most."""
    found: dict[str, dict[str, Entry]] = {}
    for entry in store.entries("attack", model=model, batch=batch):
        if "after" in entry["setting"]:
            continue  # of a trained model
        kinds = found.setdefault(entry["defense"], {})
        kind = kind_of(entry["attack"])
        if kind not in kinds or gain(entry) > gain(kinds[kind]):
            kinds[kind] = entry
    return found


def render(store: Store, model: str, batch: int) -> str:
    """Return the table of one model and batch size in Markdown, the leakiest defense first."""
    trained = accuracies(store, model)
    found = worst(store, model, batch)
    lines = [
        "| release | pixel-wise | coarse | with history | worst gain | identified | accuracy | upload, kB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for defense, kinds in sorted(found.items(), key=lambda item: -max(map(gain, item[1].values()))):
        cells = [_cell(kinds.get(kind), "ssim") for kind in KINDS]
        most = max(kinds.values(), key=gain)
        named = max(kinds.values(), key=lambda entry: gain(entry, "identified"))
        result = trained[defense]["result"] if defense in trained else None
        cells += [f"{gain(most):+.2f}", _cell(named, "identified"), *_cost(result)]
        lines.append(f"| `{defense}` | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", _caption(found, trained, batch)]) + "\n"


def _cell(entry: Entry | None, metric: str) -> str:
    if entry is None:
        return ""
    value, ground = entry["mean"][metric], floor(entry, metric)
    return f"{value:.0%} / {ground:.0%}" if metric == "identified" else f"{value:.2f} / {ground:.2f}"


def _cost(result: Entry | None) -> tuple[str, str]:
    if result is None:
        return "", ""
    accuracy = "diverged" if result["status"] == "diverged" else f"{100 * result['accuracy']:.1f} %"
    return accuracy, f"{result['per_user_and_round']['bytes_up'] / 1000:.0f}"


def _caption(found: dict[str, dict[str, Entry]], trained: dict[str, Entry], batch: int) -> str:
    entries = [entry for kinds in found.values() for entry in kinds.values()]
    counts = sorted({entry["setting"]["n"] for entry in entries})
    pictures = " or ".join(map(str, counts))
    text = f"Mean SSIM / floor over {pictures} pictures; identified among {GALLERY + batch} / floor."
    setting = next((entry["setting"] for entry in trained.values()), None)
    if setting:
        text += f" Accuracy: {setting['data']}, ten users, {setting['rounds']} rounds, rate {setting['lr']}, one seed."
    return text


def render_uploads(store: Store, model: str, batch: int) -> str:
    """Return what each attack finds in uploads of several pictures, the fresh model first.

    The floor is what the same guesses score on the pictures of another upload.
    """
    order = ["none", "dgp"]
    found = store.entries("attack", model=model, batch=batch)
    entries = [e for e in found if "repeat" not in e["setting"] and "another upload" in e["floor"]]
    entries.sort(key=lambda e: ("after" in e["setting"], order.index(e["defense"]) if e["defense"] in order else 2))
    lines = [
        "| upload | attack | SSIM / floor | identified / floor | mean place / floor | run |",
        "|---|---|---|---|---|---|",
    ]
    for e in entries:
        mean, other = e["mean"], e["floor"]["another upload"]
        name = NAMES.get(e["defense"], f"`{e['defense']}`") + (", trained model" if "after" in e["setting"] else "")
        scores = [f"{mean['ssim']:.3f} / {other['ssim']:.3f}", f"{mean['identified']:.0%} / {other['identified']:.0%}"]
        scores.append(f"{mean['rank']:.1f} / {other['rank']:.1f}")
        commit = e["environment"]["commit"][:7]
        lines.append(f"| {name} | {_told(e['attack'])} | {' | '.join(scores)} | `{commit}` |")
    among = f"identified among {GALLERY + batch}" if entries else "none recorded"
    return "\n".join([*lines, "", f"{entries[0]['setting']['n'] if entries else 0} pictures; {among}."]) + "\n"


def _told(attack: str) -> str:
    """Return an attack in words."""
    known = dict(re.findall(r"(\w+)=(\w+|'\w+')", attack))
    what = f"{known['coarse']}x{known['coarse']} pictures" if "coarse" in known else "every pixel"
    plain = ", tensors not weighed by their noise" if known.get("weighting") == "'none'" else ""
    steps = f", {known['steps']} steps" if "steps" in known else ""
    return f"{what}{steps}{plain}"


def fill_page(text: str, store: Store) -> str:
    """Return a page with every table between its markers written anew."""
    with_tables = Store(store.folder, store.folder.parent / "full")
    text = MIXED.sub(lambda m: m[1] + render_uploads(store, m[2], int(m[3])) + m[5], text)
    return MARKED.sub(lambda m: m[1] + render(with_tables if m[4] else store, m[2], int(m[3])) + m[6], text)
