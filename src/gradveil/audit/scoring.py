"""Guesses and uploads as the numbers and pictures of a report."""

import base64
import io
import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from .. import metrics, tree
from ..core import Batch, Grads, Reconstruction
from ..data import Dataset, to_pixels
from ..veil import derive_rng
from ..wire import paper_bits
from .clients import Sent
from .plan import Plan, Subject
from .report import Column, Floor, Layer, Upload

LINE_UP = 64
LARGEST = 0.05  # the share of entries called the largest
SHOWN = ("ssim", "psnr", "mse", "lpips")  # the paper's own SSIM flatters and is left to the benchmarks


def to_png(pixels: Tensor) -> str:
    """Return a picture `[C, H, W]` in 0..1 as base64 PNG."""
    levels = (pixels.detach().cpu().nan_to_num(nan=0.5).clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    grey = levels.shape[0] == 1
    handle = io.BytesIO()
    Image.fromarray(levels[0] if grey else np.ascontiguousarray(levels.transpose(1, 2, 0))).save(handle, "PNG")
    return base64.b64encode(handle.getvalue()).decode()


def line_up(subject: Subject, batch_size: int) -> Tensor:
    """Return the other pictures of the line-up, so that with the truths there are `LINE_UP` where data allow."""
    count = min(len(subject.public), max(LINE_UP - batch_size, 1))
    return subject.public.pixels(range(count)).to(subject.device)


def chance(subject: Subject) -> tuple[int, float]:
    """Return the size of the line-up and how often a guess made blindly is the nearest, at most.

    Every distance may find its own nearest picture, so luck has as many draws as there are distances.
    """
    size = min(LINE_UP, len(subject.public) + 1)
    draws = 3 if metrics.lpips_possible(subject.public.pixels([0])) else 2
    return size, min(draws / size, 1.0)


def pixels_of(inputs: Tensor, data: Dataset) -> Tensor:
    """Return model inputs as pixels in 0..1."""
    return to_pixels(inputs, data.mean, data.std)


def score_guesses(
    plan: Plan, subject: Subject, sent: Sequence[Sent], found: Sequence[Reconstruction]
) -> dict[str, Any]:
    """Return the fields of a row: every upload is scored on its own, then the pictures stand in one list."""
    parts = [_score_upload(plan, subject, i, s, f) for i, (s, f) in enumerate(zip(sent, found, strict=True))]
    losses = [f.loss for f in found if math.isfinite(f.loss)]
    labels = [v for part in parts for v in part["card"].get("label_accuracy", [])]
    names = [name for name in SHOWN if name in parts[0]["card"]]
    return {
        "scores": {name: [v for part in parts for v in part["card"][name]] for name in names},
        "identified": [bool(v) for part in parts for v in part["card"]["identified"]],
        "floor": _best([part["floor"] for part in parts]),
        "labels_right": fmean(labels) if labels else None,
        "loss": fmean(losses) if losses else None,
        "pictures": [png for part in parts for png in part["pictures"]],
        "note": parts[0]["note"],
    }


def _score_upload(plan: Plan, subject: Subject, index: int, sent: Sent, found: Reconstruction) -> dict[str, Any]:
    data = subject.victims
    guess = pixels_of(found.inputs.to(sent.batch.inputs), data)
    gallery = line_up(subject, len(sent.batch.labels))
    note = ""
    cards = []
    for batch in (sent.batch, sent.trained_on):
        truth = pixels_of(batch.inputs, data)
        card = metrics.score(guess, truth, guess_labels=found.labels, truth_labels=sent.batch.labels, gallery=gallery)
        cards.append((fmean(card["ssim"]), card, truth))
        if sent.trained_on is sent.batch or torch.equal(sent.trained_on.inputs, sent.batch.inputs):
            break
    best = max(cards, key=lambda c: c[0])
    if best is not cards[0]:
        note = "scored against the pictures as the defense changed them: recovering those gives the originals away"
    _, card, truth = best
    paired = metrics.aligned(guess, metrics.pair(guess.nan_to_num(nan=0.5), truth))
    floor = blind(plan, subject, index, truth, count=len(guess))
    return {"card": card, "floor": floor, "pictures": [to_png(p) for p in paired], "note": note}


def blind(plan: Plan, subject: Subject, index: int, truth: Tensor, count: int) -> dict[str, dict[str, list[float]]]:
    """Return the scores of guesses that never look at the gradient, as many as the attacker made."""
    rng = derive_rng(plan.seed, str(index), 0, "blind")
    public = subject.public.pixels(range(min(len(subject.public), 512))).to(truth)
    return metrics.score_floor(truth, public, rng, count=count)


def floors(plan: Plan, subject: Subject, column: Column, batches: Sequence[Batch]) -> list[Floor]:
    """Return what blind guesses score on the pictures of a column."""
    cards = []
    for i, batch in enumerate(batches):
        truth = pixels_of(batch.inputs, subject.victims)
        cards.append(blind(plan, subject, i, truth, count=len(truth)))
    names = [name for name in SHOWN if name in cards[0]["grey"]]
    return [
        Floor(column, guess, {name: [v for card in cards for v in card[guess][name]] for name in names})
        for guess in cards[0]
    ]


def _best(cards: Sequence[dict[str, dict[str, list[float]]]]) -> list[float]:
    joined = {guess: [v for card in cards for v in card[guess]["ssim"]] for guess in cards[0]}
    return max(joined.values(), key=fmean)


def describe_uploads(column: Column, sent: Sequence[Sent]) -> Upload:
    """Return what left the client, as a mean over the uploads."""
    first = sent[0].grads
    dense = sum(g.numel() * g.element_size() for g in first.values())
    size = [tree.global_norm(s.grads) or 1.0 for s in sent]
    held = [s.residual / n for s, n in zip(sent, size, strict=True) if s.residual is not None]
    away = [tree.global_norm(tree.sub(s.seen.grads, s.grads)) / n for s, n in zip(sent, size, strict=True)]
    per_layer = [{name: _layer(g, s.seen.grads[name]) for name, g in s.grads.items()} for s in sent]
    return Upload(
        column=column,
        bytes_sent=round(fmean(s.nbytes for s in sent)),
        bytes_dense=dense,
        paper_bytes=round(fmean(paper_bits(s.seen.grads) / 8 for s in sent)),
        distance=fmean(away),
        cosine=fmean(_cosine(s.grads, s.seen.grads) for s in sent),
        residual_ratio=fmean(held) if held else None,
        seconds=fmean(s.seconds for s in sent),
        layers=[
            Layer(name, g.numel(), *(fmean(layer[name][i] for layer in per_layer) for i in range(3)))
            for name, g in first.items()
        ],
    )


def _layer(true: Tensor, sent: Tensor) -> tuple[float, float, float]:
    """Return the shares of entries, of energy and of the largest entries that left."""
    left, size = (sent != 0).flatten(), true.abs().flatten().double()
    energy = float(size.square().sum())
    top = size.topk(max(1, math.ceil(LARGEST * size.numel()))).indices
    return (
        float(left.double().mean()),
        float(size[left].square().sum()) / energy if energy else 0.0,
        float(left[top].double().mean()),
    )


def _cosine(a: Grads, b: Grads) -> float:
    product = sum(float((a[name] * b[name]).sum()) for name in a)
    norms = tree.global_norm(a) * tree.global_norm(b)
    return product / norms if norms else 0.0
