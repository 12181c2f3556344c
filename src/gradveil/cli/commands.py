"""Imports every command module, which registers its commands; the order is the order of `--help`."""

from . import audit, basics, bench_train, cost, gate, train  # noqa: F401
