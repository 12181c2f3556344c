"""Which pictures a cell is about: those attacked, those the clients have besides, and those anybody has."""

from functools import lru_cache

import torch

from .. import data as datasets
from ..data import Dataset, Split
from ..errors import ConfigError
from ..veil import derive_rng
from .cells import AttackCell

OTHERS = 512  # public and private pictures each


@lru_cache(maxsize=4)
def load_split(name: str, split: Split, root: str | None) -> Dataset:
    """Return a split; many cells in a row use the same one."""
    return datasets.load(name, split=split, root=root)


def victims(cell: AttackCell, root: str | None) -> tuple[Dataset, list[int]]:
    """Return the test pictures and which of them are attacked, in batches one after the other.

    Batches hold different labels as far as they can, as in the reference attacks, or one label if the cell says so.
    """
    data = load_split(cell.data, "test", root)
    if len(data) < cell.pictures:
        raise ConfigError(f"{cell.pictures} pictures are to be attacked but {cell.data} has {len(data)}")
    rng = derive_rng(cell.seed, "victims", 0)
    order = torch.randperm(len(data), generator=rng).tolist()
    if cell.batch_size == 1:
        return data, order[: cell.pictures]
    batches: list[list[int]] = [[] for _ in range(cell.pictures // cell.batch_size)]
    left = []
    for index in order:
        label = int(data.labels[index])
        for group in batches:
            inside = {int(data.labels[i]) for i in group}
            if len(group) < cell.batch_size and (inside <= {label} if cell.one_label else label not in inside):
                group.append(index)
                break
        else:
            left.append(index)
    for group in batches:  # more pictures in a batch than there are classes
        while len(group) < cell.batch_size:
            group.append(left.pop(0))
    return data, [index for group in batches for index in group]


def others(cell: AttackCell, root: str | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which training pictures the clients have besides, and which are public."""
    count = len(load_split(cell.data, "train", root))
    half = min(OTHERS, count // 2)
    order = torch.randperm(count, generator=derive_rng(cell.seed, "others", 0))[: 2 * half].tolist()
    return tuple(order[:half]), tuple(order[half:])


def groups(cell: AttackCell, chosen: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the pictures of each upload."""
    return tuple(tuple(chosen[i : i + cell.batch_size]) for i in range(0, len(chosen), cell.batch_size))
