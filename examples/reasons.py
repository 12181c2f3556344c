"""Why our cells differ from the paper's: each experiment tests one guess on the very uploads of those cells.

    python examples/reasons.py rgap_failed rgap_exact rob_readout rob_planted rob_pixels ats_policies --root local
    python examples/reasons.py ig_smooth ig_cifar100 lenet_accuracy cnn6_accuracy --root local
    python examples/reasons.py ig_smooth_deep dp_accuracy --root local  # these want a GPU

Writes results/reasons/<experiment>.json, which the sentences in docs/results.md name. LPIPS weights are needed.
"""

import argparse
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from released import ReleasedRGAP, ReleasedRob, released_readout
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import metrics, models, record
from gradveil.attacks import ATTACKS, GradientMatching
from gradveil.attacks.imprint import Imprint
from gradveil.attacks.rgap import RGAP
from gradveil.audit import clients
from gradveil.audit.clients import Sent
from gradveil.audit.plan import Plan
from gradveil.core import Attack, Reconstruction
from gradveil.data import Dataset, normalise
from gradveil.defenses.ats import TRANSFORMATIONS
from gradveil.metrics.perceptual import lpips_weights
from gradveil.reproduce import SCALES, attacked, figures, pictures, store
from gradveil.reproduce.cells import AttackCell
from gradveil.reproduce.scored import scores_of
from gradveil.reproduce.weights import placed
from gradveil.spec import build
from gradveil.training import Settings
from gradveil.training.run import run
from gradveil.veil import derive_rng

FULL = SCALES["full"]
CPU = torch.device("cpu")
BEST = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # for the searches; the rest is exact on a CPU
PUBLISHED = ("3-1-7", "43-18-18", "3-1-7+43-18-18", "21-13-3", "7-4-15", "21-13-3+7-4-15")
Scores = dict[str, list[float]]  # of every picture, or the accuracy of a training run
Line = tuple[str, Scores]  # what was scored


def flipped(model: nn.Module, data: Dataset) -> Dataset:
    """Return the pictures labelled 0 or 1, opposite to what a one-logit model says of them."""
    with torch.no_grad():
        says = torch.cat([model(data.batch([i]).inputs)[:, 0] for i in range(len(data))])
    return replace(data, labels=(says <= 0).long())


def logistic(logit: Tensor, label: Tensor) -> Tensor:
    return F.softplus(-(2 * label - 1) * logit[:, 0]).mean()


def upload(
    cell: AttackCell, attack: Attack, root: str, *, pixels: bool = False, device: torch.device = CPU
) -> tuple[list[Sent], Dataset]:
    """Return what the clients of a cell send, with `attack`'s layer planted if it has one.

    R-GAP as released gets the one logit it is made for. With `pixels` the model takes pixels in 0..1 as they are.
    """
    data, chosen = pictures.victims(cell, root)
    if pixels:
        data = replace(data, mean=(0.0,) * len(data.mean), std=(1.0,) * len(data.std))
    subject, column = attacked._subject(cell, attacked.Place(FULL, root, device, None), data, chosen, attack)
    if isinstance(attack, ReleasedRGAP):
        model = models.build(cell.model, num_classes=1, input_shape=data.input_shape, seed=cell.seed)
        subject = replace(subject, model=model, loss_fn=logistic, victims=flipped(model.eval(), subject.victims))
    sent = clients.uploads(Plan(seed=cell.seed, device=str(device)), subject, column, cell.defense, attack)
    return [replace(s, seen=replace(s.seen, defense=None)) for s in sent], data


def scored(sent: Sequence[Sent], found: Sequence[Reconstruction], data: Dataset, *, changed: bool = False) -> Scores:
    return scores_of(sent, found, data, transformed=changed)


def tried(sent: list[Sent], attack: Attack, cell: AttackCell) -> list[Reconstruction]:
    rngs = [derive_rng(cell.seed, f"{cell.attack} {i}", 0, "attack") for i in range(len(sent))]
    return attack.run_many([s.seen for s in sent], rngs)


def rescaled(found: Reconstruction, data: Dataset) -> Reconstruction:
    """Return the values stretched from black to white, as the release shows them."""
    x = found.inputs
    return Reconstruction(normalise((x - x.min()) / (x.max() - x.min()), data.mean, data.std))


