"""Read inputs out of the gradient of a first fully connected layer: no optimisation, no label, no prior.

In `z = W x + b` one example gives `dL/dW_i = (dL/db_i) x`: any weight row divided by its bias entry is the input.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core import Attack, Observation, Reconstruction
from ..errors import NeedError
from ..models.inspect import first_layer
from .received import received
from .space import box

FAINT = 1e-6  # a bias entry below this share of the largest is rounding, not signal


@dataclass(frozen=True)
class LinearReadout(Attack):
    """Divide weight rows by their bias entry.

    Guarantees: for one example the exact input, up to rounding. Of a pruned gradient it uses the rows whose bias
    entry arrived and leaves pixels that no such row shows at zero; `LowRankCompletion` also uses the other rows.
    Of a larger batch each row shows a mixture of the examples that excite it: an input comes out exactly where a row
    is excited by one example only, and rows that agree with one another are put first.
    """

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        name, _ = first_linear(seen)
        seen = received(seen)
        weight, bias = seen.grads[f"{name}.weight"].double(), seen.grads[f"{name}.bias"].double()
        alone = seen.num_examples == 1
        return as_inputs(least_squares_row(weight, bias)[None] if alone else separate_rows(weight, bias, seen), seen)


def first_linear(seen: Observation) -> tuple[str, nn.Linear]:
    """Return the name and module of the fully connected layer that sees the input itself."""
    name, layer = first_layer(seen.model, seen.input_shape)
    whole = math.prod(seen.input_shape)
    if not isinstance(layer, nn.Linear) or layer.bias is None or layer.in_features != whole:
        raise NeedError(
            "this attack needs a model whose first layer is nn.Linear with a bias that takes the whole input"
        )
    return name, layer


def least_squares_row(weight: Tensor, bias: Tensor) -> Tensor:
    """Return the x that fits `weight = bias x` best where both were sent, `[N]`; 0 for a column never seen."""
    used = (weight != 0) * bias[:, None]
    return (used * weight).sum(0) / used.square().sum(0).clamp_min(torch.finfo(weight.dtype).tiny)


def separate_rows(weight: Tensor, bias: Tensor, seen: Observation, tolerance: float = 1e-3) -> Tensor:
    """Return up to `num_examples` different inputs among the rows `weight_i / bias_i`, `[R, N]`, likeliest first.

    Two mixtures never agree by chance, so a row that others repeat shows one example alone. Rows that stand alone
    come after, those that stay within the range of pixels first.
    """
    loud = bias.abs() > FAINT * bias.abs().max()
    if not bool(loud.any()):
        return weight.new_zeros(seen.num_examples, weight.shape[1])
    rows, strength = weight[loud] / bias[loud, None], bias[loud].abs()
    low, high = (bound.double().expand(1, *seen.input_shape).reshape(1, -1) for bound in box(seen))
    outside = (rows - rows.clamp(low, high)).norm(dim=1) / rows.norm(dim=1).clamp_min(1e-12)
    alike = torch.cdist(rows, rows) <= tolerance * rows.norm(dim=1)[:, None]
    votes = alike.sum(1).double()
    # One number to sort by: agreement first, then the fit to the range of pixels, then the strength of the signal.
    merit = votes.clamp_max(1e3) * (outside < tolerance) - outside.clamp_max(1.0) + 1e-3 * strength / strength.max()
    picked: list[int] = []
    free = torch.ones_like(loud[loud])
    while len(picked) < seen.num_examples and bool(free.any()):
        best = int(torch.where(free, merit, -math.inf).argmax())
        picked.append(best)
        free &= ~alike[best]
        free[best] = False
    return rows[picked]


def as_inputs(rows: Tensor, seen: Observation, **info: object) -> Reconstruction:
    """Return flat rows as a reconstruction inside the range of pixels."""
    low, high = box(seen)
    inputs = rows.reshape(-1, *seen.input_shape).to(low.dtype)
    return Reconstruction(torch.nan_to_num(inputs).clamp(low, high), info=dict(info))
