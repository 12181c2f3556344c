"""From the settings of an audit to the objects they name."""

import dataclasses
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from .. import data, models
from ..attacks import ATTACKS
from ..core import Attack, Defense, LossFn, Tensors
from ..data import Dataset, Split
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..generator import load_generator
from ..spec import build, to_text
from ..training import Checkpoint, load_checkpoint
from ..training.feed import shards
from ..training.job import pick_device
from .plan import DEFAULT_DEFENSES, Plan, Subject, default_attacks
from .verdict import BASELINE

RECORDED = "cifar10"  # what the generator that comes along paints
AS_LISTED = "photos"  # its first pictures are of different classes already, and in a known order


def subject(
    plan: Plan,
    *,
    model: nn.Module | None = None,
    dataset: Dataset | None = None,
    defenses: Mapping[str, Defense] | None = None,
    attacks: Mapping[str, Attack] | None = None,
    loss_fn: LossFn = nn.functional.cross_entropy,
    prior: nn.Module | None = None,
) -> Subject:
    """Return what the plan names; parts that are passed take the place of those it names."""
    saved = load_checkpoint(plan.checkpoint) if plan.checkpoint else None
    if saved is not None and plan.client >= len(saved.users):
        raise ConfigError(f"client must be below {len(saved.users)}, the users of the checkpoint, got {plan.client}")
    device = pick_device(plan.device)
    victims, private, public = _pictures(plan, saved, dataset)
    if model is None:
        name = saved.settings.model if saved else plan.model
        shape, classes = victims.input_shape, victims.num_classes
        model = models.build(name, num_classes=classes, input_shape=shape, seed=plan.seed)
        _load_weights(model, plan, saved)
    wanted = defenses or _named(DEFENSES, plan.defenses or _fallback(saved), "defense")
    wanted = {name: defense.fitted(victims.mean, victims.std) for name, defense in wanted.items()}
    bare = build(DEFENSES, BASELINE, "defense")
    if wanted.get(BASELINE, bare) != bare:
        raise ConfigError(f"{BASELINE!r} is the name of the undefended control: give the defense another")
    prior = prior or _prior(plan, victims)
    tried = dict(attacks or _named(ATTACKS, plan.attacks or default_attacks(prior is not None), "attack"))
    return Subject(
        model=model.to(device),
        loss_fn=loss_fn,
        victims=victims,
        private=private,
        public=public,
        defenses={BASELINE: bare, **wanted},
        attacks=tried,
        device=device,
        residuals=_residuals(plan, saved, wanted, victims),
        run=saved.settings if saved else None,
        run_round=saved.round if saved else None,
        prior=None if prior is None else prior.to(device),
    )


def _prior(plan: Plan, victims: Dataset) -> nn.Module | None:
    """Return a generator of pictures like these, if there is one."""
    if plan.generator:
        return load_generator(plan.generator)
    return load_generator() if victims.name == RECORDED else None


def _fallback(saved: Checkpoint | None) -> tuple[str, ...]:
    return DEFAULT_DEFENSES if saved is None else (BASELINE, saved.settings.defense)


def _named(table: Any, texts: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the objects in `texts`; `name=text` gives one a name of its own for the report."""
    found = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        own = bool(equals) and "(" not in name
        name = name.strip() if own else text
        if name in found:
            raise ConfigError(f"two {kind}s are called {name!r}: give each a name of its own, such as other={text}")
        found[name] = build(table, rest if own else text, kind)
    return found


def _load_weights(model: nn.Module, plan: Plan, saved: Checkpoint | None) -> None:
    if saved is None and not plan.weights:
        return
    try:
        state = saved.model if saved else load_file(plan.weights)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot read the weights {plan.weights}: {error}") from error
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = textwrap.shorten(str(error).partition("\n")[2], 160)
        raise ConfigError(
            f"the weights do not fit the model {plan.model}: {reason} Save model.state_dict() of that model; "
            "a run's checkpoint goes to --checkpoint"
        ) from error


def _residuals(
    plan: Plan, saved: Checkpoint | None, defenses: Mapping[str, Defense], data: Dataset
) -> dict[str, Tensors]:
    """Return the client's saved state for each defense that is the one it trained under."""
    if saved is None:
        return {}
    own = to_text(build(DEFENSES, saved.settings.defense, "defense").fitted(data.mean, data.std))
    return {name: saved.users[plan.client] for name, d in defenses.items() if to_text(d) == own}


def _pictures(plan: Plan, saved: Checkpoint | None, dataset: Dataset | None) -> tuple[Dataset, Dataset, Dataset]:
    """Return victims, the client's other pictures, and public ones: three sets that share no picture."""
    uploads = -(-plan.pictures // plan.batch_size)
    wanted = max(plan.pictures, uploads * plan.batch_size)
    rng = torch.Generator().manual_seed(plan.seed)
    if saved is not None and dataset is None:
        own, rest = _shard(plan, saved)
        victims, others = own, own
    elif dataset is not None:
        victims = others = rest = dataset
    else:
        victims, others = _load(plan, "test"), _load(plan, "train")
        rest = others
    order = torch.arange(len(victims)) if victims.name == AS_LISTED else torch.randperm(len(victims), generator=rng)
    if len(victims) < wanted:
        raise ConfigError(f"{wanted} pictures are to be attacked but {plan.data} has {len(victims)}: ask for fewer")
    chosen, left = order[:wanted], order[wanted:]
    if others is not victims:
        left = torch.randperm(len(others), generator=rng)
    half = len(left) // 2
    if not half:
        raise ConfigError(f"{plan.data} has no pictures left to fill a residual and to guess from: add some")
    private = others.subset(left[:half])
    public = others.subset(left[half:]) if rest is others else rest
    return victims.subset(chosen), private, public


def _load(plan: Plan, split: Split) -> Dataset:
    """Return the data the plan names, with the size and the normalisation of the user's model."""
    found = data.load(plan.data, split=split, size=plan.size or None)
    if not plan.mean:
        return found
    return dataclasses.replace(found, mean=_constants(plan.mean, "mean"), std=_constants(plan.std, "std"))


def _constants(text: str, name: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{name} must be numbers between commas, got {text!r}") from error


def _shard(plan: Plan, saved: Checkpoint) -> tuple[Dataset, Dataset]:
    """Return the client's own pictures of a training run, and everybody's test pictures."""
    settings = saved.settings
    root, size = settings.root or None, settings.size or None
    train = data.load(settings.data, split="train", root=root, size=size)
    parts = shards(train, settings)
    return train.subset(parts[plan.client]), data.load(settings.data, split="test", root=root, size=size)
