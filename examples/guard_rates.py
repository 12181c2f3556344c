"""How often the guard refuses: planted models it must refuse, and honest ones it must let pass.

    python examples/guard_rates.py [seeds] [first seed]

Prints the two tables of docs/guard.md. The guard's limits were chosen on seeds below 510: judge them on others.
Imprints written into the first layer of a perceptron come with the mean SSIM and the share of pictures copied (SSIM
above 0.9) that they reach, so that a miss can be weighed against its use.
"""

import copy
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise, product
from typing import get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import prune

from gradveil import dgp, gradient
from gradveil.attacks.imprint import Imprint, read_bins
from gradveil.attacks.spotlight import Silence, Spotlight
from gradveil.attacks.traps import TrapWeights
from gradveil.data import Dataset, load, to_pixels
from gradveil.guard import Guard
from gradveil.metrics import aligned, pair, ssim
from gradveil.models import build

SHAPE = (3, 32, 32)
SILENCED_BY: dict[Silence, str] = {
    "copies": "a threshold, all alike",
    "scattered": "a threshold, in random directions",
    "outgoing": "outgoing weights of zero",
}
PIXELS = math.prod(SHAPE)


def refused(model: nn.Module, seed: int, shape: tuple[int, ...] = SHAPE) -> bool:
    return bool(Guard().inspect(model, input_shape=shape, rng=torch.Generator().manual_seed(1000 + seed)))


def measurement(kind: str, rng: torch.Generator) -> Tensor:
    """Return what all rows of an imprint measure."""
    if kind == "mean":
        return torch.ones(PIXELS) / PIXELS
    if kind == "wave":
        return torch.cos(math.pi / PIXELS * (torch.arange(PIXELS) + 0.5) * 32) / math.sqrt(PIXELS)
    return torch.randn(PIXELS, generator=rng) / math.sqrt(PIXELS)


def above_the_band(noise: Tensor) -> Tensor:
    """Take out of every row what natural pictures mostly consist of: noise that hardly moves a measurement."""
    frequency = (torch.fft.fftfreq(32) * 32).abs()
    high = (frequency[:, None] > 8) | (frequency > 8)
    kept: Tensor = torch.fft.ifft2(torch.fft.fft2(noise.view(-1, *SHAPE)) * high).real
    return kept.flatten(1)


