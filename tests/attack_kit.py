"""Small clients under attack, for the tests of the attacks."""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil import data, gate, metrics, models
from gradveil.core import Attack, Batch, Defense, Observation, ThreatModel
from gradveil.defenses import Identity
from gradveil.gradients import local_update, parameters
from gradveil.veil import Veil

PHOTOS = data.load("photos", split="test", size=16)


def model(name: str = "lenet", seed: int = 0) -> nn.Module:
    shape, classes = PHOTOS.input_shape, PHOTOS.num_classes
    return models.build(name, num_classes=classes, input_shape=shape, seed=seed).eval()


def batch(first: int = 0, count: int = 1) -> Batch:
    return PHOTOS.batch(range(first, first + count))


def uploads(net: nn.Module, batches: list[Batch], defense: Defense | None = None, **granted: bool) -> list[Observation]:
    """Return what a server sees of clients with one batch each, in their first round."""
    defense = defense or Identity()
    out = []
    for i, one in enumerate(batches):
        payload = Veil(defense, parameters(net), seed=i, guard=None).protect(net, cross_entropy, one)
        out.append(observe(payload, net, one, defense, **granted))
    return out


def observe(payload, net, one, defense, earlier=(), local_steps=1, local_lr=None, **granted) -> Observation:  # type: ignore[no-untyped-def]
    threat = ThreatModel(**{"labels": True, **granted})
    facts = {"num_classes": PHOTOS.num_classes, "mean": PHOTOS.mean, "std": PHOTOS.std, "defense": defense}
    facts |= {"earlier": earlier, "local_steps": local_steps, "local_lr": local_lr}
    return gate.observe(payload, net, cross_entropy, one, threat, **facts)


def rounds(net: nn.Module, batches: list[Batch], defense: Defense, lr: float = 0.01) -> Observation:
    """Return the last upload of one client that sends a batch per round while the server trains."""
    net = copy.deepcopy(net)
    veil = Veil(defense, parameters(net), seed=0)
    earlier: list[Observation] = []
    for one in batches:
        payload = veil.protect(net, cross_entropy, one)
        seen = observe(payload, net, one, defense, earlier, rounds=True)
        earlier.append(replace(seen, earlier=()))
        with torch.no_grad():
            for name, p in net.named_parameters():
                p.sub_(seen.grads[name], alpha=lr)
    return seen


def fedavg(net: nn.Module, one: Batch, steps: int, lr: float) -> Observation:
    update = local_update(copy.deepcopy(net), cross_entropy, [one] * steps, lr)
    payload = Veil(Identity(), parameters(net), seed=0).seal(update, len(one.labels))
    return observe(payload, net, one, Identity(), local_steps=steps, local_lr=lr)


def rngs(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(i) for i in range(count)]


def ssim(attack: Attack, seen: list[Observation], batches: list[Batch]) -> float:
    """Return the mean similarity of what the attack finds, after the best pairing within each upload."""
    found = attack.run_many(seen, rngs(len(seen)))
    scores: list[Tensor] = []
    for guess, one in zip(found, batches, strict=True):
        truth = data.to_pixels(one.inputs, PHOTOS.mean, PHOTOS.std)
        pixels = data.to_pixels(guess.inputs, PHOTOS.mean, PHOTOS.std)
        scores.append(metrics.ssim(metrics.aligned(pixels, metrics.pair(pixels, truth)), truth))
    return float(torch.cat(scores).mean())
