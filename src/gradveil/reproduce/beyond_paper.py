"""What the paper does not ask, as lines of a table: attackers who know the defense, and other settings."""

from collections.abc import Iterator
from typing import Any

from .entry import MODELS, RIVALS, TITLES, Entry
from .scales import ADAPTED, FULL, Scale

ROUNDS = (1, 4)  # every round of every client is really sent, which costs more than the attack
ALPHAS = (0.5, 0.1)
TRAINING = {"mode": "train"}
EASED_DEEP = (0, 10)  # epochs of ResNet18 at which our own schedule is tried: it hardly leads there
SPREAD_MODEL = "cnn6"  # thirteen trainings: ResNet18 takes five times as long


def beyond(scale: Scale, seed: int) -> Iterator[Entry]:
    """What the paper does not ask: attackers who know the defense, and other settings."""
    yield from _adaptive(scale, seed)
    yield from _settings(scale, seed)
    yield from _trainings(scale, seed)


def _adaptive(scale: Scale, seed: int) -> Iterator[Entry]:
    for attack, adapted in ADAPTED.items():
        model = "cnn6" if attack == "rgap" else "resnet18"
        part = f"{TITLES[attack]} by an attacker who knows the defense"
        for defense in (*RIVALS, "adgp", "hardened1"):
            if (attack, defense) in (("rgap", "precode"), ("rgap", "none"), ("gi", "none")):
                continue  # nothing to invert, or nothing to know
            cell = scale.attack(adapted, defense, model, seed=seed)
            yield Entry(part, f"{defense}, {adapted}", cell, transformed=defense == "ats")
    for attack in ADAPTED:
        for defense in ("adgp", "hardened1"):
            cell = scale.attack(attack, defense, "cnn6" if attack == "rgap" else "resnet18", seed=seed)
            yield Entry("ADGP and Hardened under the paper's attackers", f"{defense}, {attack}", cell)
    for model in MODELS[:2] + MODELS[3:]:
        for defense in ("dgp", "hardened1"):
            cell = scale.attack("ig+mask", defense, model, seed=seed)
            yield Entry("Mask-aware IG on the other models", f"{model}, {defense}", cell)
    for attack in ("ig+mask", "gi+mask", "rob+fit"):
        cell = scale.attack(attack, "hardened", seed=seed)
        yield Entry("Hardened, its first upload that is not empty: 32 examples or more in it", attack, cell)
    for model in ("resnet18", "lenet", "cnn6"):
        for defense in ("none", "topk", "dgp", "adgp", "hardened1"):
            cell = scale.attack("ig+eased", defense, model, seed=seed)
            yield Entry("IG by a schedule of our own, told the defense", f"{model}, {defense}", cell)
    part = "GGL where the paper has none: ADGP, and under noise"
    # It depends on no model. Only what goes beyond it comes from the gradient.
    yield Entry(part, "the label alone", scale.attack("ggl+blind", "none", seed=seed))
    yield Entry(part, "resnet18, adgp", scale.attack("ggl", "adgp", seed=seed))
    for model in ("resnet18", "cnn6", "lenet"):
        for defense in ("none", "dp", "hardened1", "hardened"):
            yield Entry(part, f"{model}, {defense}, short", scale.attack("ggl+short", defense, model, seed=seed))
    part = f"GGL for all {FULL.mix} pictures of an upload"
    for model in ("resnet18", "cnn6"):
        tried = [("ggl+blind", "none"), ("ggl+all", "none"), ("ggl+all", "dgp"), ("ggl+all", "hardened")]
        for attack, defense in tried[model != "resnet18" :]:
            label = "the labels alone" if attack == "ggl+blind" else f"{model}, {defense}"
            yield Entry(part, label, scale.attack(attack, defense, model, seed=seed, batch_size=scale.mix))
    for defense in ("topk", "dgp", "adgp"):
        yield Entry("Band-aware IG", defense, scale.attack("ig+band", defense, seed=seed))
    # Made for noise; what only prunes is met by `rob+fit`, whose decoys this one lacks.
    part = "A planted layer of which a quarter fires, all for one picture; the client has no guard"
    for defense in ("outpost", "hardened1"):
        yield Entry(part, defense, scale.attack("spotlight", defense, seed=seed))
    for model in ("resnet18", "lenet", "cnn6"):
        for defense in ("none", "dp", "topk", "dgp", "adgp", "hardened1"):
            cell = scale.attack("ig+coarse", defense, model, seed=seed)
            yield Entry("IG for a coarse picture, 8 by 8", f"{model}, {defense}", cell)