def write_imprint(
    model: nn.Module, public: Tensor, seed: int, *, kind: str = "mean", noise: float = 0.0, high: bool = False,
    used: float = 1.0, groups: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Overwrite a share of the first layer's rows, permuted and scaled at will; return rows' order and thresholds."""
    rng = torch.Generator().manual_seed(seed)
    layer = model.get_submodule("features.1")
    assert isinstance(layer, nn.Linear)
    order = torch.randperm(layer.out_features, generator=rng)[: int(used * layer.out_features)]
    gains = 0.5 + torch.rand(len(order), generator=rng)
    thresholds = torch.zeros(len(order))
    for part in torch.arange(len(order)).chunk(groups):
        measure = measurement(kind if groups == 1 else "random", rng)
        seen = public.flatten(1) @ measure
        spreads = torch.special.ndtri((torch.arange(len(part)) + 0.5) / len(part))
        thresholds[part] = seen.mean() + seen.std() * spreads
        extra = torch.randn(len(part), PIXELS, generator=rng)
        extra = above_the_band(extra) if high else extra
        rows = measure + noise * measure.norm() * extra / extra.norm(dim=1, keepdim=True)
        with torch.no_grad():
            layer.weight[order[part]] = gains[part, None] * rows
            layer.bias[order[part]] = -gains[part] * thresholds[part]
    head = model.get_submodule("classifier").get_parameter("weight")
    with torch.no_grad():
        head[:, order] = head[:, :1] / gains  # every row must get the same share of the loss
    return order, thresholds


def copied(model: nn.Module, order: Tensor, thresholds: Tensor, data: Dataset, seed: int) -> Tensor:
    """Return the SSIM of nine pictures read out of one group of rows."""
    first = 9 * (seed % 4)
    batch = data.batch(range(first, first + 9))
    grads = gradient(model, cross_entropy, batch)
    head = model.get_submodule("classifier").get_parameter("weight").detach()[0, order].double()
    scale = (head[0] / head)[:, None]  # undo the gains
    weight = grads["features.1.weight"][order].double() * scale
    bias = grads["features.1.bias"][order].double() * scale[:, 0]
    measure = measurement("mean", torch.Generator()).double()
    found = read_bins(weight, bias, thresholds.double(), measure, 9).float().view(-1, *SHAPE)
    guess, truth = (to_pixels(x, data.mean, data.std).clamp(0, 1) for x in (found, batch.inputs))
    return ssim(aligned(guess, pair(guess, truth)), truth)


def train(name: str, data: Dataset, steps: int, seed: int, decay: float = 0.0, lr: float = 0.01) -> nn.Module:
    """Train for real; return the model."""
    model = build(name, num_classes=data.num_classes, input_shape=data.input_shape, seed=seed)
    optimiser = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=decay)
    rng = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = data.batch(torch.randint(len(data), (32,), generator=rng))
        optimiser.zero_grad()
        cross_entropy(model(batch.inputs), batch.labels).backward()
        optimiser.step()
    return model


def pruned(model: nn.Module, share: float = 0.9) -> nn.Module:
    """Return the model with its smallest weights set to zero."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            prune.l1_unstructured(module, "weight", share)
            prune.remove(module, "weight")
    return model


def with_dead_units(model: nn.Module, share: float = 0.5) -> nn.Module:
    """Return the model with whole rows, and their biases, set to zero."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                module.weight[: int(share * len(module.weight))] = 0
                if module.bias is not None:
                    module.bias[: int(share * len(module.bias))] = 0
    return model


def low_rank(model: nn.Module, rank: int = 8) -> nn.Module:
    """Return the model with every weight matrix cut to its largest singular values."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                left, values, right = torch.linalg.svd(module.weight.flatten(1), full_matrices=False)
                values[rank:] = 0
                module.weight.copy_(((left * values) @ right).view_as(module.weight))
    return model


def folded(model: nn.Module) -> nn.Module:
    """Return the model with every BatchNorm that follows a convolution in a Sequential folded into it."""
    model = copy.deepcopy(model).eval()
    for parent in list(model.modules()):
        parts = list(parent.named_children()) if isinstance(parent, nn.Sequential) else []
        for (name, conv), (after, norm) in pairwise(parts):
            if isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
                setattr(parent, name, nn.utils.fusion.fuse_conv_bn_eval(conv, norm))
                setattr(parent, after, nn.Identity())
    return model


CHANGES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "as it is": lambda m: m,
    "90 % pruned": pruned,
    "half the units dead": with_dead_units,
    "rank 16": partial(low_rank, rank=16),
    "rank 8": low_rank,
    "BatchNorm folded": folded,
    "bf16": lambda m: copy.deepcopy(m).bfloat16(),
}


def planted(seeds: range, data: Dataset, public: Tensor) -> Iterator[tuple[str, list[bool], list[Tensor]]]:
    """Yield what the attack is, whether it was refused, and the SSIM it reaches where that is measured."""

    def bodies(seed: int) -> nn.Module:
        name = ("lenet", "cnn6", "mlp")[seed % 3]
        return build(name, num_classes=data.num_classes, input_shape=SHAPE, seed=seed)

    for bins in (50, 200, 1000):
        rob = Imprint(bins=bins).fitted(None, data.mean, data.std)
        hit = [refused(rob.plant(bodies(s), SHAPE, torch.Generator().manual_seed(s)), s) for s in seeds]
        yield f"Rob, {bins} bins", hit, []
    for bins in (50, 200):
        rob = Imprint(bins=bins).fitted(dgp(), data.mean, data.std)
        hit = [refused(rob.plant(bodies(s), SHAPE, torch.Generator().manual_seed(s)), s) for s in seeds]
        yield f"Rob with decoys and dead rows, {bins} bins", hit, []
    for silence, (fires, share) in product(get_args(Silence), {"one fires": 1 / 4096, "a quarter fires": 0.25}.items()):
        lit = Spotlight(silence=silence, lit=share).fitted(None, data.mean, data.std)
        hit = [refused(lit.plant(bodies(s), SHAPE, torch.Generator().manual_seed(s)), s) for s in seeds]
        yield f"4096 rows of which {fires}, the others silenced by {SILENCED_BY[silence]}", hit, []
    for share in (0.01, 0.05, 0.2):
        trap = TrapWeights(share=share)
        hit = []
        for s in seeds:
            mlp = build("mlp", num_classes=data.num_classes, input_shape=SHAPE, seed=s)
            hit.append(refused(trap.plant(mlp, SHAPE, torch.Generator().manual_seed(s)), s))
        yield f"trap weights, share {share:g}", hit, []
    for part in (0.2, 0.1, 0.05):
        hit = []
        for s in seeds:
            mlp = build("mlp", num_classes=data.num_classes, input_shape=SHAPE, seed=s)
            honest_state = copy.deepcopy(mlp.state_dict())
            trapped = TrapWeights().plant(mlp, SHAPE, torch.Generator().manual_seed(s)).state_dict()
            first = int(part * 256)
            for name in ("features.1.weight", "features.1.bias"):
                honest_state[name][:first] = trapped[name][:first]
            mlp.load_state_dict(honest_state)
            hit.append(refused(mlp, s))
        yield f"trap weights in {part:.0%} of the rows", hit, []
    variants: dict[str, dict[str, object]] = {
        "the mean": {},
        "a wave": {"kind": "wave"},
        "random": {"kind": "random"},
        **{f"the mean, noise {x:g} times as large": {"noise": x} for x in (0.3, 1.0, 3.0, 10.0, 30.0)},
        **{f"the mean, noise {x:g} times above the band": {"noise": x, "high": True} for x in (1.0, 10.0, 100.0)},
        **{f"the mean, {x:.0%} of the rows": {"used": x} for x in (0.25, 0.1, 0.05, 0.03, 0.02)},
        "16 random measurements of 16 bins": {"groups": 16},
        "128 random measurements of 2 bins": {"groups": 128},
    }
    for text, settings in variants.items():
        hit, scores = [], []
        for s in seeds:
            mlp = build("mlp", num_classes=data.num_classes, input_shape=SHAPE, seed=s)
            order, thresholds = write_imprint(mlp, public, s, **settings)  # type: ignore[arg-type]
            hit.append(refused(mlp, s))
            if s in seeds[:4] and "kind" not in settings and "groups" not in settings:
                scores.append(copied(mlp, order, thresholds, data, s))
        yield f"in an MLP's own layer: {text}", hit, scores


