"""Guesses and uploads as the numbers and pictures of a report."""

import base64
import hashlib
import io
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from .. import metrics, tree
from ..core import Batch, Reconstruction
from ..data import to_pixels
from ..veil import derive_rng
from .clients import Sent
from .plan import Plan, Subject
from .report import Column, Floor, Layer, Upload

Cards = dict[str, dict[str, list[float]]]  # blind guess -> score -> one value per picture
LINE_UP = 64
CONTROLS = 8  # other uploads whose guesses serve as controls, at most
PUBLIC = 512  # public pictures used at most
LARGEST = 0.05  # the share of entries called the largest
SHOWN = ("ssim", "psnr", "mse", "lpips")  # the paper's own SSIM flatters and is left to the benchmarks


def to_png(pixels: Tensor) -> str:
    """Return a picture `[C, H, W]` in 0..1 as base64 PNG."""
    levels = (pixels.detach().cpu().nan_to_num(nan=0.5).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    grey = levels.shape[0] == 1
    handle = io.BytesIO()
    Image.fromarray(levels[0] if grey else np.ascontiguousarray(levels.transpose(1, 2, 0))).save(handle, "PNG")
    return base64.b64encode(handle.getvalue()).decode()


def chance(subject: Subject) -> tuple[int, float]:
    """Return the size of the line-up and how often a guess made blindly is the nearest, at most.

    Every distance may find its own nearest picture, so luck has as many draws as there are distances.
    """
    size = min(LINE_UP, len(subject.public) + 1)
    draws = 3 if metrics.lpips_possible(subject.public.pixels([0])) else 2
    return size, min(draws / size, 1.0)


class Scorer:
    """Compares guesses with the private pictures; blind guesses at the same pictures are scored once and kept."""

    def __init__(self, plan: Plan, subject: Subject) -> None:
        self.seed, self.data = plan.seed, subject.victims
        public = subject.public.pixels(range(min(len(subject.public), PUBLIC)))
        self.public = public.to(subject.device)
        self._blind: dict[tuple[bytes, int], Cards] = {}

    def row(
        self, sent: Sequence[Sent], found: Sequence[Reconstruction], blind: Sequence[Sequence[Reconstruction]] = ()
    ) -> dict[str, Any]:
        """Return the fields of a row: every upload is scored on its own, then the pictures stand in one list.

        `blind` are guesses of the same attacker without the gradient. Only what goes beyond them counts: whoever knows
        the class can paint something like it.
        """
        parts = [self._upload(s, f) for s, f in zip(sent, found, strict=True)]
        losses = [f.loss for f in found if math.isfinite(f.loss)]
        labels = [v for part in parts for v in part["card"].get("label_accuracy", [])]
        names = [name for name in SHOWN if name in parts[0]["card"]]
        guesses, truths = [part["guess"] for part in parts], [part["truth"] for part in parts]
        fields = {
            "scores": {name: [v for part in parts for v in part["card"][name]] for name in names},
            "identified": [bool(v) for part in parts for v in part["card"]["identified"]],
            "floor": _best([part["floor"] for part in parts]),
            "contrast": contrast(guesses, truths),
            "mistaken": self._mistaken(guesses, truths),
            "labels_right": fmean(labels) if labels else None,
            "loss": fmean(losses) if losses else None,
            "pictures": [png for part in parts for png in part["pictures"]],
            "note": parts[0]["note"],
        }
        return fields | (self._beyond(fields, sent, truths, blind) if blind else {})

    def _beyond(
        self,
        fields: dict[str, Any],
        sent: Sequence[Sent],
        truths: Sequence[Tensor],
        blind: Sequence[Sequence[Reconstruction]],
    ) -> dict[str, Any]:
        """Return what blind guesses raise: the floor, and the two controls."""
        drawn = [[self._upload(s, f) for s, f in zip(sent, guesses, strict=True)] for guesses in blind]
        floor = _means([[v for part in draw for v in part["card"]["ssim"]] for draw in drawn])
        named = fmean(float(v) for draw in drawn for part in draw for v in part["card"]["identified"])
        own = _means([contrast([part["guess"] for part in draw], truths) for draw in drawn])
        notes = [fields["note"], "blind guesses are pictures painted from the label alone"]
        return {
            "floor": max(fields["floor"], floor, key=fmean),
            "mistaken": max(fields["mistaken"], named),
            "contrast": [a - b for a, b in zip(fields["contrast"], own, strict=True)],
            "note": "; ".join(note for note in notes if note),
        }

    def floors(self, column: Column, batches: Sequence[Batch]) -> list[Floor]:
        """Return what blind guesses score on the pictures of a column."""
        cards = [self._floor(self._pixels(batch.inputs), len(batch.labels)) for batch in batches]
        names = [name for name in SHOWN if name in cards[0]["grey"]]
        return [
            Floor(column, guess, {name: [v for card in cards for v in card[guess][name]] for name in names})
            for guess in cards[0]
        ]

    def _mistaken(self, guesses: Sequence[Tensor], truths: Sequence[Tensor]) -> float:
        """Return how often guesses made for other uploads pick an upload's picture out of the line-up.

        Noise looks more like some pictures than like others; without this control such a picture counts as found.
        """
        hits = []
        for u, truth in enumerate(truths):
            gallery = torch.cat([truth, self.public[: max(LINE_UP - len(truth), 1)]])
            for guess in [g for v, g in enumerate(guesses) if v != u][:CONTROLS]:
                paired = metrics.aligned(guess, metrics.pair(guess, truth))
                places = torch.arange(len(truth), device=truth.device)
                hits.append((metrics.identification_rank(paired, places, gallery)["best"] == 1).float().mean())
        return float(torch.stack(hits).mean()) if hits else 0.0

    def _upload(self, sent: Sent, found: Reconstruction) -> dict[str, Any]:
        guess = self._pixels(found.inputs.to(sent.batch.inputs).nan_to_num(nan=0.0))
        size = max(LINE_UP - len(sent.batch.labels), 1)
        cards = []
        # A defense may train on changed pictures. Recovering those gives the originals away: the worse of both counts.
        same = torch.equal(sent.trained_on.inputs, sent.batch.inputs)
        for batch in (sent.batch,) if same else (sent.batch, sent.trained_on):
            truth = self._pixels(batch.inputs)
            labels = {"guess_labels": found.labels, "truth_labels": sent.batch.labels}
            card = metrics.score(guess, truth, gallery=self.public[:size], **labels)
            cards.append((fmean(card["ssim"]), card, truth))
        _, card, truth = best = max(cards, key=lambda c: c[0])
        paired = metrics.aligned(guess, metrics.pair(guess, truth))
        return {
            "card": card,
            "guess": guess,
            "truth": truth,
            "floor": self._floor(truth, len(guess)),
            "pictures": [to_png(p) for p in paired],
            "note": "" if best is cards[0] else "compared with the pictures as the defense changed them",
        }

    def _floor(self, truth: Tensor, count: int) -> Cards:
        """Return the scores of guesses that never look at the gradient, as many as the attacker made."""
        key = hashlib.sha256(truth.cpu().numpy().tobytes()).digest(), max(count, len(truth))
        if key not in self._blind:
            rng = derive_rng(self.seed, key[0].hex(), 0, "blind")
            self._blind[key] = metrics.score_floor(truth, self.public, rng, count=count)
        return self._blind[key]

    def _pixels(self, inputs: Tensor) -> Tensor:
        return to_pixels(inputs, self.data.mean, self.data.std)


def contrast(guesses: Sequence[Tensor], truths: Sequence[Tensor]) -> list[float]:
    """Return how much more each picture looks like the guess made for it than like those made for other uploads.

    The same attacker, the same defense, another private picture: that is what a guess without information looks like.
    Each upload's guesses are paired with the pictures as well as they can be, so batches gain nothing from pairing.
    Empty with fewer than two uploads.
    """
    if len(truths) < 2:
        return []
    if not any(len(guess) for guess in guesses):  # an attack may say that it found nothing
        return [0.0] * sum(len(truth) for truth in truths)
    table = metrics.pairwise_ssim(torch.cat(list(truths)), torch.cat(list(guesses))).cpu().double()
    blocks = [rows.split([len(g) for g in guesses], dim=1) for rows in table.split([len(t) for t in truths])]
    out: list[float] = []
    for own, row in enumerate(blocks):
        values = torch.stack([_paired(block) for block in row])
        others = (values.sum(0) - values[own]) / (len(row) - 1)
        out += (values[own] - others).tolist()
    return out


def _paired(block: Tensor) -> Tensor:
    """Return each truth's SSIM with the guess it is paired with, 0 for one that is left without."""
    rows, columns = (torch.from_numpy(index) for index in linear_sum_assignment(-block.numpy()))
    out = torch.zeros(len(block), dtype=block.dtype)
    out[rows] = block[rows, columns]
    return out


def _means(columns: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*columns, strict=True)]


