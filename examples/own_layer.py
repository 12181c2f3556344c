"""What a server reads out of a model's own first layer when it keeps within the limits of the guard.

    python examples/own_layer.py [uploads]

A perceptron on the bundled photos, uploads of 32. One unit is made to fire for the brightest picture and to stand out
(`own_spotlight`). Prints how often the guard refuses, and how often the brightest picture is the reconstruction's
nearest of 100 bright ones by MSE or SSIM; writes results/guard/own_layer.json.
"""

import sys
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from gradveil import ThreatModel, Veil, record
from gradveil.attacks import OwnSpotlight
from gradveil.data import Dataset, load, to_pixels
from gradveil.defenses import DEFENSES
from gradveil.gate import observe
from gradveil.gradients import parameters
from gradveil.guard import Guard
from gradveil.metrics import identification_rank
from gradveil.models import build
from gradveil.spec import build as built

BATCH, LINE_UP = 32, 100
OUT = Path("results/guard/own_layer.json")
# Shares of the units that are lit and alive, and how strongly the lit ones lead on.
SETTINGS = ((0.001, 0.26, 99.0), (0.02, 0.26, 99.0), (0.035, 0.9, 99.0), (0.09, 0.26, 99.0))
RELEASES = ("none", "hardened", "hardened(balance=1)")


def one(
    data: Dataset, hidden: int, shares: tuple[float, float, float], release: str, seed: int
) -> tuple[bool, float, float]:
    """Return whether the guard refuses, and the rank of the brightest picture by what was read and by a blind guess."""
    rng = torch.Generator().manual_seed(seed)
    lit, alive, lead = shares
    attack = OwnSpotlight(batch=BATCH, lit=lit, alive=alive, lead=lead).fitted(None, data.mean, data.std)
    own = build(f"mlp(hidden={hidden})", num_classes=data.num_classes, input_shape=data.input_shape, seed=seed)
    model = attack.plant(own, data.input_shape, rng)
    refused = bool(Guard.pin(own).inspect(model, input_shape=data.input_shape, rng=rng))
    order = torch.randperm(len(data), generator=rng)
    batch = data.batch(order[:BATCH])
    brightest = int(batch.inputs.flatten(1).mean(1).argmax())
    defense = built(DEFENSES, release, "defense")
    payload = Veil(defense, parameters(model), seed=seed, guard=None).protect(model, cross_entropy, batch)
    mean, std = data.mean, data.std
    threat = ThreatModel(active=True)
    seen = observe(
        payload, model, cross_entropy, batch, threat,
        num_classes=data.num_classes, mean=mean, std=std, defense=defense,
    )  # fmt: skip
    found = attack.run(seen, rng).inputs
    # A line-up of bright pictures: that the unit fires for one is known without looking.
    others = data.batch(order[BATCH:]).inputs
    others = others[others.flatten(1).mean(1).topk(LINE_UP - 1).indices]
    gallery = to_pixels(torch.cat([batch.inputs[brightest][None], others]), mean, std)
    bright = others.mean(0, keepdim=True)
    ranks = [
        float(
            identification_rank(to_pixels(x, mean, std).clamp(0, 1), torch.tensor([0]), gallery, ("mse", "ssim"))[
                "best"
            ]
        )
        for x in (found if len(found) else bright, bright)
    ]
    return refused, ranks[0], ranks[1]


def main() -> None:
    uploads = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    data, rows = load("photos"), []
    heads = ["units", "lit", "alive", "leads", "refused", *RELEASES, "blind"]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for hidden in (256, 1024):
        for shares in SETTINGS:
            tries = {r: [one(data, hidden, shares, r, seed) for seed in range(uploads)] for r in RELEASES}
            hit = {r: sum(rank == 1 for _, rank, _ in found) for r, found in tries.items()}
            refused, blind = (sum(v) for v in zip(*((t[0], t[2] == 1) for t in tries["none"]), strict=True))
            setting = dict(zip(("hidden", "lit", "alive", "lead"), (hidden, *shares), strict=True))
            rows.append({**setting, "refused": refused, "identified": hit, "blind": blind})
            lit, alive, lead = shares
            found = [f"{n / uploads:.0%}" for n in (*hit.values(), blind)]
            print(
                "| "
                + " | ".join([f"{hidden} | {lit:.1%} | {alive:.0%} | {lead:g} | {refused} of {uploads}", *found])
                + " |"
            )
    command = f"python examples/own_layer.py {uploads}"
    record.write_json(OUT, {"command": command, "uploads": uploads, "rows": rows, "environment": record.environment()})


if __name__ == "__main__":
    main()
