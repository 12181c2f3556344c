"""Every table and figure of the paper as a list of cells, with the paper's own values beside them."""

from collections.abc import Callable, Iterator
from typing import Any

from .. import paper
from ..cost import LINE_UP
from .beyond_paper import beyond
from .cells import AttackCell, Cell, key
from .entry import MODELS, RIVALS, TITLES, Entry, Values
from .scales import Scale

URGENT = ("none", "dgp", "topk", "hardened1")
FIRST = ("ig", "gi", "ig+mask", "gi+mask")
TOTALS = {"48%": (0.03, 0.45), "80%": (0.05, 0.75), "96%": (0.06, 0.9)}
SHARES = {"1/15": (0.05, 0.75), "1/7": (0.1, 0.7), "1/3": (0.2, 0.6)}
KEPT = (0.8, 0.4, 0.2, 0.1, 0.05, 0.01)
TOPS = (0.005, 0.01, 0.02, 0.1, 0.2)
DISTANCE = "Relative gradient distance against scores (IG)"
FEEDBACK = "Accuracy with and without error feedback"

Maker = Callable[[Scale, int], Iterator[Entry]]


def printed(*path: str) -> Any:
    """Return what the paper's tables hold under these keys, defenses by our names, or None."""
    found: Any = paper.tables()["tables"]
    for step in path:
        found = found.get(paper.column(step)) if isinstance(found, dict) else None
    return found


def _values(**named: Any) -> Values:
    return {name: float(value) for name, value in named.items() if value is not None}


def _main_values(attack: str, column: str) -> Values:
    metrics = ("lpips", "ssim", "min_lpips", "max_ssim")
    return _values(**{metric: printed("main_four_attacks", attack, metric, column) for metric in metrics})


def main(scale: Scale, seed: int) -> Iterator[Entry]:
    """Privacy under four attacks, and final accuracy (CIFAR-10)."""
    for attack in ("ig", "gi", "rob", "rgap"):
        model = "cnn6" if attack == "rgap" else "resnet18"
        part = f"{TITLES[attack]} on {'CNN6' if attack == 'rgap' else 'ResNet18'}"
        for defense in RIVALS:
            if (attack, defense) == ("rgap", "precode"):
                continue  # a stochastic bottleneck has no chain to invert
            cell = scale.attack(attack, defense, model, seed=seed)
            if defense == "ats":
                yield Entry(part, "ats_r", cell, _main_values(attack, "ats_r"), transformed=True)
                yield Entry(part, "ats_t", cell, _main_values(attack, "ats_t"))
            else:
                yield Entry(part, defense, cell, _main_values(attack, defense))
    for defense in RIVALS:
        value = printed("main_four_attacks", "final_model_accuracy_percent", defense)
        yield Entry("Final accuracy, ResNet18", defense, scale.train(defense, seed=seed), _values(accuracy=value))


def parameters(scale: Scale, seed: int) -> Iterator[Entry]:
    """How the two shares of DGP matter: k1 + k2 under Rob, p under IG."""
    for attack, column, choices in (("rob", "by_total_pruning", TOTALS), ("ig", "by_p", SHARES)):
        for label, (top, bottom) in choices.items():
            name, text = _dgp(top, bottom)
            row = printed("dgp_parameters", column, label) or {}
            title = "k1 + k2" if attack == "rob" else "p"
            cell = scale.attack(attack, name, defense_text=text, seed=seed)
            yield Entry(
                f"{title} under {TITLES[attack]}",
                f"{title} = {label}",
                cell,
                _values(lpips=row["lpips"], ssim=row["ssim"]),
            )
            yield Entry(
                f"Accuracy by {title}",
                f"{title} = {label}",
                scale.train(name, text=text, seed=seed),
                _values(accuracy=row["accuracy_percent"]),
            )


def _dgp(top: float, bottom: float) -> tuple[str, str]:
    if (top, bottom) == (0.05, 0.75):
        return "dgp", "dgp"
    return f"dgp{100 * top:g}-{100 * bottom:g}", f"dgp(top={top}, bottom={bottom})"


def models(scale: Scale, seed: int) -> Iterator[Entry]:
    """IG and Rob on four models, without a defense and under DGP."""
    for data, table in ((scale.data, "privacy_cifar10_models"), (scale.data100, "privacy_cifar100_models")):
        for attack in ("ig", "rob"):
            for model in MODELS:
                for defense in ("none", "dgp"):
                    found = {m: printed(table, attack, m, paper.MODELS[model], defense) for m in ("lpips", "ssim")}
                    cell = scale.attack(attack, defense, model, data=data, seed=seed)
                    where = "CIFAR-100" if "100" in table else "CIFAR-10"
                    yield Entry(f"{TITLES[attack]}, {where}", f"{model}, {defense}", cell, _values(**found))


