"""Complete the gradient of a first fully connected layer from the entries that were sent.

The weight gradient of B examples is a sum of B outer products, and with the bias gradient as one more column the
matrix `[dW | db]` has rank B: `sum_n k_n [x_n, 1]`. A fifth of the entries is far more than its few unknowns, so
pruning does not hide it. What stays unknown are inputs so near zero that no row sent them, and zero is a good guess.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import check
from ..core import Attack, Observation, Reconstruction
from .analytic import as_inputs, first_linear, separate_rows
from .completion import complete
from .received import received

SAME = 0.9999  # two directions with a larger cosine are one


@dataclass(frozen=True)
class LowRankCompletion(Attack):
    """Alternating least squares on `[dW | db]` over the entries that arrived, then the linear read-out.

    Guarantees: for one example and a gradient that is exact where sent, the completed matrix is exact on every row
    and column connected by sent entries. A batch on a ReLU layer is taken apart by sparsity, up to about a dozen
    examples. Entries changed by noise or by an old residual break the rank and show in `loss`.

    Reference for the separation by sparsity: Dimitrov et al., "SPEAR: Exact Gradient Inversion of Batches in
    Federated Learning".
    """

    steps: int = 300
    restarts: int = 5
    max_rank: int = 12

    def __post_init__(self) -> None:
        check.at_least(1, steps=self.steps, restarts=self.restarts, max_rank=self.max_rank)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        name, _ = first_linear(seen)
        seen = received(seen)
        weight, bias = seen.grads[f"{name}.weight"].double(), seen.grads[f"{name}.bias"].double()
        joint = torch.cat([weight, bias[:, None]], dim=1)
        rank = min(seen.num_examples, self.max_rank)
        left, right, error = complete(joint, joint != 0, rank, rng, self.steps, self.restarts)
        directions = unmix(left, rng)
        if directions is None:
            full = left @ right.T
            rows = separate_rows(full[:, :-1], full[:, -1], seen)
        else:
            joint_rows = torch.linalg.solve(directions, right.T)
            rows = joint_rows[:, :-1] / joint_rows[:, -1:]
        return as_inputs(rows, seen, rank=rank)._replace(loss=error)


def unmix(left: Tensor, rng: torch.Generator) -> Tensor | None:
    """Return the invertible `[r, r]` matrix Q for which the columns of `left @ Q` are as sparse as a ReLU makes them.

    A ReLU unit sends no gradient for an example that does not excite it, so the true left factor has about half its
    entries at zero. The combination of columns that vanishes on r - 1 random rows vanishes on hundreds more only if
    those units were silent for one example: that combination is this example's column. None if fewer than r are found.
    """
    rank = left.shape[1]
    if rank == 1:
        return torch.eye(1, dtype=left.dtype, device=left.device)
    basis, mixing = torch.linalg.qr(left)
    pivots = mixing.diagonal().abs()
    if not float(pivots.min()) > 1e-12 * float(pivots.max()):
        return None  # fewer examples left a trace than are in the batch
    lengths = basis.norm(dim=1, keepdim=True)
    active = (basis / lengths)[lengths[:, 0] > 1e-6 * lengths.max()]
    kept, counts = [], []
    for _ in range(max(1, 2**rank // 256)):  # 4096 subsets each: about 32 hits per example if half the units are silent
        rows = torch.randint(len(active), (4096, rank - 1), generator=rng, device=rng.device).to(active.device)
        trial = torch.linalg.svd(active[rows], full_matrices=True).Vh[:, -1]
        zeros = ((active @ trial.T).abs() < 1e-4).sum(0)
        sparse = zeros > 0.25 * len(active)
        kept.append(trial[sparse])
        counts.append(zeros[sparse])
    trial, zeros = torch.cat(kept), torch.cat(counts)
    found: list[Tensor] = []
    while len(trial) and len(found) < rank:
        found.append(trial[zeros.argmax()])
        fresh = (trial @ found[-1]).abs() < SAME
        trial, zeros = trial[fresh], zeros[fresh]
    return torch.linalg.solve(mixing, torch.stack(found, dim=1)) if len(found) == rank else None
