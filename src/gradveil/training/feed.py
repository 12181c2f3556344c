"""Who trains on which pictures, when, and how they are shifted: a pure function of the seed."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import Batch
from ..data import Dataset, partition_dirichlet, partition_iid
from ..veil import derive_rng
from .settings import Settings

PICTURE, ROW, COLUMN, MIRRORED = range(4)  # the columns of a draw


class Feed:
    """The users' shards and their endless streams of batches.

    A user goes through its shard in an order drawn anew for every pass. Every batch is full: when fewer pictures are
    left than a batch takes, the rest come from the next pass. A shard smaller than the batch is used whole each time.
    Nothing is remembered between calls, so a run continues anywhere.
    """

    def __init__(self, data: Dataset, settings: Settings, device: torch.device) -> None:
        self._seed = settings.seed
        self.shards = shards(data, settings)
        self.sizes = [min(settings.batch_size, len(shard)) for shard in self.shards]
        augment = settings.augment
        if augment == "auto":
            augment = "none" if data.name == "digits" else "crop_flip"
        self.augment = augment
        self._pad = 0 if augment == "none" else max(1, min(data.input_shape[1:]) // 8)
        self._shape = data.input_shape[1:]
        self.picture_entries = math.prod(data.input_shape)
        # Channels last, with a black border: one lookup then cuts the shifted picture out.
        padded = F.pad(data.images, (self._pad,) * 4)
        self._images = padded.permute(0, 2, 3, 1).contiguous().to(device)
        self._labels = data.labels.to(device)
        # pixels / 255, minus the mean, over the deviation, as one multiplication and one addition
        std = torch.tensor(data.std, device=device)
        self._scale = 1 / (255 * std)
        self._shift = -torch.tensor(data.mean, device=device) / std
        self._spans = [torch.arange(length, device=device) for length in self._shape]
        self._passes: dict[int, tuple[int, Tensor]] = {}

    def draw(self, user: int, first: int, steps: int = 1) -> Tensor:
        """Return what the user's batches `first` to `first + steps` hold: `[steps * size, 4]` on the CPU."""
        shard, size = self.shards[user], self.sizes[user]
        start, stop = first * size, (first + steps) * size
        parts = []
        for turn in range(start // len(shard), (stop - 1) // len(shard) + 1):
            offset = turn * len(shard)
            parts.append(self._pass(user, turn)[max(start - offset, 0) : stop - offset])
        return torch.cat(parts)

    def gather(self, draw: Tensor) -> Batch:
        """Return the pictures of a draw that is on the feed's device, as a model takes them."""
        height, width = self._spans
        rows = draw[:, ROW, None] + height
        columns = torch.where(draw[:, MIRRORED, None] == 1, len(width) - 1 - width, width) + draw[:, COLUMN, None]
        pixels = self._images[draw[:, PICTURE, None, None], rows[:, :, None], columns[:, None, :]]
        inputs = torch.addcmul(self._shift, pixels.float(), self._scale).permute(0, 3, 1, 2)
        # A GPU convolves fastest with channels last, a CPU with channels first.
        return Batch(inputs if inputs.is_cuda else inputs.contiguous(), self._labels[draw[:, PICTURE]])

    def batch(self, user: int, step: int) -> Batch:
        """Return one batch of one user."""
        return self.gather(self.draw(user, step).to(self._images.device))

    def _pass(self, user: int, turn: int) -> Tensor:
        known = self._passes.get(user)
        if known is None or known[0] != turn:
            known = self._passes[user] = (turn, self._shuffle(user, turn))
        return known[1]

    def _shuffle(self, user: int, turn: int) -> Tensor:
        shard = self.shards[user]
        rng = derive_rng(self._seed, str(user), turn, "pictures")
        order = shard[torch.randperm(len(shard), generator=rng)]
        shifts = torch.randint(2 * self._pad + 1, (len(shard), 2), generator=rng)
        mirrored = torch.randint(2 if self.augment == "crop_flip" else 1, (len(shard), 1), generator=rng)
        return torch.cat([order[:, None], shifts, mirrored], dim=1)


def shards(data: Dataset, settings: Settings) -> list[Tensor]:
    """Return the pictures of each user."""
    if settings.alpha:
        return partition_dirichlet(data.labels, settings.users, settings.alpha, settings.seed)
    return partition_iid(len(data), settings.users, settings.seed)
