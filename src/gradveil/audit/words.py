"""Numbers and names as people read them."""

import math
from collections.abc import Sequence

from .verdict import BASELINE

COLUMN_NAMES = {"diagnostic": "worst case", "realistic": "everyday case"}
COLUMN_WORDS = {
    "diagnostic": "Worst case: one picture per upload, evaluation mode, labels known.",
    "realistic": "Everyday case: a batch of pictures, training mode, labels unknown.",
}
GUESS_WORDS = {
    "grey": "plain grey",
    "mean_image": "the mean of public pictures",
    "random_picture": "a random public picture",
}
METRIC_WORDS = {
    "ssim": "structural similarity, 1 = identical",
    "psnr": "peak signal-to-noise ratio in dB, higher = closer",
    "mse": "mean squared pixel error, 0 = identical",
    "lpips": "learned perceptual distance, 0 = identical",
}


def label(defense: str) -> str:
    """Return how a defense is called in running text."""
    return "no defense" if defense == BASELINE else defense


def printable(text: str) -> str:
    """Return a text of the other side so that a terminal shows it instead of obeying it.

    >>> printable("conv\\x1b[2J")
    'conv\\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def number(value: float | None, digits: int = 2) -> str:
    """Return a number for people; a dash where there is none.

    >>> number(0.1234), number(-0.001), number(None)
    ('0.12', '0.00', '–')
    """
    return "–" if value is None or not math.isfinite(value) else f"{value:z.{digits}f}"


def percent(share: float | None) -> str:
    """Return a share for people; a small share never reads as zero.

    >>> percent(0.2), percent(0.0004), percent(0.0)
    ('20 %', '0.04 %', '0 %')
    """
    if share is None or not math.isfinite(share):
        return "–"
    value = 100 * share
    digits = 0 if value >= 10 or value == 0 else 1 if value >= 1 else 2
    return f"{value:.{digits}f} %"


def size(count: float) -> str:
    """Return a number of bytes for people.

    >>> size(999), size(12_345), size(44_695_848)
    ('999 B', '12.3 kB', '44.7 MB')
    """
    for unit, scale in (("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Return a time for people.

    >>> duration(0.25), duration(48), duration(150)
    ('0.2 s', '48 s', '2 min 30 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def listed(names: Sequence[str], last: str = "and") -> str:
    """Return names as a phrase.

    >>> listed(["a"]), listed(["a", "b", "c"]), listed(["a", "b"], "or")
    ('a', 'a, b and c', 'a or b')
    """
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else "nothing"