def _settings(scale: Scale, seed: int) -> Iterator[Entry]:
    for model in ("resnet18", "lenet") if scale.name == "full" else ("resnet18",):
        for part, label, attack, defense, fields in _other_settings(scale):
            if fields == TRAINING and model == "lenet":
                continue  # it has no BatchNorm
            if fields.get("in_turn") and scale.name == "full" and model == "resnet18":
                continue  # looked at on LeNet only
            if attack == "ig+eased" and model == "resnet18" and fields["epochs"] not in EASED_DEEP:
                continue
            yield Entry(part, f"{model}, {label}", scale.attack(attack, defense, model, seed=seed, **fields))


def _other_settings(scale: Scale) -> Iterator[tuple[str, str, str, str, dict[str, Any]]]:
    """Yield heading, label, attack, defense and what is not as usual."""
    part = "After some rounds: the residual holds other pictures"
    for rounds in ROUNDS:
        yield part, f"dgp, {rounds} earlier, ig", "ig", "dgp", {"rounds": rounds}
        told = [("ig+mask", defense) for defense in ("topk", "dgp", "adgp", "hardened1")]
        for attack, defense in (*told, ("ig+coarse", "hardened1"), ("ggl+short", "hardened1")):
            yield part, f"{defense}, {rounds} earlier, {attack}", attack, defense, {"rounds": rounds}
    part = "Chained: the attacker follows the client from its first round"
    for defense in ("topk", "dgp", "adgp", "hardened1"):
        yield part, defense, "ig+chain", defense, {"rounds": 1}
    for defense in ("none", "topk", "dgp", "hardened1"):
        for attack in ("ig", "ig+mask"):
            part = "Labels inferred instead of given"
            yield part, f"{defense}, {attack}", attack, defense, {"labels": "inferred"}
    for defense in ("none", "dgp", "hardened1"):
        yield "Clients in training mode: BatchNorm by the batch's own statistics", defense, "ig+mask", defense, TRAINING
    for defense in ("none", "dgp", "adgp", "hardened1"):
        for epochs in (0, *scale.epochs):
            label = f"{defense}, after {epochs} epoch{'' if epochs == 1 else 's'}"
            yield "Trained models", label, "ig+mask", defense, {"epochs": epochs}
            yield "Trained models", f"{label}, ig+eased", "ig+eased", defense, {"epochs": epochs}
        for steps in (2, 4):
            part = "FedAvg: several local steps"
            yield part, f"{defense}, {steps} steps", "ig+mask", defense, {"local_steps": steps}
        fields = {"batch_size": 4, "local_steps": 4, "in_turn": True}
        yield "FedAvg: four local steps, each on a picture of its own", defense, "ig+mask", defense, fields
        part = "A client with one class only, batches of 4"
        yield part, defense, "ig+mask", defense, {"batch_size": 4, "one_label": True}


def _trainings(scale: Scale, seed: int) -> Iterator[Entry]:
    for defense in ("none", "topk", "dgp", "adgp", "hardened"):
        yield Entry("Accuracy of what the paper leaves out", defense, scale.train(defense, seed=seed))
        for alpha in (0.0, *ALPHAS):
            cell = scale.train(defense, SPREAD_MODEL, alpha=alpha, seed=seed)
            label = f"alpha {alpha:g}" if alpha else "same distribution for all"
            yield Entry("Accuracy under Dirichlet partitions", f"{SPREAD_MODEL}, {defense}, {label}", cell)
    for model in ("cnn6", "lenet", "vgg11"):
        for defense in ("topk", "hardened"):
            cell = scale.train(defense, model, seed=seed)
            yield Entry("Accuracy of what the paper leaves out", f"{model}, {defense}", cell)
    for defense in ("none", "dgp", "hardened"):
        cell = scale.train(defense, SPREAD_MODEL, algorithm="fedavg", local_steps=4, seed=seed)
        yield Entry("Accuracy under FedAvg, 4 local steps", f"{SPREAD_MODEL}, {defense}", cell)