def greys(cell: AttackCell, root: str) -> Iterator[Line]:
    """Yield what grey, and faint noise round grey, score on the pictures of a cell."""
    data, chosen = pictures.victims(cell, root)
    truth = data.pixels(chosen)
    rng = torch.Generator().manual_seed(0)

    def blind(guess: Tensor) -> Scores:
        cards = [metrics.score(g[None], t[None]) for g, t in zip(guess.expand_as(truth), truth, strict=True)]
        return {name: [card[name][0] for card in cards] for name in cards[0]}

    yield "grey", blind(torch.full_like(truth, 0.5))
    yield "mean colour of the data", blind(torch.tensor(data.mean).view(1, -1, 1, 1))
    yield "black", blind(torch.zeros_like(truth))
    for size in (0.01, 0.03, 0.05, 0.1):
        yield f"grey and noise of {size:g}", blind(0.5 + size * torch.randn(truth.shape, generator=rng))
        coarse = torch.randn(len(truth), 3, 8, 8, generator=rng)
        smooth = F.interpolate(coarse, size=truth.shape[-2:], mode="bilinear")
        yield f"grey and smooth noise of {size:g}", blind(0.5 + size * smooth)


def rgap_failed(root: str) -> Iterator[Line]:
    """Is the paper's 0.25 what grey, or faint noise round grey, scores, or what the released attack leaves?"""
    yield from greys(FULL.attack("rgap", "none", "cnn6"), root)
    for defense in ("soteria", "dp", "topk", "outpost", "dgp"):
        cell, attack = replace(FULL.attack("rgap", defense, "cnn6"), pictures=10), ReleasedRGAP()
        sent, data = upload(cell, attack, root)
        found = tried(sent, attack, cell)
        yield f"released attack, {defense}, clamped", scored(sent, found, data)
        yield f"released attack, {defense}, rescaled", scored(sent, [rescaled(f, data) for f in found], data)


def rgap_exact(root: str) -> Iterator[Line]:
    """Does solving in float32 give the paper's 0.965, or the rows that the released attack does not weigh?"""
    for attack in (ReleasedRGAP(), ReleasedRGAP(weighed=True), ReleasedRGAP("float32"), ReleasedRGAP("float32", True)):
        cell = FULL.attack("rgap", "none", "cnn6")
        sent, data = upload(cell, attack, root)
        rows = "rows weighed" if attack.weighed else "rows not weighed"
        yield f"{rows}, solved in {attack.solver}", scored(sent, tried(sent, attack, cell), data)
    cell, attack = FULL.attack("rgap", "ats", "cnn6"), ReleasedRGAP()
    sent, data = upload(cell, attack, root)
    yield "ats_r, rows not weighed, solved in float64", scored(sent, tried(sent, attack, cell), data, changed=True)


def rob_readout(root: str) -> Iterator[Line]:
    """Does the released read-out give the paper's 0.933 where ours gives 0.972?"""
    for defense in ("none", "precode"):
        for text, attack, layer in planted(root):
            cell = FULL.attack("rob", defense)
            sent, data = upload(cell, attack, root)
            if isinstance(attack, Imprint):
                yield f"{defense}: {text}, our read-out", scored(sent, tried(sent, attack, cell), data)
            shift = attack.shift if isinstance(attack, Imprint) else 0.0
            for largest in (True, False):
                found = [released_readout(s.seen, layer, shift, largest=largest) for s in sent]
                kept = "largest" if largest else "smallest"
                yield f"{defense}: {text}, released read-out, {kept} kept", scored(sent, found, data)


def planted(root: str) -> Iterator[tuple[str, Attack, str]]:
    data = pictures.load_split("cifar10", "test", root)
    yield "our layer, 200 bins", Imprint(bins=200).fitted(None, data.mean, data.std), "imprint.measure"
    yield "released layer, 100 bins", ReleasedRob(), "0.1"
    yield "released layer, 200 bins", ReleasedRob(bins=200), "0.1"
    yield "later release, 64 bins of a wave", ReleasedRob(64, 32, 1.0), "0.1"


