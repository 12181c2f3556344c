"""Leakage against accuracy against bytes, for any list of defenses: one JSON per defense, and a picture.

    python examples/frontier.py attack --model resnet18 --defense dgp --defense "hardened(noise=64.0)" --device cuda
    python examples/frontier.py train --defense dgp --epochs 20 --device cuda
    python examples/frontier.py draw

Every step skips what its result file already holds, so a long frontier can be spread over several sittings.
"""

import re
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import matplotlib
import torch
import typer
from torch.nn.functional import cross_entropy

from gradveil import Batch, Observation, ThreatModel, Veil, data, models, observe, record
from gradveil.attacks import ATTACKS
from gradveil.data import to_pixels
from gradveil.defenses import DEFENSES
from gradveil.gradients import parameters
from gradveil.metrics import score, score_floor
from gradveil.spec import build
from gradveil.training import Settings
from gradveil.training.run import run
from gradveil.veil import derive_rng

app = typer.Typer(add_completion=False, help=__doc__)
Defenses = Annotated[list[str], typer.Option("--defense", help="a defense as gradveil list writes it; repeatable")]
Out = Annotated[Path, typer.Option(help="folder of the result files")]
GALLERY = 99  # other pictures in the line-up of the identification


def cell(out: Path, defense: str) -> Path:
    """Return the result file of a defense."""
    return out / (re.sub(r"[^a-z0-9.]+", "_", defense.lower()).strip("_") + ".json")


def load(path: Path, defense: str) -> dict[str, Any]:
    """Return what is known of a defense so far."""
    import json

    return json.loads(path.read_text()) if path.exists() else {"defense": defense, "attacks": {}, "training": {}}


def uploads(
    veil: Veil, net: torch.nn.Module, pictures: data.Dataset, rounds: list[list[int]], device: str
) -> Observation:
    """Return what the server sees of the last of several rounds, the earlier ones attached."""
    seen: list[Observation] = []
    for indices in rounds:
        batch: Batch = pictures.batch(torch.tensor(indices), device=device)
        payload = veil.protect(net, cross_entropy, batch)
        view = observe(
            payload,
            net,
            cross_entropy,
            batch,
            ThreatModel(labels=True, rounds=True),
            num_classes=pictures.num_classes,
            mean=pictures.mean,
            std=pictures.std,
            defense=veil.defense,
            earlier=seen,
        )
        seen.append(view)
    return seen[-1]


def add(columns: dict[str, list[float]], row: dict[str, list[float]]) -> None:
    """Append the scores of one upload."""
    for metric, values in row.items():
        columns.setdefault(metric, []).extend(values)


