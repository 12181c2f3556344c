"""How the loops of selection and wire format are compiled."""

from collections.abc import Callable
from typing import Any

import numba


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile on first use, keeping the machine code on disk where some folder for it can be written.

    numba does not check indices: a compiled loop must bound each of them itself, whatever bytes it is given. Numbers
    are unsigned and 64 bits wide inside the loops, so that no sum or shift wraps.
    """
    try:
        kernel: Callable[..., Any] = numba.njit(nogil=True, error_model="numpy", cache=True)(function)
    except RuntimeError:  # numba found no writable folder: a read-only install without a home
        kernel = numba.njit(nogil=True, error_model="numpy")(function)
    return kernel