def rob_planted(root: str) -> Iterator[Line]:
    """Do gain, bins, layer or read-out move our figures under pruning and noise to the paper's?"""
    data = pictures.load_split("cifar10", "test", root)
    ours = Imprint(bins=200).fitted(None, data.mean, data.std)
    layers: dict[str, Imprint] = {
        "as in the table": ours,
        "gain 1": replace(ours, gain=1.0),
        "50 bins": replace(ours, bins=50),
        "800 bins": replace(ours, bins=800),
        "no shift": replace(ours, shift=0.0),
    }
    for defense in ("topk", "dgp", "outpost", "dp"):
        cell = FULL.attack("rob", defense)
        for text, attack in layers.items():
            sent, _ = upload(cell, attack, root)
            yield f"{defense}: our layer, {text}", scored(sent, tried(sent, attack, cell), data)
        for gain in (1e-3, 1.0):
            sent, _ = upload(cell, ReleasedRob(gain=gain), root)
            for fill in ("grey", "black"):
                found = [released_readout(s.seen, "0.1", black=fill == "black") for s in sent]
                yield f"{defense}: released, gain {gain:g}, missing ones {fill}", scored(sent, found, data)


def rob_pixels(root: str) -> Iterator[Line]:
    """The same for models that take pixels in 0..1: what did not arrive, and what is missing, is black there."""
    for bins in (100, 400):
        for defense in ("none", "topk", "dgp", "outpost", "dp"):
            cell, attack = FULL.attack("rob", defense), ReleasedRob(bins=bins)
            sent, data = upload(cell, attack, root, pixels=True)
            yield f"{defense}: released, {bins} bins", scored(sent, tried(sent, attack, cell), data)


def ats_policies(root: str) -> Iterator[Line]:
    """Does another published policy give the paper's ats_t? R-GAP is exact, so there the changed picture is scored."""
    for policy in (*PUBLISHED, *map(str, range(len(TRANSFORMATIONS)))):
        cell = FULL.attack("rgap", "ats", "cnn6", defense_text=f"ats(policy='{policy}')")
        sent, data = upload(cell, RGAP(masked=False), root)
        text = " ".join(map(str, TRANSFORMATIONS[int(policy)])) if policy.isdigit() else "published"
        yield f"rgap: {policy} ({text})", scored(sent, [Reconstruction(s.trained_on.inputs) for s in sent], data)
    for policy in PUBLISHED:
        cell = FULL.attack("rob", "ats", defense_text=f"ats(policy='{policy}')")
        attack = Imprint(bins=200).fitted(None, data.mean, data.std)
        sent, data = upload(cell, attack, root)
        found = tried(sent, attack, cell)
        for column in ("ats_t", "ats_r"):
            yield f"rob, {column}: {policy}", scored(sent, found, data, changed=column == "ats_r")


def smoothed(
    root: str, model: str, defenses: Sequence[str], weights: Sequence[float], data_name: str = FULL.data
) -> Iterator[Line]:
    for defense in defenses:
        cell = FULL.attack("ig", defense, model, data=data_name)
        published = build(ATTACKS, cell.attack_text, "attack")
        assert isinstance(published, GradientMatching)
        for tv in weights:
            attack = replace(published, tv=tv)
            sent, data = upload(cell, attack, root, device=BEST)
            yield f"{model}, {defense}: total variation {tv:g}", scored(sent, tried(sent, attack, cell), data)


def ig_smooth(root: str) -> Iterator[Line]:
    """Is there one weight of the total variation that gives IG's figures of the paper with and without DGP?"""
    for model in ("lenet", "cnn6"):
        yield from smoothed(root, model, ("none", "dgp"), (0.003, 0.01, 0.03, 0.1, 0.3))


def ig_cifar100(root: str) -> Iterator[Line]:
    """The same on CIFAR-100, and what an empty guess scores there."""
    yield from greys(FULL.attack("ig", "none", data=FULL.data100), root)
    yield from smoothed(root, "lenet", ("none", "dgp"), (0.001, 0.003, 0.01, 0.03, 0.1), FULL.data100)
    yield from smoothed(root, "cnn6", ("none", "dgp"), (0.003, 0.03), FULL.data100)


def ig_smooth_deep(root: str) -> Iterator[Line]:
    """The same for ResNet18, where what noise, a bottleneck or a masked layer leaves depends on the weight most."""
    for tv in (0.1, 0.03, 0.3):
        yield from smoothed(root, "resnet18", ("dp", "precode", "soteria", "dgp", "none"), (tv,))


def accuracy(settings: Settings, label: str, root: str) -> Line:
    """Return what a run ends at, with its label, which also names the folder where it is kept and goes on."""
    folder = Path("runs/reasons") / re.sub(r"\W+", "-", label)
    result = run(placed(settings, root, str(BEST)), folder, resume=True)
    return label, {name: [result[name]] for name in ("accuracy", "seconds")}  # those of all sittings


