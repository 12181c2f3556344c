"""What a client computes from its batch: a gradient, per-example gradients, or the update of several local steps."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from .core import Batch, Grads, LossFn

WHOLE_PICTURE = 64  # kernel pixels from which a convolution measures a picture rather than an edge


def parameters(model: nn.Module) -> Grads:
    """Return the trainable parameters by name, detached."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def rows_see_inputs(shape: Sequence[int]) -> bool:
    """Say whether each row of a weight sees a whole input, so that its gradient can show one.

    A small kernel's gradient sums over all places and shows no picture.

    >>> rows_see_inputs((256, 3072)), rows_see_inputs((64, 3, 3, 3)), rows_see_inputs((256,))
    (True, False, False)
    """
    return len(shape) == 2 or (len(shape) > 2 and math.prod(shape[2:]) >= WHOLE_PICTURE)


def total_loss(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Tensor:
    """Return the loss, plus the `auxiliary_loss()` of every module that has one (PRECODE's divergence term)."""
    return loss_fn(model(batch.inputs), batch.labels) + auxiliary_loss(model)


def auxiliary_loss(model: nn.Module) -> Tensor | float:
    """Return the loss terms that belong to the model's last forward pass, wherever they sit in it; 0 without any."""
    terms = [getattr(module, "auxiliary_loss", None) for module in model.modules()]
    total: Tensor | float = sum(term() for term in terms if term is not None)
    return total


def gradient(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Grads:
    """Return the gradient of the mean loss; `.grad` fields and parameters stay untouched.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> g = gradient(model, lambda out, _: out.mean(), Batch(torch.ones(3, 2), torch.zeros(3)))
    >>> g["weight"]
    tensor([[1., 1.]])
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    values = torch.autograd.grad(total_loss(model, loss_fn, batch), list(params.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else g.detach()
        for (name, p), g in zip(params.items(), values, strict=True)
    }


def per_example_gradient(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Grads:
    """Return `[N, *shape]` gradients, one per example; BatchNorm in training mode mixes examples and is refused."""
    params = parameters(model)
    buffers = dict(model.named_buffers())
    if model.training and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        raise ValueError("per-example gradients do not exist under BatchNorm in training mode: call model.eval()")

    def loss_of(p: Grads, x: Tensor, y: Tensor) -> Tensor:
        outputs = functional_call(model, {**p, **buffers}, (x[None],))
        return loss_fn(outputs, y[None]) + auxiliary_loss(model)

    out: Grads = vmap(grad(loss_of), in_dims=(None, 0, 0), randomness="different")(params, batch.inputs, batch.labels)
    return {name: g.detach() for name, g in out.items()}


def local_update(model: nn.Module, loss_fn: LossFn, batches: Sequence[Batch], lr: float) -> Grads:
    """Return weights before minus weights after plain SGD over `batches`: a FedAvg client's update.

    The update points where a gradient would, so the same defenses and the same server step apply. Parameters are
    restored; BatchNorm buffers move as in any training step.
    """
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    named = dict(model.named_parameters())
    try:
        for batch in batches:
            for name, g in gradient(model, loss_fn, batch).items():
                named[name].data.sub_(g, alpha=lr)
        return {name: before[name] - named[name].detach() for name in before}
    finally:
        for name, value in before.items():
            named[name].data.copy_(value)
