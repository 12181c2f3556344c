"""`gradveil bench codec`: the wire format against the obvious ways to pack a pruned gradient."""

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from torch.nn.functional import cross_entropy

from .. import data, models, wire
from ..core import Grads, Step
from ..defenses import DualPrune, ErrorFeedback, Quantize
from ..gradients import gradient, parameters
from ..record import command, environment, write_json
from . import out
from .bench import bench_app


@dataclass(frozen=True)
class Codec:
    """A way to bytes and back; `decode` also gets the tree it encoded, for names and shapes."""

    name: str
    encode: Callable[[Grads], Any]
    decode: Callable[[Any, Grads], Grads]
    size: Callable[[Any], int] = len


def bitmap_encode(grads: Grads) -> list[bytes]:
    """One flag per entry and the sent values as they are."""
    parts = []
    for g in grads.values():
        flat = g.numpy().reshape(-1)
        sent = flat != 0
        parts += [np.packbits(sent).tobytes(), flat[sent].tobytes()]
    return parts


def bitmap_decode(parts: list[bytes], like: Grads) -> Grads:
    """Undo `bitmap_encode`."""
    grads = {}
    for (name, g), flags, values in zip(like.items(), parts[0::2], parts[1::2], strict=True):
        flat = np.zeros(g.numel(), np.float32)
        flat[np.unpackbits(np.frombuffer(flags, np.uint8), count=g.numel()).view(bool)] = np.frombuffer(
            values, np.float32
        )
        grads[name] = torch.from_numpy(flat).view(g.shape)
    return grads


def zlib_encode(grads: Grads) -> bytes:
    """The dense bytes through zlib at its fastest."""
    return zlib.compress(b"".join(g.numpy().tobytes() for g in grads.values()), level=1)


def zlib_decode(body: bytes, like: Grads) -> Grads:
    """Undo `zlib_encode`."""
    flat = torch.frombuffer(bytearray(zlib.decompress(body)), dtype=torch.float32)
    pieces = flat.split([g.numel() for g in like.values()])
    return {name: piece.view(g.shape) for (name, g), piece in zip(like.items(), pieces, strict=True)}


CODECS = (
    Codec("gradveil", wire.encode, lambda body, like: wire.decode(body, like=like)),
    Codec("numpy packbits + values", bitmap_encode, bitmap_decode, lambda parts: sum(map(len, parts))),
    Codec("zlib, level 1, dense", zlib_encode, zlib_decode),
)


@bench_app.command("codec")
def bench_codec(
    rounds: Annotated[int, typer.Option(help="Rounds of error feedback before the aged gradient.", min=1)] = 4,
    batch: Annotated[int, typer.Option(help="Pictures per gradient.", min=1)] = 8,
    pictures: Annotated[str, typer.Option("--data", help="Any dataset with three channels.")] = "photos",
    repeats: Annotated[int, typer.Option(help="Runs of each; the best one counts.", min=1)] = 5,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    """Size and speed of a dual-pruned ResNet18 gradient (62 tensors, 11.17 M numbers), in time of one core."""
    with _one_thread():
        fresh, aged = _gradients(pictures, batch, rounds)
        coarse, _ = Quantize(4).apply(aged, {}, Step(rng=torch.Generator()))
        cases = {"first round": fresh, f"round {rounds}, residual aged": aged, "the same in 4 bits": coarse}
        results = {case: _measure(grads, repeats) for case, grads in cases.items()}
    for case, grads in cases.items():
        report = wire.size_report(grads, wire.encode(grads))
        results[case]["gradveil"] |= {"floor": report.floor_bytes, "positions": report.positions_bytes}
        table = Table("codec", "bytes", "of dense", "encode MB/s", "decode MB/s", title=case)
        for name, row in results[case].items():
            speeds = [f"{row[speed]:.0f}" for speed in ("encode", "decode")]
            table.add_row(name, f"{row['bytes']:,.0f}", f"{row['ratio']:.4f}", *speeds)
        out.print(table)
        out.print(
            f"paper's accounting {report.paper_ratio:.4f} of dense; positions {report.positions_bytes:,} bytes, their "
            f"entropy {report.floor_bytes:,.0f}; values {report.values_bytes:,}, header {report.header_bytes:,}\n"
        )
    if json_out:
        write_json(json_out, {"results": results, "command": command(), "environment": environment()})


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _gradients(pictures: str, batch: int, rounds: int) -> tuple[Grads, Grads]:
    """Return what dual pruning sends of a ResNet18 in the first round and in the last."""
    source = data.load(pictures, size=32, grey=False)
    model = models.build("resnet18", num_classes=source.num_classes, input_shape=source.input_shape, seed=0)
    defense = ErrorFeedback(DualPrune())
    state = defense.init(parameters(model))
    uploads = []
    for round_ in range(rounds):
        indices = torch.arange(round_ * batch, (round_ + 1) * batch) % len(source)
        grads = gradient(model, cross_entropy, source.batch(indices))
        sent, state = defense.apply(grads, state, Step(rng=torch.Generator(), round=round_))
        uploads.append(sent)
    return uploads[0], uploads[-1]


def _measure(grads: Grads, repeats: int) -> dict[str, dict[str, float]]:
    dense = sum(g.numel() * g.element_size() for g in grads.values())
    rows = {}
    for codec in CODECS:
        body = codec.encode(grads)
        back = codec.decode(body, grads)
        if not all(torch.equal(back[name], g) for name, g in grads.items()):
            raise RuntimeError(f"{codec.name} lost something")
        encode = _best_seconds(partial(codec.encode, grads), repeats)
        decode = _best_seconds(partial(codec.decode, body, grads), repeats)
        size = codec.size(body)
        speeds = {"encode": dense / encode / 1e6, "decode": dense / decode / 1e6}
        rows[codec.name] = {"bytes": float(size), "ratio": size / dense, **speeds}
    return rows


def _best_seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the processor time of the best of `repeats` runs: what one core needs, whatever else the machine does."""
    best = float("inf")
    for _ in range(repeats):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best
