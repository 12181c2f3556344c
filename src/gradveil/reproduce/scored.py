"""The result of an attack cell: every picture scored, beside what a guess that never looks at the gradient scores."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import metrics, tree
from ..audit.clients import Sent
from ..core import Reconstruction
from ..data import Dataset, to_pixels
from ..spec import to_text
from ..veil import derive_rng
from .attacked import Case, Place
from .cells import AttackCell, definition
from .pictures import groups, load_split, others
from .store import save_strip

LINE_UP = 100  # pictures among which a reconstruction must be nearest to its original
COPY = 1e-4  # mean squared error (40 dB) below which a reconstruction is the picture itself
GREEN = (0.2, 0.7, 0.3)


def report(case: Case, found: Sequence[Reconstruction], place: Place, strip: Path) -> dict[str, Any]:
    """Return the result of a cell; the strip of reconstructions is written to `strip`."""
    cell, data, sent, root = case.cell, case.data, case.sent, place.root
    line_up = _pixels(case.public, LINE_UP - 1, place.device)
    save_strip(strip, torch.cat([_tiles(s, f, data) for s, f in zip(sent, found, strict=True)]))
    blind = (groups(cell, case.chosen), others(cell, root)[1], cell.seed, str(place.device))
    return {
        "definition": definition(cell),
        "digests": {"test": data.digest} | ({"train": _train_digest(cell, root)} if cell.epochs else {}),
        "weights": tree.digest(case.seen[0].model.state_dict()),  # trained again, on a GPU say, they may differ
        "sizes": {"test": len(data), "train": len(load_split(cell.data, "train", root))},
        "attack_used": to_text(case.attack),
        "n": cell.pictures,
        "victims": case.chosen,
        "strip_order": "trained_on",  # older strips are in the order of the originals
        "scores": scores_of(sent, found, data, line_up, transformed=False),
        "transformed_scores": scores_of(sent, found, data, line_up, transformed=True) if _transforms(sent) else None,
        "floor": _floor(cell.data, root, *blind),
        "loss": [f.loss for f in found],
        "distance": [_distance(s) for s in sent],
        "waited": [s.waited for s in sent],
        "bytes_up": sum(s.nbytes for s in sent) / len(sent),
        "bytes_dense": sum(g.numel() * g.element_size() for g in sent[0].grads.values()),
    }


def _train_digest(cell: AttackCell, root: str | None) -> str:
    return load_split(cell.data, "train", root).digest


def scores_of(
    sent: Sequence[Sent],
    found: Sequence[Reconstruction],
    data: Dataset,
    line_up: Tensor | None = None,
    *,
    transformed: bool = False,
) -> dict[str, list[float]]:
    """Return every score of every picture, with a line-up also whether it was identified.

    `transformed` compares with the pictures as the defense changed them.
    """
    cards = []
    for s, f in zip(sent, found, strict=True):
        batch = s.trained_on if transformed else s.batch
        guess = to_pixels(f.inputs.to(batch.inputs), data.mean, data.std)
        truth = to_pixels(batch.inputs, data.mean, data.std)
        labels = {"guess_labels": f.labels, "truth_labels": s.batch.labels}
        cards.append(metrics.score(guess, truth, **labels, gallery=line_up))
    return {name: [v for card in cards for v in card[name]] for name in cards[0]}


@lru_cache(maxsize=16)
def _floor(
    name: str,
    root: str | None,
    uploads: tuple[tuple[int, ...], ...],
    known: tuple[int, ...],
    seed: int,
    where: str,
) -> dict[str, dict[str, float]]:
    """Return the mean scores of guesses that never look at the gradient, upload by upload like the attack's.

    They depend on no attack, defense or model, so that cells in a row share them.
    """
    public = load_split(name, "train", root).pixels(known).to(where)
    columns: dict[str, dict[str, list[float]]] = {}
    for i, group in enumerate(uploads):
        truth = load_split(name, "test", root).pixels(group).to(where)
        blind = metrics.score_floor(truth, public, derive_rng(seed, "floor", i), gallery=public[: LINE_UP - 1])
        for guess, card in blind.items():
            for metric, values in card.items():
                columns.setdefault(guess, {}).setdefault(metric, []).extend(values)
    return {guess: {metric: sum(v) / len(v) for metric, v in card.items()} for guess, card in columns.items()}


def _pixels(data: Dataset, count: int, device: torch.device) -> Tensor:
    return data.pixels(range(min(count, len(data)))).to(device)


def _tiles(sent: Sent, found: Reconstruction, data: Dataset) -> Tensor:
    """Return the guesses in the order of the pictures trained on, for showing: it is these that a gradient knows.
    Copies are left out as green tiles: a result file must not hold pictures of a dataset."""
    guess = to_pixels(found.inputs.to(sent.batch.inputs), data.mean, data.std).nan_to_num(nan=0.5)
    true, used = (to_pixels(batch.inputs, data.mean, data.std) for batch in (sent.batch, sent.trained_on))
    tiles = metrics.aligned(guess, metrics.pair(guess, used))
    copied = torch.minimum(metrics.mse(tiles, true), metrics.mse(tiles, used)) < COPY
    return torch.where(copied.view(-1, 1, 1, 1), tiles.new_tensor(GREEN)[: tiles.shape[1]].view(-1, 1, 1), tiles)


def _transforms(sent: Sequence[Sent]) -> bool:
    return any(not torch.equal(s.trained_on.inputs, s.batch.inputs) for s in sent)


def _distance(sent: Sent) -> float:
    """Return how far what was sent lies from the gradient, in gradient lengths."""
    size = tree.global_norm(sent.grads)
    return tree.global_norm(tree.sub(sent.seen.grads, sent.grads)) / size if size else 0.0
