"""Leakage against accuracy against bytes, for any list of defenses, the variants of `variants.py` among them.

    python examples/frontier.py attack --model resnet18 --defense dgp --defense "hardened(noise=32.0)" --device cuda
    python examples/frontier.py attack --defense dgp --attack "chained(gradient_matching(steps=300))" --age 5
    python examples/frontier.py train --defense dgp --epochs 20 --device cuda
    python examples/frontier.py draw --model resnet18
    python examples/frontier.py table docs/hardened.md

Every attack and every training run is a file of its own below `results/frontier`, and what is there already is
skipped: a long frontier can be spread over several sittings and machines.
"""

import copy
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Annotated, Any

import torch
import typer
from frontier_picture import draw_picture
from frontier_view import GALLERY, Store, fill_page
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from variants import VARIANTS, Gathered

from gradveil import Defense, Observation, ThreatModel, Veil, data, gradient, models, observe, record
from gradveil.attacks import ATTACKS
from gradveil.capture import full_precision
from gradveil.data import Dataset, to_pixels
from gradveil.defenses import DEFENSES, CorrelatedNoise, DPNoise, Hardened
from gradveil.gradients import parameters
from gradveil.metrics import score, score_floor
from gradveil.spec import build
from gradveil.training import Settings, load_checkpoint
from gradveil.training.run import CHECKPOINT, run
from gradveil.veil import derive_rng

DEFENSES.update(VARIANTS)  # so that training finds them by name too

app = typer.Typer(add_completion=False, help=__doc__)
Defenses = Annotated[list[str], typer.Option("--defense", help="a defense as gradveil list writes it; repeatable")]
Model = Annotated[str, typer.Option(help="the model that is trained or attacked")]
Data = Annotated[str, typer.Option("--data", help="cifar10, cifar100, digits, photos or a folder")]
Root = Annotated[str, typer.Option(help="where CIFAR lies; empty: the usual places")]
Out = Annotated[Path, typer.Option(help="folder of the result files")]
Runs = Annotated[Path, typer.Option(help="folder of checkpoints")]
USERS, BATCH = 10, 32  # of a training run: the paper's


def as_public(defense: Defense, batch: int) -> Defense:
    """Return the defense as the attacker runs it on gradients of its own: where it has begun to send.

    A batch that is large enough by itself leaves `hardened` the same way whatever `examples` is. An imitation is not
    told how many examples a gradient is of, and would give up where it must count them. One warmed in private does
    after that what it does without. Correlated noise begins as independent noise.
    """
    if isinstance(defense, CorrelatedNoise):
        return DPNoise(defense.clip, defense.noise_multiplier)
    if isinstance(defense, Hardened) and batch >= defense.examples:
        return replace(defense, examples=1)
    if isinstance(defense, Gathered) and not defense.always:
        return as_public(defense.inner, batch)
    return defense


def uploads(veil: Veil, rounds: list[list[int]], net: nn.Module, pictures: Dataset, device: str) -> Observation:
    """Return what the server sees of the last of several rounds, the earlier ones attached."""
    seen: list[Observation] = []
    own = copy.deepcopy(net)  # other clients may be at work
    for indices in rounds:
        batch = pictures.batch(indices, device=device)
        mask = veil.propose(gradient(own, cross_entropy, batch)) if "mask" in veil.defense.needs else None
        view = observe(
            veil.protect(own, cross_entropy, batch, mask=mask),
            net,
            cross_entropy,
            batch,
            ThreatModel(labels=True, rounds=True, active=True),
            num_classes=pictures.num_classes,
            mean=pictures.mean,
            std=pictures.std,
            defense=as_public(veil.defense, len(indices)),
            mask=mask,
            earlier=seen,
        )
        seen.append(view)
    return seen[-1]


def older(pool: list[int], first: int, count: int, batch: int) -> list[list[int]]:
    """Return `count` batches of other pictures from the `first` on, beginning again where the pool ends."""
    return [[pool[(k * batch + j) % len(pool)] for j in range(batch)] for k in range(first, first + count)]


