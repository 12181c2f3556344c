"""The only way from a client's private batch to an attacker: through the bytes that were sent."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from .core import Batch, Defense, LossFn, Masks, Observation, Payload, ThreatModel
from .gradients import parameters
from .veil import unseal


def observe(
    payload: Payload,
    model: nn.Module,
    loss_fn: LossFn,
    batch: Batch,
    threat: ThreatModel,
    *,
    num_classes: int,
    mean: Sequence[float] = (0.0,),
    std: Sequence[float] = (1.0,),
    defense: Defense | None = None,
    prior: Any = None,
    mask: Masks | None = None,
    local_steps: int = 1,
    local_lr: float | None = None,
    earlier: Sequence[Observation] = (),
) -> Observation:
    """Return what a server with these grants sees of one upload.

    The gradient is decoded from the payload's bytes. Of the batch only its size and the shape of one example pass,
    and the labels if the threat model grants them. The model is a copy the attacker may do with as it likes; without
    `statistics` its BatchNorm running statistics are reset.
    """
    own = copy.deepcopy(model)
    if not threat.statistics:
        for module in own.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.reset_running_stats()
    return Observation(
        grads=unseal(payload, like=parameters(model), within=mask),
        model=own,
        loss_fn=loss_fn,
        input_shape=tuple(batch.inputs.shape[1:]),
        num_examples=payload.num_examples,
        num_classes=num_classes,
        mean=tuple(mean),
        std=tuple(std),
        labels=batch.labels.clone() if threat.labels else None,
        defense=defense if threat.defense else None,
        prior=prior if threat.prior else None,
        local_steps=local_steps,
        local_lr=local_lr,
        round=payload.round,
        earlier=tuple(earlier) if threat.rounds else (),
    )
