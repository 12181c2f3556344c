"""Imports every command module, which registers its commands; the order is the order of `--help`."""

from . import basics, train  # noqa: F401