def honest(seeds: range) -> Iterator[tuple[str, list[bool]]]:
    """Yield what the model is, and whether it was refused."""
    names = ("lenet", 'lenet(init="default")', "cnn6", "mlp", "mlp(hidden=1024)", "vgg11", "resnet18")
    for name in names:
        # The deep ones have no layer but the classifier that could be mistaken.
        few = seeds if name not in ("vgg11", "resnet18") else seeds[: max(1, len(seeds) // 5)]
        for text, change in CHANGES.items():
            hit = []
            for s in few:
                shape = (SHAPE, (1, 28, 28), (3, 64, 64))[s % 3]
                model = build(name, num_classes=(10, 100)[s % 2], input_shape=shape, seed=s)
                hit.append(refused(change(model), s, shape))
            yield f"{name}, fresh, {text}", hit
    photos, digits = load("photos"), load("digits")
    for name, data, steps, decay, lr in (
        ("lenet", photos, 300, 0.0, 0.05), ("lenet", digits, 600, 0.0, 0.1), ("cnn6", photos, 300, 1e-3, 0.01),
        ("mlp", photos, 400, 0.0, 0.01), ("mlp", photos, 400, 1e-2, 0.01), ("mlp", digits, 2000, 0.0, 0.05),
        ("mlp", digits, 2000, 1e-2, 0.05), ("vgg11", photos, 300, 0.0, 0.01), ("resnet18", photos, 150, 0.0, 0.01),
    ):  # fmt: skip
        model = train(name, data, steps, seeds[0], decay, lr)
        for part in (True, False):
            chosen = [change for text, change in CHANGES.items() if (text == "rank 8") is part]
            hit = [refused(change(model), s, data.input_shape) for change in chosen for s in range(3)]
            yield f"{name}, {steps} steps on {data.name}, decay {decay:g}, {'rank 8' if part else 'otherwise'}", hit


def main() -> None:
    given = [int(text) for text in sys.argv[1:]]
    count, first = (*given, *(10, 900)[len(given) :])
    seeds = range(first, first + count)
    data, public = load("photos", split="test"), load("photos").batch(range(200)).inputs
    print("| planted | refused | mean SSIM | copied |\n|---|---|---|---|")
    for text, hit, scores in planted(seeds, data, public):
        all_scores = torch.cat(scores) if scores else torch.tensor([])
        reach = f"{all_scores.mean():.2f} | {(all_scores > 0.9).float().mean():.0%}" if scores else " | "
        print(f"| {text} | {sum(hit)} of {len(hit)} | {reach} |", flush=True)
    print("\n| honest | refused |\n|---|---|")
    for text, hit in honest(seeds):
        print(f"| {text} | {sum(hit)} of {len(hit)} |", flush=True)


if __name__ == "__main__":
    main()