@app.command()
def attack(
    defense: Defenses,
    attack: Annotated[list[str], typer.Option(help="an attack; repeatable")] = ["inverting_gradients"],  # noqa: B006
    model: Annotated[str, typer.Option(help="the model that is attacked")] = "resnet18",
    pictures: Annotated[int, typer.Option(help="pictures attacked")] = 20,
    batch: Annotated[int, typer.Option(help="pictures in one upload")] = 1,
    age: Annotated[int, typer.Option(help="private rounds of other pictures before the attacked one")] = 0,
    root: Annotated[str, typer.Option(help="where CIFAR-10 lies")] = "",
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option()] = 0,
    out: Out = Path("results/frontier"),
) -> None:
    """Attack uploads (evaluation mode, labels known: the worst case) and score what comes back."""
    test = data.load("cifar10", split="test", root=root or None)
    order = torch.randperm(len(test.labels), generator=torch.Generator().manual_seed(seed)).tolist()
    victims, others = order[:pictures], order[pictures : pictures + GALLERY]
    history = order[pictures + GALLERY :]
    truth = test.pixels(torch.tensor(victims)).to(device)
    gallery = test.pixels(torch.tensor(others)).to(device)
    net = models.build(model, num_classes=10, input_shape=test.input_shape, seed=seed).to(device).eval()
    for text in defense:
        path, made = cell(out, text), build(DEFENSES, text, "defense")
        known = load(path, text)
        for name in attack:
            key = f"{name} model={model} batch={batch} age={age} seed={seed} n={pictures}"
            if key in known["attacks"]:
                continue
            began = time.perf_counter()
            groups = [victims[i : i + batch] for i in range(0, pictures, batch)]
            seen = []
            for i, group in enumerate(groups):
                veil = Veil(made, parameters(net), seed=seed, client=str(i))
                before = [history[k * batch : (k + 1) * batch] for k in range(i * age, (i + 1) * age)]
                seen.append(uploads(veil, net, test, [*before, group], device))
            rngs = [derive_rng(seed, str(i), 0, "attack") for i in range(len(groups))]
            found = build(ATTACKS, name, "attack").run_many(seen, rngs)
            truths = torch.split(truth, batch)
            scores: dict[str, list[float]] = {}
            floor: dict[str, dict[str, list[float]]] = {}
            for i, (one, true) in enumerate(zip(found, truths, strict=True)):
                guess = to_pixels(one.inputs, test.mean, test.std).clamp(0, 1)
                add(scores, score(guess, true, gallery=gallery))
                for kind, row in score_floor(true, gallery, derive_rng(seed, "floor", i), gallery=gallery).items():
                    add(floor.setdefault(kind, {}), row)
                if len(truths) > 1:  # what the same guesses score on pictures they cannot show: luck, and nothing else
                    stranger = truths[(i + 1) % len(truths)]
                    add(floor.setdefault("another upload", {}), score(guess, stranger, gallery=gallery))
            known["attacks"][key] = {
                "scores": scores,
                "mean": {m: fmean(v) for m, v in scores.items()},
                "spread": {m: stdev(v) if len(v) > 1 else 0.0 for m, v in scores.items()},
                "floor": {kind: {m: fmean(v) for m, v in row.items()} for kind, row in floor.items()},
                "seconds": time.perf_counter() - began,
                "environment": record.environment(),
            }
            record.write_json(path, known)
            entry = known["attacks"][key]
            for kind, mean in {"attack": entry["mean"], **entry["floor"]}.items():
                figures = {m: round(mean[m], 3) for m in ("ssim", "lpips", "rank", "identified") if m in mean}
                print(text, key, kind, figures, flush=True)


@app.command()
def train(
    defense: Defenses,
    model: Annotated[str, typer.Option()] = "resnet18",
    epochs: Annotated[int, typer.Option(help="stop after this many epochs of the paper's 100")] = 20,
    root: Annotated[str, typer.Option()] = "",
    device: Annotated[str, typer.Option()] = "cpu",
    precision: Annotated[str, typer.Option()] = "bf16",
    seed: Annotated[int, typer.Option()] = 0,
    runs: Annotated[Path, typer.Option(help="folder of checkpoints")] = Path("runs/frontier"),
    out: Out = Path("results/frontier"),
) -> None:
    """Train with ten users under each defense and note accuracy and bytes."""
    for text in defense:
        path = cell(out, text)
        known = load(path, text)
        key = f"model={model} epochs={epochs} seed={seed} precision={precision}"
        if key in known["training"]:
            continue
        settings = Settings(
            model=model,
            data="cifar10",
            root=root,
            defense=text,
            epochs=100,
            rounds=157 * epochs,
            precision=precision,
            device=device,
            seed=seed,
            eval_every=5,
        )
        result = run(settings, runs / path.stem / key.replace(" ", "_"), resume=True)
        known["training"][key] = result
        record.write_json(path, known)
        print(text, key, result.get("accuracy"), flush=True)


@app.command()
def draw(
    out: Out = Path("results/frontier"), picture: Annotated[Path, typer.Option()] = Path("docs/frontier.png")
) -> None:
    """Draw worst leakage against accuracy; the size of a dot is the upload."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    for path in sorted(out.glob("*.json")):
        known = load(path, "")
        if not known["attacks"] or not known["training"]:
            continue
        worst = max(entry["mean"]["ssim"] for entry in known["attacks"].values())
        result = list(known["training"].values())[-1]
        up = result.get("bytes_up") or 0
        axes.scatter(100 * result["accuracy"], worst, s=20 + up / 2e4, alpha=0.6)
        axes.annotate(known["defense"], (100 * result["accuracy"], worst), fontsize=8)
    axes.set_xlabel("test accuracy, %")
    axes.set_ylabel("worst mean SSIM of an attack (lower is better)")
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    app()
