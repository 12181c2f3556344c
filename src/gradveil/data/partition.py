"""How the training pictures are shared out among users."""

import numpy as np
import torch
from torch import Tensor

from .. import check


def partition_iid(n: int, users: int, seed: int) -> list[Tensor]:
    """Share out `n` pictures at random, as evenly as can be.

    >>> [len(part) for part in partition_iid(10, 3, seed=0)]
    [4, 3, 3]
    """
    _check(n, users)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return list(torch.tensor_split(order, users))


def partition_dirichlet(labels: Tensor, users: int, alpha: float, seed: int) -> list[Tensor]:
    """Share out pictures so that each class is spread over the users by one draw of Dirichlet(`alpha`).

    A small `alpha` gives each user few classes. Guarantees: every picture goes to one user; no user gets none (one
    that drew nothing takes a picture from whoever has most).
    """
    check.positive(alpha=alpha)
    _check(len(labels), users)
    rng = np.random.default_rng(seed)
    values = labels.cpu().numpy()
    parts: list[list[int]] = [[] for _ in range(users)]
    for label in np.unique(values):
        members = rng.permutation(np.flatnonzero(values == label))
        cuts = (np.cumsum(rng.dirichlet(np.full(users, alpha)))[:-1] * len(members)).astype(int)
        for part, share in zip(parts, np.split(members, cuts), strict=True):
            part.extend(share.tolist())
    for part in parts:
        if not part:
            part.append(max(parts, key=len).pop())
    return [torch.tensor(part)[torch.from_numpy(rng.permutation(len(part)))] for part in parts]


def _check(n: int, users: int) -> None:
    check.at_least(1, users=users)
    if users > n:
        raise ValueError(f"users must be at most the number of pictures, {n}, got {users}")