def relu_lenet(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Return LeNet with ReLUs for its sigmoids and torch's own first weights, as one would build it to train."""
    model = models.build("lenet(init='default')", num_classes=num_classes, input_shape=input_shape)
    features = model.get_submodule("features")
    for name, layer in list(features.named_children()):
        if isinstance(layer, nn.Sigmoid):
            setattr(features, name, nn.ReLU())
    return model


def lenet_accuracy(root: str) -> Iterator[Line]:
    """Does LeNet reach the paper's 26.75 and 32.42 on CIFAR-100 with ReLUs, in float32, or with torch's first weights?

    The recorded runs have sigmoids and the paper's first weights, in bf16.
    """
    relu, own = "reasons:relu_lenet", "lenet(init='default')"
    lenets = "0:0.1, 50:0.01, 70:0.005"  # the paper's rates for LeNet
    named = {relu: "ReLUs", own: "sigmoids, torch's weights", "lenet": "sigmoids, the paper's weights"}
    for model, defense in ((relu, "dgp"), (relu, "topk5"), ("lenet", "dgp"), (own, "dgp")):
        settings = FULL.train(defense, model, data=FULL.data100, lr=lenets).settings
        yield accuracy(settings, f"{defense}: {named[model]}", root)


def cnn6_accuracy(root: str) -> Iterator[Line]:
    """Does CNN6 reach the paper's 47.24 under DGP on CIFAR-100 with plain pictures?"""
    settings = FULL.train("dgp", "cnn6", data=FULL.data100, augment="none").settings
    yield accuracy(settings, "dgp: CNN6, augmentation none", root)


def dp_accuracy(root: str) -> Iterator[Line]:
    """Does noise that does not average out over the ten users give the paper's 76.01?"""
    std = 1e-2 * FULL.training["users"] ** 0.5  # the mean of the users' noise is then as large as one user's
    yield accuracy(FULL.train("dp", text=f"dp(std={std:.6f})").settings, f"noise of {std:.4f}", root)


EXPERIMENTS: dict[str, Callable[[str], Iterator[Line]]] = {
    f.__name__: f
    for f in (
        *(rgap_failed, rgap_exact, rob_readout, rob_planted, rob_pixels, ats_policies),
        *(ig_smooth, ig_cifar100, ig_smooth_deep, lenet_accuracy, cnn6_accuracy, dp_accuracy),
    )
}


def figures_of(scores: Scores) -> dict[str, Any]:
    if "accuracy" in scores:
        return {name: {"mean": value} for name, (value,) in scores.items()}
    found = {}
    for name, column in (("ssim", "paper_ssim"), ("plain_ssim", "ssim"), ("lpips", "lpips"), ("mse", "mse")):
        figure = figures.summarise([scores[column]])
        found[name] = {"mean": figure.mean, "spread": figure.spread}
    extremes = {"max_ssim": max(scores["paper_ssim"]), "min_lpips": min(scores["lpips"])}
    return {"n": len(scores["mse"]), **found, **extremes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="+", choices=list(EXPERIMENTS))
    parser.add_argument("--root", default="local", help="where CIFAR-10 lies")
    parser.add_argument("--out", type=Path, default=Path("results/reasons"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    lpips_weights()  # raises if there are none
    for name in given.experiments:
        experiment, started, lines = EXPERIMENTS[name], time.monotonic(), {}
        for label, scores in experiment(given.root):
            lines[label] = found = figures_of(scores)
            shown = [f"{name} {found[name]['mean']:.3f}" for name in ("ssim", "lpips", "accuracy") if name in found]
            print(f"{label:60}", *shown, flush=True)
            result = {
                "kind": "reason",
                "experiment": name,
                "question": experiment.__doc__,
                "command": shlex.join(["python", "examples/reasons.py", name, "--root", given.root]),
                "environment": record.environment(),
                "device": str(BEST) if name.startswith("ig_") or name.endswith("accuracy") else "cpu",
                "seconds": time.monotonic() - started,
                "seed": 0,
                "pictures": "those of the cells with this seed in results/full",
                "lines": lines,
            }
            store.write(given.out / f"{name}.json", result)  # after every line: one may take minutes


if __name__ == "__main__":
    main()
