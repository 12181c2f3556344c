"""Argument checks whose message names the argument, what was expected and what came."""

import math
from numbers import Real


def positive(**values: float) -> None:
    """Raise unless every value is finite and above zero.

    >>> positive(std=0.0)
    Traceback (most recent call last):
    ...
    ValueError: std must be a finite number above 0, got 0.0
    """
    for name, value in values.items():
        if not (isinstance(value, Real) and math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be a finite number above 0, got {value}")


def non_negative(**values: float) -> None:
    """Raise unless every value is finite and at least zero."""
    for name, value in values.items():
        if not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number of at least 0, got {value}")


def fraction(**values: float) -> None:
    """Raise unless every value lies in [0, 1].

    >>> fraction(top=1.5)
    Traceback (most recent call last):
    ...
    ValueError: top must be a share in [0, 1], got 1.5
    """
    for name, value in values.items():
        if not (isinstance(value, Real) and 0.0 <= value <= 1.0):
            raise ValueError(f"{name} must be a share in [0, 1], got {value}")


def at_least(minimum: int, **values: int) -> None:
    """Raise unless every value is a whole number of at least `minimum`."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")


def one_of(choices: tuple[str, ...], **values: str) -> None:
    """Raise unless every value is one of `choices`."""
    for name, value in values.items():
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
