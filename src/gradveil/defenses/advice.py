"""Which defense for which threat; `docs/hardened.md` says what of it is proved and what is only measured."""

from typing import NamedTuple


class Advice(NamedTuple):
    """A threat, the defense against it as text for `build`, and what must stand beside it."""

    threat: str
    defense: str
    beside: str


ADVICE = (
    Advice("honest but curious server, keeps every upload", "hardened", "Veil's default guard"),
    Advice(
        "server that repeats or freezes rounds",
        "hardened(memory=0.98)",
        "Guard.pin(model, repeats=0), and batches drawn anew from many pictures",
    ),
    Advice("malicious model (planted or edited layers)", "hardened", "Guard.pin(model)"),
    Advice(
        "a guarantee for each example",
        "correlated_noise(noise_multiplier=20.0)",
        "correlated_epsilon or epsilon with the run's own figures",
    ),
    Advice("server that sees only the sum", "adgp", "SecureVeilMod with FixedPoint"),
)
