"""Random numbers for what a client hides behind: nobody can search for the seed or compute back from the numbers."""

import hashlib
import math
import secrets
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

TWISTER_WORDS, TWISTER_OFFSET = 624, 24  # of the Mersenne Twister in the state of torch's CPU generator


def system_seed() -> int:
    """Return a seed that nobody can guess or search for."""
    return 1 << 256 | secrets.randbits(256)  # never so small that it counts as an experiment's


class SecretGenerator(torch.Generator):
    """A generator on the CPU that depends on all of `text`, and whose normal numbers come from SHAKE-256.

    torch's own takes 32 bits of a seed, which can be searched through, and its Mersenne Twister is linear: whoever
    sees enough of its numbers, and noise shows most of each, computes the others. The rest of what is drawn from this
    generator (positions, roundings) is still the Twister's, from a state that is derived from all of `text`.
    """

    def __new__(cls, text: bytes) -> Self:
        """Make torch's part on the CPU."""
        return super().__new__(cls)

    def __init__(self, text: bytes) -> None:
        self._key, self._calls = hashlib.sha256(b"normal|" + text).digest(), 0
        words = np.frombuffer(hashlib.shake_256(text).digest(4 * TWISTER_WORDS), np.uint32).astype(np.uint64)
        state = self.manual_seed(int(words[0])).get_state()
        state[TWISTER_OFFSET:][: words.nbytes] = torch.from_numpy(words.view(np.uint8))
        self.set_state(state)

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Return standard normal numbers (Box and Muller's way); the next call returns others."""
        pairs = -(-math.prod(shape) // 2)
        self._calls += 1
        drawn = hashlib.shake_256(self._key + self._calls.to_bytes(8, "little")).digest(8 * pairs)
        uniform = torch.from_numpy(np.frombuffer(drawn, np.uint32).astype(np.float32)).add_(0.5).mul_(2.0**-32)
        radius, angle = uniform[:pairs].log_().mul_(-2).sqrt_(), uniform[pairs:].mul_(2 * math.pi)
        return torch.cat([radius * angle.cos(), radius * angle.sin()])[: math.prod(shape)].view(torch.Size(shape))
