"""What a server gets out of a batch of 32 by editing one row of the classifier, which the guard does not see.

    python examples/fishing.py [model] [seeds] [release ...]

CIFAR-10, fresh models, labels known, uploads of 32 among which one picture is of the class that is fished (`fishing`,
which searches the generator). For each release: how often that picture is the reconstruction's nearest of 100, beside
what the label alone paints; how many of the models the guard refuses; and the share of that picture in the gradient of
all layers before the classifier. Writes results/guard/fishing-MODEL.json.
"""

import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradveil import Batch, Defense, ThreatModel, Veil, metrics, record
from gradveil.attacks import Fishing
from gradveil.core import Attack
from gradveil.data import Dataset, load, to_pixels
from gradveil.defenses import DEFENSES
from gradveil.gate import observe
from gradveil.generator import load_generator
from gradveil.gradients import gradient, parameters
from gradveil.guard import Guard
from gradveil.models import build
from gradveil.shares import gradient_and_shares
from gradveil.spec import build as built
from gradveil.spec import to_text
from gradveil.veil import derive_rng

BATCH, LINE_UP, UPLOADS = 32, 100, 20  # uploads of each seed
RELEASES = ("none", "dgp", "hardened(balance=0)", "hardened", "hardened(balance=1)")


class Case:
    """A model with one row edited, and the batches of the clients it is sent to."""

    def __init__(self, data: Dataset, name: str, seed: int) -> None:
        rng = derive_rng(seed, name, 0, "fishing")
        self.seed, self.data, label = seed, data, seed % data.num_classes
        self.attack = Fishing(label=label).fitted(None, data.mean, data.std)
        own = build(name, num_classes=data.num_classes, input_shape=data.input_shape, seed=seed).eval()
        self.model = self.attack.plant(own, data.input_shape, rng)
        self.refused = bool(Guard.pin(own).inspect(self.model, input_shape=data.input_shape, rng=rng))
        self.batches = [_with_one(data, label, rng) for _ in range(UPLOADS)]
        self.fished = [batch.inputs[batch.labels == label] for batch in self.batches]
        self.shares = [_share(self.model, batch, label) for batch in self.batches]

    def identified(self, attack: Attack, defense: Defense, line_up: torch.Tensor) -> int:
        """Return how many of the fished pictures are nearest to what the attack makes of the uploads."""
        data, prior, seen = self.data, load_generator(), []
        for i, batch in enumerate(self.batches):
            veil = Veil(defense, parameters(self.model), seed=self.seed, client=f"{i}", guard=None)
            payload = veil.protect(self.model, cross_entropy, batch)
            threat = ThreatModel(labels=True, prior=True, active=True)
            one = observe(
                payload, self.model, cross_entropy, batch, threat,
                num_classes=data.num_classes, mean=data.mean, std=data.std, defense=defense, prior=prior,
            )  # fmt: skip
            seen.append(one)
        rngs = [derive_rng(self.seed, f"{i}", 0, "attack") for i in range(UPLOADS)]
        hits = 0.0
        for guess, picture in zip(attack.run_many(seen, rngs), self.fished, strict=True):
            shown, truth = (to_pixels(x, data.mean, data.std) for x in (guess.inputs, picture))
            hits += metrics.score(shown, truth, gallery=line_up)["identified"][0]
        return int(hits)


def _with_one(data: Dataset, label: int, rng: torch.Generator) -> Batch:
    """Return a random batch that holds one picture of a class."""
    while True:
        batch = data.batch(torch.randperm(len(data), generator=rng)[:BATCH])
        if int((batch.labels == label).sum()) == 1:
            return batch


def _share(model: nn.Module, batch: Batch, label: int) -> float:
    """Return the squared length of one picture's share before the classifier over that of the whole gradient there."""
    one, whole = batch.labels == label, gradient(model, cross_entropy, batch)
    _, alone = gradient_and_shares(model, cross_entropy, Batch(batch.inputs[one], batch.labels[one]))
    names = [name for name in whole if not name.startswith("classifier")]
    own = sum(whole[name].numel() * float(alone[name] / BATCH) ** 2 for name in names)
    return own / sum(float(whole[name].square().sum()) for name in names)


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "cnn6"
    seeds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    releases = tuple(sys.argv[3:]) or RELEASES
    torch.set_num_threads(1)
    data, line_up = load("cifar10", split="test"), load("cifar10").pixels(range(LINE_UP - 1))
    cases = [Case(data, name, seed) for seed in range(seeds)]
    found: dict[str, Any] = {
        "command": shlex.join(["python", "examples/fishing.py", *sys.argv[1:]]),
        "environment": record.environment(),
        "model": name,
        "attack": to_text(cases[0].attack),
        "n": seeds * UPLOADS,
        "refused": sum(case.refused for case in cases),
        "share": sum(share for case in cases for share in case.shares) / (seeds * UPLOADS),
        "identified": {},
    }
    print(f"{name}: {found['refused']} of {seeds} models refused, mean share {found['share']:.3f}", flush=True)
    tries = [("the label alone", "none"), *((text, text) for text in releases)]
    for line, text in tries:
        attacks = [case.attack if line == text else case.attack.blind() for case in cases]
        defense = built(DEFENSES, text, "defense")
        hits = [case.identified(a, defense, line_up) for case, a in zip(cases, attacks, strict=True) if a]
        found["identified"][line] = hits
        print(f"{line:24} {hits} of {UPLOADS} each", flush=True)
        record.write_json(Path(f"results/guard/fishing-{name}.json"), found)


if __name__ == "__main__":
    main()
