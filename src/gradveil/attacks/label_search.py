"""Which labels candidates have: the ones granted or read off the gradient, or some searched along with the pictures."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core import Observation
from .imitation import Understanding
from .labels import infer_labels
from .matching_cost import Labels
from .space import device_of


def first_labels(
    joint: bool, views: Sequence[Observation], known: Sequence[Understanding], rngs: Sequence[torch.Generator]
) -> tuple[Labels, list[Tensor]]:
    """Return the labels of all rows, or how they come from a further variable, and where that begins.

    Rows, of which each has its generator, are as many for each upload and in their order. `joint` searches labels even
    where they are known.
    """
    device, each, first = device_of(views[0]), len(rngs) // len(views), views[0]
    if joint:
        shape = (first.num_examples, first.num_classes)
        logits = torch.stack([torch.randn(shape, generator=rng) for rng in rngs]).to(device)
        return (lambda searched: searched.softmax(-1)), [logits]
    each_view = zip(views, known, strict=True)
    read = [infer_labels(v, k) if v.labels is None else v.labels.to(device) for v, k in each_view]
    labels = torch.stack(read).repeat_interleave(each, 0)
    if not labels.is_floating_point() or first.num_examples == 1:
        return labels, []
    # The mean of unknown slopes (see `bypass`): search them from there, in units of their size.
    size = labels.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-30)
    spread = torch.stack([torch.randn(labels.shape[1:], generator=rng) for rng in rngs]).to(device)
    return (lambda searched: searched * size), [labels / size + 0.1 * spread]


def found_labels(
    joint: bool, seen: Observation, known: Understanding, found: Sequence[Tensor], labels: Labels, row: int
) -> Tensor:
    """Return the labels to report for an upload whose best candidate is this row of the variables found."""
    if joint:
        return found[1][row].argmax(-1)
    if seen.labels is not None:
        return seen.labels
    plain = isinstance(labels, Tensor) and not labels.is_floating_point()
    return labels[row] if plain and isinstance(labels, Tensor) else infer_labels(seen, known)
