"""Imports every command module, which registers its commands; the order is the order of `--help`."""

from . import (  # noqa: F401
    ats,
    attack,
    audit,
    basics,
    bench_attack,
    bench_codec,
    bench_select,
    bench_train,
    bench_wire,
    cost,
    flower,
    gate,
    generator,
    guard,
    leaderboard,
    reproduce,
    train,
    ui,
)