def cost(scale: Scale, seed: int) -> Iterator[Entry]:
    """Communication and computation."""
    for model in MODELS:
        for defense in LINE_UP:
            found = _values(
                mib=paper.communication_mib(model, defense), seconds=paper.computation_seconds(model, defense)
            )
            yield Entry("Communication and computation", f"{model}, {defense}", scale.price(defense, model), found)


def topk95(scale: Scale, seed: int) -> Iterator[Entry]:
    """Top-k that prunes 95 % against DGP that prunes 80 % (the paper: CIFAR-100)."""
    for defense, column in (("topk5", "topk_95"), ("dgp", "dgp_80")):
        for attack in ("ig", "rob"):
            for data in (scale.data100, scale.data):
                cell = scale.attack(attack, defense, data=data, seed=seed)
                yield Entry(f"{TITLES[attack]}, pictures", f"{defense}, {data}", cell)
        for model in MODELS:
            value = printed("accuracy_cifar100_topk95_vs_dgp80", paper.MODELS[model], column)
            cell_ = scale.train(defense, model, data=scale.data100, seed=seed)
            yield Entry("Accuracy, CIFAR-100", f"{model}, {defense}", cell_, _values(accuracy=value))
            yield Entry("Accuracy, CIFAR-10", f"{model}, {defense}", scale.train(defense, model, seed=seed))


def figures(scale: Scale, seed: int) -> Iterator[Entry]:
    """What the paper shows without numbers: distance, error feedback, larger batches, GGL."""
    # The paper's model, and one whose whole curve a CPU can follow; one at a scale where both are the same.
    for model in dict.fromkeys(scale.stand_ins.get(m, m) for m in ("resnet18", "lenet")):
        part = DISTANCE + (", LeNet" if model == "lenet" else "")
        for keep in KEPT:
            cell = scale.attack("ig", f"topk{100 * keep:g}", model, defense_text=f"topk(keep={keep})", seed=seed)
            if keep == 0.2:
                cell = scale.attack("ig", "topk", model, seed=seed)
            yield Entry(part, f"top-k keeps {100 * keep:g} %", cell)
        for top in (*TOPS[:3], 0.05, *TOPS[3:]):
            name, text = _dgp(top, round(0.8 - top, 3))
            cell = scale.attack("ig", name, model, defense_text=text, seed=seed)
            yield Entry(part, f"DGP removes the top {100 * top:g} %", cell)
    for model in MODELS:
        for defense in ("none", "dgp", "dgp-nofeedback", "adgp", "adgp-nofeedback"):
            cell_ = scale.train(defense, model, seed=seed)
            yield Entry(FEEDBACK, f"{model}, {defense}", cell_)
    for attack in ("ig", "rob"):
        for size in (2, 4):
            for defense in ("none", "topk", "dgp"):
                cell = scale.attack(attack, defense, batch_size=size, seed=seed)
                yield Entry(f"Batches of 2 and 4, {TITLES[attack]}", f"batch {size}, {defense}", cell)
    for defense in ("none", "topk", "dgp"):
        yield Entry("GGL with a generator of our own", defense, scale.attack("ggl", defense, seed=seed))


TABLES: dict[str, Maker] = {
    "main": main,
    "parameters": parameters,
    "models": models,
    "cost": cost,
    "topk95": topk95,
    "figures": figures,
    "beyond": beyond,
}
NAMES = (*TABLES, "all")


def entries(name: str, scale: Scale, seed: int = 0) -> list[Entry]:
    """Return the lines of a table, or of all of them."""
    chosen = TABLES if name == "all" else {name: TABLES[name]}
    return [entry for make in chosen.values() for entry in make(scale, seed)]


def worklist(name: str, scale: Scale, seeds: tuple[int, ...]) -> list[Cell]:
    """Return the cells of a table, each once, the most telling first; further seeds come last."""
    cells: dict[str, Cell] = {}
    for seed in seeds:
        ordered = sorted(entries(name, scale, seed), key=lambda entry: _rank(entry.cell, scale))
        cells |= {key(entry.cell): entry.cell for entry in ordered}
    return list(cells.values())


def _rank(cell: Cell, scale: Scale) -> int:
    if not isinstance(cell, AttackCell):
        return 3
    plain = cell.labels == "given" and not (cell.rounds or cell.epochs or cell.local_steps > 1)
    first = plain and cell.attack in FIRST and cell.batch_size == 1 and cell.data == scale.data
    if not first:
        return 2
    return 0 if cell.defense in URGENT and cell.model == scale.stand_ins.get("resnet18", "resnet18") else 1
