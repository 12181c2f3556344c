"""What a defense costs: bytes from real messages, the paper's count of the same messages, and seconds."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from . import check, models, tree
from .core import Batch, Defense, Grads, Masks
from .defenses import DEFENSES, Soteria
from .gradients import gradient, parameters, per_example_gradient
from .spec import build
from .training.traffic import Traffic, paper_bytes
from .veil import Veil, derive_rng, unseal

MIB = 2**20
LINE_UP = ("none", "soteria", "precode", "topk", "dgp", "adgp")  # the columns of the paper's two cost tables


@dataclass(frozen=True)
class Cost:
    """One defense on one model, per user and round. BatchNorm statistics are not counted, as in the paper."""

    model: str
    defense: str
    users: int
    parameters: int
    up: float  # bytes that really cross
    down: float
    paper_up: float  # bytes the paper would count for the same messages
    paper_down: float
    defense_seconds: float  # median over users and rounds, so that compiling does not count
    encode_seconds: float

    @property
    def mib(self) -> float:
        """Bytes up and down, in MiB."""
        return (self.up + self.down) / MIB

    @property
    def paper_mib(self) -> float:
        """The paper's count, in MiB; `paper.communication_mib` is what it prints."""
        return (self.paper_up + self.paper_down) / MIB


def measure(
    model_name: str,
    defense_name: str,
    *,
    users: int = 10,
    batch_size: int = 32,
    rounds: int = 1,
    device: str = "cpu",
    side: int = 32,
    seed: int = 0,
) -> Cost:
    """Let `users` send and receive for some rounds on a fresh 10-class model, and count.

    Pictures are uniform noise: sizes and times hardly depend on what is learnt. The model is in training mode, as in
    a real round (in evaluation mode a fresh VGG11 has so many dead units that pruning has nothing left to prune);
    for per-example gradients it is not. ResNet18 and VGG11 have the same parameters for pictures of every `side`.
    """
    check.at_least(1, users=users, batch_size=batch_size, rounds=rounds, side=side)
    defense = build(DEFENSES, defense_name, "defense")
    shape = (3, side, side)
    model = defense.prepare_model(models.build(model_name, num_classes=10, input_shape=shape, seed=seed))
    model = model.train("per_example" not in defense.needs).to(device)
    params = parameters(model)
    veils = [Veil(defense, params, seed=seed, client=str(user)) for user in range(users)]
    seen = []
    for round_ in range(rounds):
        rng = derive_rng(seed, "pictures", round_)
        batches = [Batch(*(t.to(device) for t in _pictures(batch_size, shape, rng))) for _ in veils]
        seen.append(_exchange(model, veils, batches))
    times = [pair for one in seen for pair in one.seconds]
    return Cost(
        model=model_name,
        defense=defense_name,
        users=users,
        parameters=sum(p.numel() for p in params.values()),
        up=statistics.fmean(one.wire[0] for one in seen),
        down=statistics.fmean(one.wire[1] for one in seen),
        paper_up=statistics.fmean(one.paper[0] for one in seen),
        paper_down=statistics.fmean(one.paper[1] for one in seen),
        defense_seconds=statistics.median(pair[0] for pair in times),
        encode_seconds=statistics.median(pair[1] for pair in times),
    )


@dataclass(frozen=True)
class _Exchange:
    """One round: bytes (up, down) of a user, counted twice, and seconds (defense, encoding) of every user."""

    wire: tuple[float, float]
    paper: tuple[float, float]
    seconds: list[tuple[float, float]]


def _exchange(model: nn.Module, veils: list[Veil], batches: list[Batch]) -> _Exchange:
    users, like = len(veils), parameters(model)
    mask, proposing = _common_mask(model, veils[0], batches[0])
    payloads, counted, seconds, mean = [], [], [], tree.zeros_like(like)
    for veil, batch in zip(veils, batches, strict=True):
        batch = veil.prepare(model, batch)
        raw = _gradient(veil.defense, model, batch)
        payload = veil.seal(raw, len(batch.labels), model=model, batch=batch, mask=mask)
        sent = unseal(payload, like=like, within=mask)
        mean = {name: mean[name].add(g, alpha=1 / users) for name, g in sent.items()}
        payloads.append(payload)
        counted.append(paper_count(veil.defense, raw, sent, mask))
        # One user in the round proposes the mask: its time is shared out.
        seconds.append((veil.seconds[0] + proposing / users, veil.seconds[1]))
    traffic = Traffic(payloads, mean, mask, statistics={}, model={}, participants=users)
    up, down = zip(*counted, strict=True)
    return _Exchange(traffic.per_user(), (statistics.fmean(up), statistics.fmean(down)), seconds)


def _common_mask(model: nn.Module, veil: Veil, batch: Batch) -> tuple[Masks | None, float]:
    if "mask" not in veil.defense.needs:
        return None, 0.0
    grads = _gradient(veil.defense, model, veil.prepare(model, batch))
    veil.propose(grads)  # the first call of a shape compiles and is not timed
    started = time.perf_counter()
    mask = veil.propose(grads)
    for entry in mask.values():
        bool(entry.any())  # waits for a GPU
    return mask, time.perf_counter() - started


def _gradient(defense: Defense, model: nn.Module, batch: Batch) -> Grads:
    compute = per_example_gradient if "per_example" in defense.needs else gradient
    return compute(model, cross_entropy, batch)


def paper_count(defense: Defense, raw: Grads, sent: Grads, mask: Masks | None) -> tuple[float, float]:
    """Return the bytes (up, down) the paper counts for one message.

    A tensor the defense left alone is dense, zeros and all; in any other, a zero is a pruned entry and costs 1 bit.
    """
    total = sum(g.numel() for g in sent.values())
    if isinstance(defense, Soteria):
        return total * 4 - _soteria_saving(raw, sent), total * 4
    charged = sum(g.numel() if torch.equal(g, raw[name]) else int(g.count_nonzero()) for name, g in sent.items())
    room = None if mask is None else sum(int(m.sum()) for m in mask.values())
    return paper_bytes(charged, total, room)


def _soteria_saving(raw: Grads, sent: Grads) -> float:
    """Return the bytes saved by Soteria as the paper counts them: in the last tensor but one.

    That is the classifier's weight where the classifier has a bias. CNN6 has none: there the paper masked the last
    convolution (73,728 entries, 0.959 MiB) instead of the classifier (32,000, 1.082 MiB). Kept to match its table.
    """
    hidden = [float((g == 0).all(0).float().mean()) for name, g in sent.items() if not torch.equal(g, raw[name])]
    masked = list(sent.values())[-2]
    return 31 / 8 * masked.numel() * max(hidden, default=0.0)


def _pictures(count: int, shape: tuple[int, ...], rng: torch.Generator) -> Iterator[Tensor]:
    yield torch.rand(count, *shape, generator=rng)
    yield torch.randint(10, (count,), generator=rng)
