"""Imports every command module, which registers its commands; the order is the order of `--help`."""

from . import ats, audit, basics, bench_codec, bench_select, bench_train, cost, flower, gate, train, ui  # noqa: F401
