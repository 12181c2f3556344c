"""Which defense for which threat; `docs/hardened.md` says what of it is proved and what is only measured."""

from collections.abc import Mapping
from typing import Any, NamedTuple

PUBLISHED = ("dual_prune", "aligned_dual_prune")
WARNING = "as published does not withstand an attacker who compares only the entries that arrived"


def is_published(spec: Mapping[str, Any]) -> bool:
    """Say whether the description of a defense is that of DGP or ADGP as published, with or without error feedback."""
    inner = spec.get("inner", {}) if spec["name"] == "error_feedback" else spec
    return inner.get("name") in PUBLISHED


def follows_examples(spec: Mapping[str, Any]) -> bool:
    """Say whether the description of a defense is of one whose noise follows single examples, where they are told."""
    if spec["name"] == "hardened":
        return bool(spec.get("balance", 0) > 0 and spec.get("examples", 1) > 1)  # reports of before lack them
    inner = [spec.get("inner"), *spec.get("parts", [])]
    return any(follows_examples(one) for one in inner if isinstance(one, Mapping))


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
