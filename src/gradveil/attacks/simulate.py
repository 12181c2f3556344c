"""The attacker's own client: what it would have sent for each of many candidate batches."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from ..capture import full_precision
from ..core import Batch, Grads, LossFn, Observation
from ..errors import NeedError
from ..gradients import auxiliary_loss, gradient, parameters
from .layers import Layered, UnsupportedError
from .normalise import in_plain_arithmetic
from .objectives import statistics_gap

log = logging.getLogger(__name__)

# x [N, B, ...], y [N, B] or soft [N, B, C] -> updates [N, P], and BatchNorm gaps [N] if asked for
Simulator = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]

AGREE = 1e-3  # relative difference up to which two ways of computing one gradient count as equal


def simulator(seen: Observation, *, statistics: bool = False, split: bool = False) -> Simulator:
    """Return the fastest simulator that is right for this client.

    Layer rules serve single-step clients whose examples do not mix; they are checked once against plain autograd.
    Everything else (BatchNorm in training mode, unusual layers, several local steps) goes through vmap. `split` says
    that every local step used its own share of the examples in turn, instead of all of them.
    """
    names = list(seen.grads)
    if seen.local_steps == 1:
        try:
            fast = Layered(seen.model, seen.loss_fn, names, statistics)
            with full_precision():
                _check(fast, seen)
            return fast if seen.local_lr is None else _times(seen.local_lr, fast)
        except UnsupportedError as reason:
            log.info("layer rules do not apply (%s): using vmap", reason)
    return Vmapped(seen, statistics, split)


def _times(lr: float, simulate: Simulator) -> Simulator:
    """Return the updates of one local step for a simulator of gradients."""

    def update(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        gradients, gap = simulate(x, y)
        return lr * gradients, gap

    return update


def _check(fast: Layered, seen: Observation) -> None:
    """Raise `UnsupportedError` unless the rules agree with autograd on one random batch amid others."""
    device = next(iter(seen.grads.values())).device
    rng = torch.Generator().manual_seed(0)
    x = torch.rand(2, seen.num_examples, *seen.input_shape, generator=rng).to(device)
    y = torch.randint(seen.num_classes, (2, seen.num_examples), generator=rng).to(device)
    if seen.labels is not None and seen.labels.is_floating_point():
        y = torch.stack([seen.labels.to(device)] * 2)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        mine = fast(x, y)[0][0].detach()
    right = gradient(copy.deepcopy(seen.model), seen.loss_fn, Batch(x[0], y[0]))
    flat = torch.cat([right[name].flatten() for name in fast.names])
    if not bool(torch.linalg.vector_norm(mine - flat) <= AGREE * torch.linalg.vector_norm(flat)):
        raise UnsupportedError("they disagree with autograd on this model")


class Vmapped:
    """The general simulator: `torch.func` over whole clients, several local steps and batch statistics included."""

    def __init__(self, seen: Observation, statistics: bool, split: bool) -> None:
        if seen.local_steps > 1 and seen.local_lr is None:
            raise NeedError("an update of several local steps needs local_lr in the observation")
        if split and seen.num_examples % seen.local_steps:
            raise NeedError(f"{seen.num_examples} examples cannot be split over {seen.local_steps} local steps")
        self.model = copy.deepcopy(seen.model)
        self.statistics = _Statistics(self.model) if statistics else None
        in_plain_arithmetic(self.model)
        self.params = {name: parameters(seen.model)[name] for name in seen.grads}
        self.loss_fn: LossFn = seen.loss_fn
        self.steps, self.split = seen.local_steps, split
        self.lr = 1.0 if seen.local_lr is None else seen.local_lr  # None: the gradient itself was sent

    def __call__(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return `[N, P]` updates of candidates `x [N, B, ...]`, and `[N]` BatchNorm gaps if asked for."""
        update, gap = vmap(self._client, randomness="different")(x, y)
        return update, gap if self.statistics else None

    def _client(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if self.steps == 1:
            g, gap = self._gradient(self.params, x, y)
            return self.lr * torch.cat([t.flatten() for t in g.values()]), gap
        params, gaps = self.params, []
        shares = zip(x.chunk(self.steps), y.chunk(self.steps), strict=True) if self.split else [(x, y)] * self.steps
        for x_now, y_now in shares:
            g, gap = self._gradient(params, x_now, y_now)
            params = {name: p - self.lr * g[name] for name, p in params.items()}
            gaps.append(gap)
        return torch.cat([(self.params[name] - p).flatten() for name, p in params.items()]), torch.stack(gaps).mean()

    def _gradient(self, params: Grads, x: Tensor, y: Tensor) -> tuple[Grads, Tensor]:
        def loss_of(p: Grads) -> tuple[Tensor, Tensor]:
            loss = self.loss_fn(functional_call(self.model, p, (x,)), y) + auxiliary_loss(self.model)
            return loss, loss.new_zeros(()) if self.statistics is None else self.statistics.gap()

        out: tuple[Grads, Tensor] = grad(loss_of, has_aux=True)(params)
        return out


class _Statistics:
    """Collects how far each BatchNorm layer's input is from the layer's running statistics."""

    def __init__(self, model: nn.Module) -> None:
        self.gaps: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, _BatchNorm) and module.running_mean is not None and module.running_var is not None:
                module.register_forward_pre_hook(self._hook(module.running_mean.clone(), module.running_var.clone()))

    def _hook(self, mean: Tensor, var: Tensor) -> Callable[[nn.Module, Any], None]:
        def hook(module: nn.Module, args: Any) -> None:
            self.gaps.append(statistics_gap(args[0][None], mean, var)[0])

        return hook

    def gap(self) -> Tensor:
        """Return the sum over the layers of the last forward pass."""
        if not self.gaps:
            raise NeedError("the BatchNorm term needs a model with BatchNorm statistics: set bn=0")
        total = torch.stack(self.gaps).sum()
        self.gaps = []
        return total
