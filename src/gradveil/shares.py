"""How much of a gradient single examples make up, found in the backward pass that computes it.

A layer's weight gradient is the sum, over examples and places, of the slope at its output times what came in. Keeping
both until the pass is over gives every example's share in the gradient that is sent, for little more than the gradient
itself; its length is found without building it where the layer has few places. A `Watch` does so in any training loop;
`gradient_and_shares` looks at models with other layers one example after the other.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from .core import Batch, Grads, LossFn, Tensors
from .errors import NeedError
from .gradients import gradient, parameters

CANCELS = 0.02  # of what random signs would leave of a sum: half precision stays below
TOLERANCE = 0.05  # of what random signs would leave: half precision stays below, another use of a weight does not


class Factors(NamedTuple):
    """Every example's share in a weight's gradient, as what it is the product of; summed over the third axis."""

    slopes: Tensor  # [examples, groups, places, outputs]
    inputs: Tensor  # [examples, groups, places, inputs]


Shares = Factors | Tensor  # a tensor holds the shares themselves, [examples, *shape]
Parts = dict[str, Shares | None]  # of a layer's parameters, by their own names; None where all shares cancel


@dataclass
class _Call:
    """What passed through a layer."""

    inputs: Tensor
    slopes: list[Tensor] = field(default_factory=list)  # at its output, once the backward pass has come by


@dataclass
class _Pass:
    """One pass through the model."""

    examples: int
    mixed: bool  # by BatchNorm
    calls: dict[nn.Module, list[_Call]] = field(default_factory=dict)

    @property
    def went_back(self) -> bool:
        """Whether there was a backward pass as well."""
        return any(call.slopes for calls in self.calls.values() for call in calls)


@dataclass
class _Tally:
    """What passes brought to the gradient of one tensor: the longest share, and their sum along a random direction."""

    along: tuple[Tensor, ...]  # the direction, or the two it is the product of
    longest: Tensor
    sum: Tensor
    square: Tensor  # of the values that make up the sum

    def add(self, shares: Shares) -> None:
        """Count the shares of one more pass."""
        self.longest = torch.maximum(self.longest, squares(shares).amax().clamp_min(0).sqrt())
        if isinstance(shares, Factors):  # the products are not built for this
            slopes, inputs = ((t @ side) for t, side in zip(shares, self.along, strict=True))
            seen = slopes * inputs
        else:
            seen = shares * self.along[0]
        self.sum, self.square = self.sum + seen.sum(), self.square + seen.square().sum()

    def adds_up(self, grads: Tensor) -> Tensor:
        """Say whether all shares together are the gradient: a weight may be used in a way no layer shows."""
        if len(self.along) == 2:
            left, right = self.along
            whole = (grads.reshape(-1, len(left), len(right)) @ right @ left).sum()
        else:
            whole = (grads * self.along[0]).sum()
        slack = TOLERANCE * (self.square.sqrt() + whole.abs())
        fits: Tensor = (self.sum - whole).abs() <= slack
        return fits


def gradient_and_shares(model: nn.Module, loss_fn: LossFn, batch: Batch) -> tuple[Grads, Tensors]:
    """Return the gradient of the mean loss and, of each tensor, the RMS of the largest share one example has in it.

    Where BatchNorm mixes examples, an example's share is what passes through its own activations, less what BatchNorm
    makes cancel between examples whatever they are.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> batch = Batch(torch.tensor([[1.0, 1.0], [6.0, 8.0]]), torch.zeros(2))
    >>> gradient_and_shares(model, lambda out, _: out.mean(), batch)
    ({'weight': tensor([[3.5000, 4.5000]])}, {'weight': tensor(3.5355)})
    """
    with Watch(model) as watch:
        grads = gradient(model, loss_fn, batch)
        largest = watch.largest(grads)
    return grads, _one_by_one(model, loss_fn, batch) if largest is None else largest


class Watch:
    """Follows single examples through a model, whatever loop trains it, until it is closed.

    The examples are the rows of the first tensor the model is given. Passes may add up, as with accumulated gradients:
    each is reckoned up when the next begins, so that no more than one is kept. Passes without gradients do not count.
    `examples` tells how many were in what `largest` last answered for.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with Watch(model) as watch:
    ...     for x in (torch.ones(3, 2), torch.tensor([[6.0, 8.0]])):
    ...         model(x).sum().backward()
    ...     watch.largest({"weight": model.weight.grad})
    {'weight': tensor(7.0711)}
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self._hooks = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for module in model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):
                self._hooks.append(module.register_forward_hook(self._keep))
        self.examples = 0
        self._forget()

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take all hooks off the model."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def largest(self, grads: Grads) -> Tensors | None:
        """Return the RMS of the largest share of one example in each tensor of the gradient since the last question.

        None if a layer is not of a kind known here, or if shares do not add up to the gradient.
        """
        with _in_float32(grads):
            self._reckon()
            tallies, cancelled, known, self.examples = self._tallies, self._cancelled, self._known, self._examples
            self._forget()
            if not known or tallies.keys() & cancelled or (tallies.keys() | cancelled) - grads.keys():
                return None
            found: Tensors = {}
            fits = []
            for name, g in grads.items():
                length = torch.linalg.vector_norm(g.float())
                if name in tallies:
                    length = tallies[name].longest
                    fits.append(tallies[name].adds_up(g.float()))
                elif name in cancelled:
                    length = length / self.examples
                else:
                    fits.append(length == 0)
                found[name] = length / math.sqrt(max(g.numel(), 1))
        return found if not fits or bool(torch.stack(fits).all()) else None

    def _forget(self) -> None:
        self._examples = 0  # in passes since the last question
        self._current: _Pass | None = None
        self._tallies: dict[str, _Tally] = {}
        self._cancelled: set[str] = set()  # tensors whose shares all cancel
        self._known = True

    def _begin(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            with torch.no_grad(), _in_float32(dict(model.named_parameters())):
                self._reckon()
            given = next((t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.ndim), torch.empty(0))
            self._current = _Pass(len(given), any(_takes_statistics(m) for m in model.modules()))

    def _keep(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._current is None or not torch.is_grad_enabled():
            return
        call = _Call(args[0].detach() if args and isinstance(args[0], Tensor) else torch.empty(0))
        self._current.calls.setdefault(layer, []).append(call)
        if isinstance(output, Tensor) and output.requires_grad:
            # On the tensor, not on what becomes of it: a ReLU may overwrite it in place.
            output.register_hook(lambda slope: call.slopes.append(slope.detach()))

    def _reckon(self) -> None:
        """Add what the last pass brought."""
        done, self._current = self._current, None
        if done is None or not done.went_back:
            return
        self._examples += done.examples
        met: set[str] = set()
        for module, made in done.calls.items():
            parts = _parts(module, made, done)
            for own, p in module.named_parameters(recurse=False):
                if p.requires_grad:
                    name = self._names[id(p)]
                    self._known &= parts is not None and own in parts and name not in met
                    met.add(name)
                    if parts is not None and own in parts:
                        self._add(name, parts[own])

    def _add(self, name: str, shares: Shares | None) -> None:
        if shares is None:
            self._cancelled.add(name)
            return
        along = _direction(shares)
        tally = self._tallies.setdefault(name, _Tally(along, *torch.zeros(3, device=along[0].device)))
        if [t.shape for t in tally.along] == [t.shape for t in along]:
            tally.add(shares)
        else:  # maps of another size may have called for another way
            self._known = False


def _in_float32(grads: Grads) -> Any:
    """Reckon in float32 where passes may have been in half precision."""
    return torch.autocast(next((g.device.type for g in grads.values()), "cpu"), enabled=False)


def squares(shares: Shares) -> Tensor:
    """Return the squared length of each example's share.

    >>> slopes, inputs = torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 6)
    >>> whole = torch.einsum("ngto,ngti->ngoi", slopes, inputs).square().sum((1, 2, 3))
    >>> torch.allclose(squares(Factors(slopes, inputs)), whole, rtol=1e-4)
    True
    """
    if isinstance(shares, Tensor):
        return shares.flatten(1).square().sum(1)
    slopes, inputs = shares
    if _few(slopes.shape[2], slopes.shape[3], inputs.shape[3]):
        # The length of a sum of products, by the angles between what they are made of.
        return ((slopes @ slopes.mT) * (inputs @ inputs.mT)).sum((1, 2, 3))
    return (slopes.mT @ inputs).square().sum((1, 2, 3))


def _few(places: int, outputs: int, inputs: int) -> bool:
    """Say whether a layer has so few places that products of places cost less than its weight."""
    return places * (outputs + inputs) <= outputs * inputs


def _parts(module: nn.Module, made: list[_Call], whole: _Pass) -> Parts | None:
    """Return what one pass brings to a layer's parameters; None if the layer is not used as it is known here."""
    rule = next((rule for kind, rule in _RULES.items() if isinstance(module, kind)), None)
    if rule is None or len(made) != 1 or len(made[0].slopes) != 1:
        return None
    inputs, slopes = made[0].inputs.float(), made[0].slopes[0].float()
    return rule(module, inputs, slopes, whole.mixed) if len(inputs) == len(slopes) == whole.examples else None


def _direction(shares: Shares) -> tuple[Tensor, ...]:
    """Return the random direction along which shares of this kind are seen, always the same."""
    sizes = [t.shape[3:] for t in shares] if isinstance(shares, Factors) else [shares.shape[1:]]
    rng = torch.Generator(shares[0].device).manual_seed(0)
    return tuple(torch.randn(size, generator=rng, device=rng.device) for size in sizes)


def _one_by_one(model: nn.Module, loss_fn: LossFn, batch: Batch) -> Tensors:
    """Return the largest shares of any model, with the statistics of the batch held fixed where BatchNorm takes them.

    Layers that draw at random draw anew for this.
    """
    model = _with_fixed_statistics(model, batch)
    found = {name: torch.zeros((), device=p.device) for name, p in parameters(model).items()}
    try:
        for x, y in zip(*batch, strict=True):
            for name, g in gradient(model, loss_fn, Batch(x[None], y[None])).items():
                found[name] = torch.maximum(found[name], torch.linalg.vector_norm(g.float()))
    except Exception as error:
        raise NeedError(
            f"the gradients of single examples cannot be computed ({error!r}): the model or its loss needs "
            "whole batches. hardened(balance=0) does without, and bounds what a batch gives away, not one example of it"
        ) from error
    entries = {name: max(p.numel(), 1) for name, p in parameters(model).items()}
    return {name: most / len(batch.labels) / math.sqrt(entries[name]) for name, most in found.items()}


def _with_fixed_statistics(model: nn.Module, batch: Batch) -> nn.Module:
    """Return the model, or a copy whose BatchNorm layers hold the statistics of this batch if they would take them."""
    if not any(_takes_statistics(m) for m in model.modules()):
        return model
    fixed = copy.deepcopy(model)
    with torch.no_grad():
        for module in fixed.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = 1.0  # what they remember is then the last batch
        fixed(batch.inputs)
    return fixed.eval()


# What a layer's parts of a gradient are made of, by its kind: of what came in and the slopes at its output.


def _linear(layer: nn.Linear, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    a, b = (t.reshape(len(t), 1, -1, t.shape[-1]) for t in (inputs, slopes))
    if mixed and _cancel(b, (0, 1, 2)):
        return {"weight": Factors(b, a - a.mean((0, 2), keepdim=True)), "bias": None}
    return {"weight": Factors(b, a), "bias": b.sum((1, 2))}


def _convolution(layer: nn.Conv2d, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts | None:
    if isinstance(layer.padding, str) or layer.padding_mode != "zeros":
        return None
    shape, bias, places = layer.weight.shape, slopes.sum((2, 3)), slopes.shape[2:].numel()
    cancel = mixed and _cancel(slopes, (0, 2, 3))
    if _few(places, shape[0] // layer.groups, shape[1:].numel()):
        patches = F.unfold(inputs, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
        a, b = (t.reshape(len(t), layer.groups, -1, places).mT for t in (patches, slopes))
        a = a - a.mean((0, 2), keepdim=True) if cancel else a
        return {"weight": Factors(b, a), "bias": None if cancel else bias}
    how = (layer.stride, layer.padding, layer.dilation, layer.groups)
    pairs = zip(inputs.split(1), slopes.split(1), strict=True)
    weight = torch.stack([conv2d_weight(a, shape, b, *how) for a, b in pairs])
    if cancel:
        typical = conv2d_weight(inputs, shape, torch.ones_like(slopes), *how) / (len(inputs) * places)
        weight -= bias[:, :, None, None, None] * typical
    return {"weight": weight, "bias": None if cancel else bias}


def _takes_statistics(layer: nn.Module) -> bool:
    """Say whether it is a BatchNorm that normalises by the batch at hand, and so mixes examples."""
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and (layer.training or layer.running_mean is None)


def _cancel(slopes: Tensor, over: tuple[int, ...]) -> bool:
    """Say whether the slopes at each output sum to zero: where examples are mixed, BatchNorm comes next.

    It subtracts whatever is common to all inputs. So that part of them, and a bias, is in no gradient, only in shares
    that cancel, and counting it would have the noise follow nothing.
    """
    return bool((slopes.sum(over).abs() <= CANCELS * torch.linalg.vector_norm(slopes, dim=over)).all())


def _channels(normal: Tensor, slopes: Tensor) -> Parts:
    return {name: t.reshape(*t.shape[:2], -1).sum(2) for name, t in (("weight", slopes * normal), ("bias", slopes))}


def _batch_norm(layer: nn.modules.batchnorm._BatchNorm, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    taken = _takes_statistics(layer)
    mean, var = (None, None) if taken else (layer.running_mean, layer.running_var)
    return _channels(F.batch_norm(inputs, mean, var, training=taken, eps=layer.eps), slopes)


def _group_norm(layer: nn.GroupNorm, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    return _channels(F.group_norm(inputs, layer.num_groups, eps=layer.eps), slopes)


def _layer_norm(layer: nn.LayerNorm, inputs: Tensor, slopes: Tensor, mixed: bool) -> Parts:
    normal = F.layer_norm(inputs, layer.normalized_shape, eps=layer.eps)
    shape = layer.normalized_shape
    return {n: t.reshape(len(t), -1, *shape).sum(1) for n, t in (("weight", slopes * normal), ("bias", slopes))}


_RULES: dict[type[nn.Module], Callable[..., Parts | None]] = {
    nn.Linear: _linear,
    nn.Conv2d: _convolution,
    nn.modules.batchnorm._BatchNorm: _batch_norm,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
