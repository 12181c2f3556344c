"""Keeping memory that was freed, for the next step of the same size."""

import ctypes
import platform

# Parameters of glibc's mallopt.
TRIM_THRESHOLD, MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Have glibc keep what is freed instead of returning it to the system.

    The gradients of one attack step on a large model take gigabytes. Returned after every step, they must be mapped
    and zeroed again page by page, which on a CPU takes longer than the step. Without glibc nothing changes.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_MAX, 0)  # large blocks come from the heap, too
        libc.mallopt(TRIM_THRESHOLD, -1)  # which never shrinks
