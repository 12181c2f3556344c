"""Imports every command module, which registers its commands; the order is the order of `--help`."""

from . import audit, basics, bench_codec, bench_train, cost, gate, train, ui  # noqa: F401
