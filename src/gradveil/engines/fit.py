"""Which defenses an engine can run: what a defense is made of, what it needs, and where it acts."""

from collections.abc import Iterator
from typing import TypeVar

from ..core import Defense
from ..defenses import ErrorFeedback
from ..errors import NeedError

D = TypeVar("D", bound=Defense)


def parts_of(defense: Defense) -> Iterator[Defense]:
    """Return the operators inside a defense: what wrappers and chains are made of in the end.

    >>> from gradveil import Chain, DualPrune, GaussianNoise
    >>> [part.key() for part in parts_of(Chain(ErrorFeedback(DualPrune()), GaussianNoise()))]
    ['dual_prune', 'gaussian_noise']
    """
    inner = (defense.inner,) if isinstance(defense, ErrorFeedback) else getattr(defense, "parts", ())
    if not inner:
        yield defense
    for part in inner:
        yield from parts_of(part)


def find(defense: Defense, kind: type[D]) -> D | None:
    """Return the first operator of a kind inside a defense."""
    return next((part for part in parts_of(defense) if isinstance(part, kind)), None)


def refuse_unfit(defense: Defense, engine: str, prepared: bool) -> None:
    """Raise `NeedError` for a defense that would protect little or nothing in an engine that sees gradients only.

    `prepared` says that the caller applies `prepare_model` and `prepare_batch` itself.
    """
    hidden = sorted(defense.needs & {"batch", "model", "per_example"})
    if hidden:
        raise NeedError(
            f"{defense.key()} needs {', '.join(hidden)}, but {engine} sees gradients only: "
            "use it through Veil.protect in a loop of your own"
        )
    for part in parts_of(defense):
        elsewhere = [name for name in ("prepare_model", "prepare_batch") if _overrides(part, name)]
        if elsewhere and not prepared:
            raise NeedError(
                f"{part.key()} acts in {elsewhere[0]}, which {engine} never calls: call it yourself "
                "and pass prepared=True"
            )


def refuse_idle(defense: Defense, follow: bool) -> None:
    """Raise `NeedError` where single examples are to be followed for a defense that makes no use of it."""
    if follow and not defense.weighs_examples:
        raise NeedError(
            f"{defense.key()} makes no use of single examples: leave follow=True out, or use Hardened with a balance"
        )


def _overrides(part: Defense, name: str) -> bool:
    return getattr(type(part), name) is not getattr(Defense, name)
