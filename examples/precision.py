"""Whether training in bf16 ends where training in float32 does: the same short run in both, over three seeds.

    python examples/precision.py train --device cuda
    python examples/precision.py table docs/training.md

Runs that are recorded are skipped; a run that was stopped goes on.
"""

import json
import re
import statistics
from pathlib import Path
from typing import Annotated, Any

import typer

from gradveil.training import Settings
from gradveil.training.run import run

PRECISIONS, SEEDS = ("float32", "bf16"), (0, 1, 2)
MARKED = re.compile(r"(<!-- precision -->\n)(.*?)(<!-- /precision -->)", re.DOTALL)
Out = Annotated[Path, typer.Option("--out", "-o", help="where results lie")]
FOLDER = Path("results/precision")

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def train(
    model: Annotated[str, typer.Option()] = "resnet18",
    data: Annotated[str, typer.Option()] = "cifar10",
    root: Annotated[str, typer.Option(help="where the dataset's files lie")] = "",
    device: Annotated[str, typer.Option()] = "auto",
    defense: Annotated[str, typer.Option()] = "dgp",
    epochs: Annotated[int, typer.Option(min=1)] = 6,
    out: Out = FOLDER,
) -> None:
    """Train with every precision and seed that is not recorded yet."""
    out.mkdir(parents=True, exist_ok=True)
    rate = f"0.01, {max(2 * epochs // 3, 1)}:0.001"  # one step down, so that what is compared is not a moving target
    for seed in SEEDS:
        for precision in PRECISIONS:
            file = out / f"{precision}_{defense}_{model}_{data}_seed{seed}.json"
            if file.exists():
                continue
            what: dict[str, Any] = {"model": model, "data": data, "root": root, "defense": defense, "epochs": epochs}
            how: dict[str, Any] = {"device": device, "precision": precision, "seed": seed, "eval_every": epochs}
            result = run(Settings(lr=rate, **what, **how), Path("runs/precision") / file.stem, resume=True)
            file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(f"{file.stem}: {result['accuracy']:.2%} in {result['seconds']:.0f} s", flush=True)


@app.command()
def table(page: Path, out: Out = FOLDER) -> None:
    """Write the recorded accuracies between the markers of a page."""
    page.write_text(fill_page(page.read_text(encoding="utf-8"), out), encoding="utf-8")


def fill_page(text: str, out: Path = FOLDER) -> str:
    """Return a page with the table between its markers written anew."""
    return MARKED.sub(lambda m: m[1] + render(out) + m[3], text)


def render(out: Path) -> str:
    """Return accuracies in Markdown: a row per precision, a column per seed."""
    found: dict[str, list[dict[str, Any]]] = {p: [] for p in PRECISIONS}
    for file in sorted(out.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        found[result["settings"]["precision"]].append(result)
    lines = ["| precision | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean | spread |", "|---" * 6 + "|"]
    for precision, results in found.items():
        by_seed = {r["settings"]["seed"]: 100 * r["accuracy"] for r in results}
        cells = [f"{by_seed[seed]:.2f} %" if seed in by_seed else "not run" for seed in SEEDS]
        values = list(by_seed.values())
        mean = f"{statistics.mean(values):.2f} %" if values else ""
        spread = f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""
        lines.append(f"| {precision} | " + " | ".join([*cells, mean, spread]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app()