def _best(cards: Sequence[Cards]) -> list[float]:
    joined = {guess: [v for card in cards for v in card[guess]["ssim"]] for guess in cards[0]}
    return max(joined.values(), key=fmean)


def describe_uploads(column: Column, sent: Sequence[Sent]) -> Upload:
    """Return what left the client, as a mean over the uploads."""
    first = sent[0].grads
    weighed = [s.size for s in sent if s.size is not None]
    size = [tree.global_norm(s.grads) or 1.0 for s in sent]
    held = [s.residual / n for s, n in zip(sent, size, strict=True) if s.residual is not None]
    away = [tree.global_norm(tree.sub(s.seen.grads, s.grads)) / n for s, n in zip(sent, size, strict=True)]
    per_layer = [{name: _layer(g, s.seen.grads[name]) for name, g in s.grads.items()} for s in sent]
    return Upload(
        column=column,
        bytes_sent=round(fmean(w.total_bytes for w in weighed)),
        bytes_dense=weighed[0].dense_bytes,
        values_bytes=round(fmean(w.values_bytes for w in weighed)),
        positions_bytes=round(fmean(w.positions_bytes for w in weighed)),
        paper_bytes=round(fmean(w.paper_bytes for w in weighed)),
        distance=fmean(away),
        cosine=fmean(tree.cosine(s.grads, s.seen.grads) for s in sent),
        residual_ratio=fmean(held) if held else None,
        seconds=fmean(s.seconds for s in sent),
        waited=fmean(s.waited for s in sent),
        layers=[
            Layer(name, g.numel(), *(fmean(layer[name][i] for layer in per_layer) for i in range(3)))
            for name, g in first.items()
        ],
    )


def _layer(true: Tensor, sent: Tensor) -> tuple[float, float, float]:
    """Return the shares of entries, of energy and of the largest entries that left."""
    left, size = (sent != 0).flatten(), true.abs().flatten().double()
    energy = float(size.square().sum())
    top = size.topk(max(1, int(LARGEST * size.numel()))).indices
    return (
        float(left.double().mean()),
        float(size[left].square().sum()) / energy if energy else 0.0,
        float(left[top].double().mean()),
    )