def scorecard(guesses: list[Tensor], truths: list[Tensor], gallery: Tensor, seed: int) -> dict[str, Any]:
    """Return the scores of the guesses, and what guesses score that know nothing of these pictures."""
    columns: dict[str, dict[str, list[float]]] = {}

    def add(kind: str, row: dict[str, list[float]]) -> None:
        for metric, values in row.items():
            columns.setdefault(kind, {}).setdefault(metric, []).extend(values)

    for i, (guess, truth) in enumerate(zip(guesses, truths, strict=True)):
        add("attack", score(guess, truth, gallery=gallery))
        for kind, row in score_floor(truth, gallery, derive_rng(seed, "floor", i), gallery=gallery).items():
            add(kind, row)
        if len(truths) > 1:  # the same guesses beside pictures they cannot show: luck, and nothing else
            add("another upload", score(guess, truths[(i + 1) % len(truths)], gallery=gallery))
    scores = columns.pop("attack")
    return {
        "mean": {m: fmean(v) for m, v in scores.items()},
        "spread": {m: stdev(v) if len(v) > 1 else 0.0 for m, v in scores.items()},
        "floor": {kind: {m: fmean(v) for m, v in row.items()} for kind, row in columns.items()},
        "scores": scores,
    }


def network(made: Defense, model: str, pictures: Dataset, checkpoint: Path | None, seed: int) -> nn.Module:
    """Return the model that is attacked, in evaluation mode: fresh, or with the weights of a checkpoint."""
    shape = pictures.input_shape
    net = made.prepare_model(models.build(model, num_classes=pictures.num_classes, input_shape=shape, seed=seed))
    if checkpoint is not None:
        net.load_state_dict(load_checkpoint(checkpoint).model)
    return net.eval()


def trained(settings: Settings, runs: Path) -> tuple[Path, dict[str, Any]]:
    """Train, or go on, or take what is there; return the folder and the result."""
    s = settings
    words = (s.defense, s.model, s.data, f"rounds {s.rounds} lr {s.lr} seed {s.seed}", s.precision)
    folder = runs / Store.slug(" ".join(words))
    return folder, run(settings, folder, resume=True)


@app.command()
def attack(
    defense: Defenses,
    attack: Annotated[list[str], typer.Option(help="an attack; repeatable")] = ["inverting_gradients"],  # noqa: B006
    model: Model = "resnet18",
    data_name: Data = "cifar10",
    pictures: Annotated[int, typer.Option(help="pictures attacked")] = 20,
    batch: Annotated[int, typer.Option(help="pictures in one upload")] = 1,
    age: Annotated[int, typer.Option(help="rounds of other pictures before the attacked one")] = 0,
    repeat: Annotated[int, typer.Option(help="rounds of the same pictures before the attacked one")] = 0,
    after_rounds: Annotated[int, typer.Option(help="train under the same defense first")] = 0,
    checkpoint: Annotated[Path | None, typer.Option("--trained", help="attack the model of this checkpoint")] = None,
    root: Root = "",
    device: Annotated[str, typer.Option()] = "cpu",
    seed: Annotated[int, typer.Option()] = 0,
    runs: Runs = Path("runs/frontier"),
    out: Out = Path("results/frontier"),
) -> None:
    """Attack uploads (evaluation mode, labels known, a client new to the server: the worst case); score the guesses."""
    test, store = data.load(data_name, split="test", root=root or None), Store(out)
    order = torch.randperm(len(test), generator=torch.Generator().manual_seed(seed)).tolist()
    victims, others, rest = order[:pictures], order[pictures : pictures + GALLERY], order[pictures + GALLERY :]
    groups = [victims[i : i + batch] for i in range(0, pictures, batch)]
    truths = [test.pixels(group).to(device) for group in groups]
    for text in defense:
        made = build(DEFENSES, text, "defense")
        for name in attack:
            setting = {"model": model, "data": data_name, "batch": batch, "age": age, "n": pictures, "seed": seed}
            setting |= {"repeat": repeat} if repeat else {}
            after = _name_of(checkpoint) if checkpoint else str(after_rounds or "")
            setting |= {"after": after} if after else {}
            if store.has("attack", text, setting, name):
                continue
            weights = checkpoint
            if after_rounds and weights is None:
                settings = Settings(model, data_name, root, text, rounds=after_rounds, device=device, seed=seed)
                weights = trained(settings, runs)[0] / CHECKPOINT
            net = network(made, model, test, weights, seed).to(device)
            began = time.perf_counter()
            clients = [Veil(made, parameters(net), seed=seed, client=str(i)) for i in range(len(groups))]
            rounds = [[*older(rest, i * age, age, len(g)), *[g] * repeat, g] for i, g in enumerate(groups)]
            at_once = 8 if device.startswith("cuda") else 1  # CPU cores encode while the GPU computes
            with full_precision(), ThreadPoolExecutor(at_once) as threads:
                seen = list(threads.map(partial(uploads, net=net, pictures=test, device=device), clients, rounds))
            rngs = [derive_rng(seed, str(i), 0, "attack") for i in range(len(groups))]
            found = build(ATTACKS, name, "attack").run_many(seen, rngs)
            guesses = [to_pixels(one.inputs, test.mean, test.std).clamp(0, 1) for one in found]
            result = scorecard(guesses, truths, test.pixels(others).to(device), seed)
            result |= {"seconds": time.perf_counter() - began, "digests": {"test": test.digest}}
            result |= {"command": record.command(), "environment": record.environment()}
            store.write("attack", text, setting, result, name)
            brief = {m: round(v, 3) for m, v in result["mean"].items() if m in ("ssim", "lpips", "identified")}
            print(text, name, setting, brief, f"{result['seconds']:.0f} s", flush=True)


