"""Soteria: hide the classifier's gradient for the features that say most about the input."""

import math
from collections.abc import Container
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vmap
from torch.nn.functional import one_hot

from .. import check, select
from ..core import Batch, Defense, Grads, Need, State, Step
from ..errors import NeedError
from ..models.inspect import last_linear

_EPSILON = 1e-6  # keeps a feature that is exactly zero from making the score NaN, which would switch the defense off
_ROWS = {"cuda": 2048}  # pictures pushed backwards at once: enough to fill a GPU ...
_CPU_ROWS = 256  # ... and few enough for the caches of a CPU


@dataclass(frozen=True)
class Soteria(Defense):
    """Zero the `prune` share of the classifier's weight columns, those with the smallest ||dr_i/dx|| / |r_i|.

    r is what enters the last linear layer. A small score means that hiding r_i moves the explaining input far at
    little cost. Scores are summed over the batch; as published, a feature that is dead on every picture scores 0 and
    counts among the removed. Needs the model and the batch: one batched backward pass per feature, by far the most
    expensive defense here. `probes` above 0 estimates the scores instead, from so many random directions through the
    batch, each as dear as two forward passes: without bias, and with an error that the sum over the batch evens out.

    Guarantees: exactly that share of columns is zero (rounded down, one column stays), every other tensor is sent bit
    by bit. Does not guarantee privacy: the zero columns are visible, and an attacker who leaves that tensor out of
    its loss works as if there were no defense. A model without a linear classifier is refused, not passed on.

    Compose: first in a Chain, before pruning. Not inside ErrorFeedback: that would send the hidden columns later.

    Reference: Sun et al., "Soteria: Provable Defense Against Privacy Leakage in Federated Learning from
    Representation Perspective".
    """

    prune: float = 0.8
    probes: int = 0

    def __post_init__(self) -> None:
        check.fraction(prune=self.prune)
        check.at_least(0, probes=self.probes)

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"model", "batch"})

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        model, batch = step.require_model(self.key()), step.require_batch(self.key())
        weight, layer = classifier_of(model, tuple(batch.inputs.shape[1:]), grads)
        if self.probes:
            shape = (self.probes, *batch.inputs.shape)
            directions = torch.randn(shape, generator=step.rng, device=step.rng.device).to(batch.inputs)
            scores = estimated_scores(model, layer, batch.inputs, directions)
        else:
            scores = feature_scores(model, layer, batch)
        kept = select.band_mask(scores, *select.band(scores.numel(), 0.0, self.prune))
        sent = torch.where(kept, grads[weight], torch.zeros_like(grads[weight]))
        return {**grads, weight: sent}, state


def classifier_of(model: nn.Module, shape: tuple[int, ...], sent: Container[str]) -> tuple[str, nn.Module]:
    """Return the name of the classifier's weight, which must be among those `sent`, and its layer."""
    name, layer = last_linear(model, shape)
    weight = f"{name}.weight".removeprefix(".")
    if weight not in sent:
        raise NeedError(f"soteria protects the gradient of {weight}, which is not among those sent (frozen?)")
    return weight, layer


def feature_scores(model: nn.Module, classifier: nn.Module, batch: Batch) -> Tensor:
    """Return sum over the batch of ||dr_i/dx|| / (|r_i| + 1e-6), one score per feature entering `classifier`.

    Guarantees: parameters, buffers and `.grad` fields stay as they were.
    """
    inputs = batch.inputs.detach().requires_grad_()
    features = _features(model, classifier, inputs)
    count, wide = features.shape
    chunk = max(_ROWS.get(inputs.device.type, _CPU_ROWS) // max(count, 1), 1)

    def pull_back(row: Tensor) -> Tensor:
        return torch.autograd.grad(features, inputs, row, retain_graph=True)[0]

    norms = []
    for chosen in torch.arange(wide, device=features.device).split(chunk):
        rows = one_hot(chosen, wide).to(features.dtype)[:, None, :].expand(-1, count, -1)
        # Not `is_grads_batched`: that runs convolutions one by one.
        norms.append(torch.linalg.vector_norm(vmap(pull_back)(rows).flatten(2), dim=2))
    return _summed(torch.cat(norms).T, features.detach())


def estimated_scores(model: nn.Module, classifier: nn.Module, inputs: Tensor, directions: Tensor) -> Tensor:
    """Return what `feature_scores` does but for chance, from normal `directions` `[K, *inputs.shape]`.

    Along a normal direction a feature changes by a normal number whose spread is the norm of its derivative; the mean
    of its size is sqrt(2 / pi) of that. BatchNorm in training mode lets a feature depend on the other pictures too:
    they count here with the feature, and in `feature_scores` with the picture.
    """
    # Without autocast: a derivative forwards leaves BatchNorm in another type than the value it belongs to.
    with torch.autocast(inputs.device.type, enabled=False):
        found = [jvp(lambda x: _features(model, classifier, x), (inputs.detach(),), (one,)) for one in directions]
    change = torch.stack([slope.abs() for _, slope, *_ in found]).mean(0)
    return _summed(math.sqrt(math.pi / 2) * change, found[0][0])


def _summed(norms: Tensor, features: Tensor) -> Tensor:
    scores = (norms / (features.abs() + _EPSILON)).sum(0)
    return torch.nan_to_num(scores, nan=0.0)  # a score that cannot be told counts as the most telling


def _features(model: nn.Module, classifier: nn.Module, inputs: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hook = classifier.register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    frozen = {name: p.detach() for name, p in model.named_parameters()}
    # BatchNorm in training mode writes to its buffers: let it write to copies.
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    try:
        with torch.enable_grad():
            functional_call(model, {**frozen, **buffers}, (inputs,))
    finally:
        hook.remove()
    if seen[-1].dim() != 2:
        raise NeedError(f"soteria needs features [N, D] before the classifier, got shape {tuple(seen[-1].shape)}")
    return seen[-1]
