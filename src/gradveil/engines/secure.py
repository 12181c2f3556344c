"""Secure aggregation on aligned masks: the server learns the sum of all clients' vectors and no single one.

In aligned rounds all clients send inside the same positions, so their vectors can be added without being read. Each
entry becomes an integer (`FixedPoint`), and every pair of clients agrees on a secret stream of integers that one of
them adds and the other subtracts, modulo 2^32. In the sum of all clients the streams cancel.

Guarantees: against a server that follows the protocol, one vector alone is uniformly random; the sum is exact. Does not
guarantee: anything if a client drops out (the round is then refused, nobody's vector is opened, and what was sent goes
back into the residuals), nor against a server that hands out keys of its own making, nor that the sum itself is
harmless: attack it with the audit like any other upload.

Flower's own SecAgg+ is not used. Its workflow runs only with the deprecated server API and dense float weights, rounds
outside error feedback, and draws its masks from a Mersenne Twister with a 32-bit seed, which can be searched through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from .. import check
from ..core import Defense, Grads, Masks, State, Step
from ..errors import EngineError, WireError
from .fit import find

Words = NDArray[np.uint32]
FEWEST = 3  # of two clients, each knows the other's vector from the sum


@dataclass(frozen=True)
class FixedPoint(Defense):
    """Round every entry to a multiple of 2^-bits and cut it at `limit`, so that vectors can be added as integers.

    Compose: inside ErrorFeedback, behind the pruning: `ErrorFeedback(Chain(AlignedDualPrune(), FixedPoint()))`. What
    rounding and cutting take away is then sent later.

    >>> FixedPoint(bits=2, limit=1.0).apply({"w": torch.tensor([0.3, -7.0])}, {}, Step(rng=torch.Generator()))[0]
    {'w': tensor([ 0.2500, -1.0000])}
    """

    bits: int = 20
    limit: float = 1.0

    def __post_init__(self) -> None:
        check.at_least(1, bits=self.bits)
        check.positive(limit=self.limit)
        if self.limit * 2.0**self.bits > 2**24:
            raise ValueError(
                f"limit * 2^bits must be at most 2^24 to be exact in float32, got {self.limit}, {self.bits}"
            )

    @property
    def most_clients(self) -> int:
        """How many vectors can be added before a sum of 32 bits overflows."""
        return int((2**31 - 1) // (self.limit * 2**self.bits))

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        grid = 2.0**self.bits
        return {n: (g.clamp(-self.limit, self.limit) * grid).round() / grid for n, g in grads.items()}, state

    def to_words(self, sent: Grads, mask: Masks) -> Words:
        """Return the entries inside the mask as integers modulo 2^32."""
        inside = torch.cat([sent[name][mask[name]] for name in sent]).double() * 2.0**self.bits
        return inside.round().long().cpu().numpy().astype(np.uint32)  # negative numbers wrap round

    def from_sum(self, total: Words, mask: Masks, clients: int) -> Grads:
        """Return the sum of the clients' updates; refuse one that no honest clients could add up to."""
        values = torch.from_numpy(total.view(np.int32).astype(np.int64))
        if values.numel() != sum(int(m.sum()) for m in mask.values()):
            raise WireError(
                f"the sum has {values.numel()} entries, the mask {sum(int(m.sum()) for m in mask.values())}"
            )
        if values.numel() and int(values.abs().max()) > clients * self.limit * 2**self.bits:
            raise WireError("the sum is out of range: a client sent something else than its vector")
        parts = torch.split(values.float() / 2.0**self.bits, [int(m.sum()) for m in mask.values()])
        return {
            n: torch.zeros(m.shape).masked_scatter_(m, part) for (n, m), part in zip(mask.items(), parts, strict=True)
        }


def new_key() -> tuple[bytes, bytes]:
    """Return a fresh (secret, public) pair of keys, good for one round."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    secret = X25519PrivateKey.generate()
    return secret.private_bytes_raw(), secret.public_key().public_bytes_raw()


def public_of(secret: bytes) -> bytes:
    """Return the public key that belongs to a secret one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def blind(words: Words, secret: bytes, keys: Sequence[bytes], about: bytes) -> Words:
    """Return this client's vector with the streams it shares with all others added or subtracted.

    Args:
        words: the vector.
        secret: this client's secret key of the round.
        keys: the public keys of all clients of the round, in an order all of them know.
        about: what the round is; streams of different rounds have nothing in common.
    """
    own = public_of(secret)
    if len(keys) < FEWEST or len(set(keys)) != len(keys) or own not in keys:
        raise EngineError(f"secure aggregation needs {FEWEST} different keys, one of them this client's")
    me = list(keys).index(own)
    out = words.copy()
    for peer, key in enumerate(keys):
        if peer != me:
            stream = _stream(secret, key, about, words.size)
            out = out + stream if me < peer else out - stream  # numpy wraps round at 2^32
    return out


def add_up(vectors: Mapping[Any, Words]) -> Words:
    """Return the sum modulo 2^32; only with the vector of every client does it mean anything."""
    sizes = {vector.size for vector in vectors.values()}
    if len(sizes) != 1:
        raise WireError(f"the clients' vectors have different lengths: {sorted(sizes)}")
    total: Words = np.sum(np.stack(list(vectors.values())), axis=0, dtype=np.uint32)
    return total


def _stream(secret: bytes, key: bytes, about: bytes, count: int) -> Words:
    """Return the integers two clients share: ChaCha20 under a key both derive from X25519."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        common = X25519PrivateKey.from_private_bytes(secret).exchange(X25519PublicKey.from_public_bytes(key))
    except ValueError as error:  # wrong length, or a point made to give a known secret
        raise EngineError(f"a client's public key cannot be used: {error}") from error
    derived = HKDF(SHA256(), 32, salt=None, info=b"gradveil secure sum|" + about).derive(common)
    cipher = Cipher(algorithms.ChaCha20(derived, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * count)), dtype="<u4").astype(np.uint32)


def fixed_point_of(defense: Defense) -> FixedPoint:
    """Return the rounding inside a defense; secure aggregation does not work without."""
    found = find(defense, FixedPoint)
    if found is None:
        raise EngineError(
            f"{defense.key()} does not round to a grid: use ErrorFeedback(Chain(AlignedDualPrune(), FixedPoint()))"
        )
    return found