def _name_of(checkpoint: Path) -> str:
    """Return what a trained model is called: its file, or its folder if that is a run's."""
    return checkpoint.absolute().parent.name if checkpoint.name == CHECKPOINT else checkpoint.stem


@app.command()
def train(
    defense: Defenses,
    model: Model = "resnet18",
    data_name: Data = "cifar10",
    epochs: Annotated[float, typer.Option(help="stop after this many epochs of the paper's 100")] = 20,
    rounds: Annotated[int, typer.Option(help="stop after this many rounds instead")] = 0,
    lr: Annotated[str, typer.Option(help="learning rate; short runs want a larger one than the paper's")] = "paper",
    root: Root = "",
    device: Annotated[str, typer.Option()] = "cpu",
    precision: Annotated[str, typer.Option(help="float32, tf32 or bf16")] = "float32",
    seed: Annotated[int, typer.Option()] = 0,
    runs: Runs = Path("runs/frontier"),
    out: Out = Path("results/frontier"),
) -> None:
    """Train with ten users under each defense and note accuracy and bytes."""
    store = Store(out)
    per_epoch = math.ceil(len(data.load(data_name, split="train", root=root or None)) / (USERS * BATCH))
    rounds = rounds or math.ceil(epochs * per_epoch)
    for text in defense:
        setting = {"model": model, "data": data_name, "rounds": rounds, "lr": lr, "seed": seed, "precision": precision}
        if store.has("training", text, setting):
            continue
        settings = Settings(
            model,
            data_name,
            root,
            text,
            users=USERS,
            batch_size=BATCH,
            rounds=rounds,
            lr=lr,
            precision=precision,
            device=device,
            seed=seed,
            eval_every=5,
        )
        result = trained(settings, runs)[1]
        store.write("training", text, setting, {"result": result})
        print(text, setting, result["status"], result["accuracy"], f"{result['seconds']:.0f} s", flush=True)


@app.command()
def draw(
    model: Model = "resnet18",
    out: Out = Path("results/frontier"),
    picture: Path = Path("docs/frontier.png"),
    tables: Annotated[Path | None, typer.Option(help="folder of `gradveil reproduce` results that count too")] = None,
) -> None:
    """Draw what the worst attack gains over its floor against accuracy, for one model; a dot's size is the upload."""
    draw_picture(Store(out, tables), model, picture)


@app.command()
def table(page: Path, out: Out = Path("results/frontier")) -> None:
    """Write the tables of a page anew: what stands between its `frontier` markers."""
    page.write_text(fill_page(page.read_text(encoding="utf-8"), Store(out)), encoding="utf-8")


if __name__ == "__main__":
    app()
