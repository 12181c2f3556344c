"""One picture, one defense, one attack, told step by step."""

import base64
import binascii
import io
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor, nn

from .. import check, data, metrics, models
from ..attacks import ATTACKS
from ..attacks.progress import Progress, watch
from ..audit import clients
from ..audit.plan import NAIVE, QUICK, Plan, Subject
from ..audit.report import ColumnInfo
from ..audit.scoring import Scorer, to_png
from ..audit.verdict import BASELINE
from ..core import Attack, Defense
from ..data import Dataset, to_pixels
from ..defenses import DEFENSES
from ..errors import ConfigError
from ..spec import build
from ..veil import derive_rng

SIDE = 32
FRAMES = 60  # pictures shown of one attack, whatever its number of steps
MAX_BYTES = 8_000_000  # of a dropped picture
MAX_PIXELS = 40_000_000
CHOICES = ("none", "topk", "dgp", "hardened", "dp")
Emit = Callable[[dict[str, Any]], None]


class StoppedError(Exception):
    """The user pressed stop or left."""


@dataclass(frozen=True)
class Order:
    """What the page asks for."""

    picture: int = 0  # one of the bundled photos, unless `upload` holds a picture
    upload: str = ""  # base64
    defense: str = "dgp"
    top: float = 0.05
    bottom: float = 0.75
    noise: float = 0.01
    rounds: int = 0
    mask_aware: bool = True
    steps: int = 200

    def __post_init__(self) -> None:
        check.one_of(CHOICES, defense=self.defense)
        check.fraction(top=self.top, bottom=self.bottom)
        check.non_negative(noise=self.noise)
        check.at_least(0, picture=self.picture, rounds=self.rounds)
        check.at_least(1, steps=self.steps)
        if self.rounds > 64 or self.steps > 5000:
            raise ValueError(f"rounds must be at most 64 and steps at most 5000, got {self.rounds} and {self.steps}")

    def protection(self) -> Defense:
        """Return the defense the sliders describe; noise behind dual pruning goes to sent entries only."""
        texts = {
            "none": BASELINE,
            "topk": f"topk(keep={1 - self.bottom!r})",
            "dgp": f"dgp(top={self.top!r}, bottom={self.bottom!r})",
            "hardened": f"hardened(noise={self.noise!r})",
            "dp": f"gaussian_noise(std={self.noise!r})",
        }
        return build(DEFENSES, texts[self.defense], "defense")

    def attack(self) -> Attack:
        """Return the attack of the audit's defaults, with the steps asked for."""
        how = QUICK if self.mask_aware else NAIVE
        return build(ATTACKS, f"eased_matching({how}, steps={self.steps})", "attack")


def read_picture(encoded: str) -> Tensor:
    """Return a dropped picture as `[3, SIDE, SIDE]` bytes, cut to its middle square; raises `ConfigError`."""
    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ConfigError("the picture did not arrive whole: drop it again") from error
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"the picture is larger than {MAX_BYTES // 1_000_000} MB")
    try:
        with Image.open(io.BytesIO(raw)) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ConfigError(f"the picture has more than {MAX_PIXELS // 1_000_000} million pixels")
            upright = ImageOps.exif_transpose(opened).convert("RGB")
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError) as error:
        raise ConfigError("this is not a picture that can be read: use PNG or JPEG") from error
    fitted = ImageOps.fit(upright, (SIDE, SIDE), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(fitted)).permute(2, 0, 1).contiguous()


class Studio:
    """What all experiments share: bundled photos and a small model."""

    @cached_property
    def photos(self) -> Dataset:
        """The pictures to choose from."""
        return data.load("photos", split="test", size=SIDE).subset(range(16))

    @cached_property
    def others(self) -> Dataset:
        """The client's other pictures, and public ones."""
        return data.load("photos", split="train", size=SIDE)

    @cached_property
    def model(self) -> nn.Module:
        """The model under training: a small convolutional network, freshly initialised."""
        return models.build("cnn6", num_classes=self.photos.num_classes, input_shape=(3, SIDE, SIDE)).eval()

    def victim(self, order: Order) -> Dataset:
        """Return the one picture under attack."""
        if order.upload:
            return replace(
                self.photos, images=read_picture(order.upload)[None], labels=torch.zeros(1, dtype=torch.int64)
            )
        if order.picture >= len(self.photos):
            raise ConfigError(f"picture must be below {len(self.photos)}, got {order.picture}")
        return self.photos.subset([order.picture])


def perform(order: Order, studio: Studio, emit: Emit, stop: threading.Event) -> None:
    """Run the experiment and tell `emit` about it; raises `StoppedError` soon after `stop` is set."""
    victim, attack = studio.victim(order), order.attack()
    defense = order.protection().fitted(victim.mean, victim.std)
    half = len(studio.others) // 2
    subject = Subject(
        model=studio.model,
        loss_fn=nn.functional.cross_entropy,
        victims=victim,
        private=studio.others.subset(range(half)),
        public=studio.others.subset(range(half, len(studio.others))),
        defenses={order.defense: defense},
        attacks={"attack": attack},
        device=torch.device("cpu"),
    )
    plan = Plan(pictures=1, batch_size=1, round=order.rounds)
    column = ColumnInfo("diagnostic", "eval", 1, order.rounds, [0], {})
    sent = clients.uploads(plan, subject, column, order.defense)
    scorer = Scorer(plan, subject)
    truth = victim.pixels([0])
    floor = max(f.scores["ssim"][0] for f in scorer.floors("diagnostic", [s.batch for s in sent]))
    dense = sum(g.numel() * g.element_size() for g in sent[0].grads.values())
    emit({"kind": "sent", "original": to_png(truth[0]), "bytes": sent[0].nbytes, "dense": dense, "blind": floor})

    def show(progress: Progress) -> None:
        if stop.is_set():
            raise StoppedError
        guess = to_pixels(progress.inputs[0], victim.mean, victim.std)
        emit(
            {
                "kind": "step",
                "step": progress.step,
                "total": progress.total,
                "loss": progress.loss,
                "picture": to_png(guess[0]),
                "ssim": float(metrics.ssim(guess, truth)[0]),
                "psnr": float(metrics.psnr(guess, truth)[0]),
            }
        )

    with watch(show, every=max(1, order.steps // FRAMES)):
        found = attack.run_many([s.seen for s in sent], [derive_rng(plan.seed, "ui", 0, "attack")])
    row = scorer.row(sent, found)
    emit(
        {
            "kind": "done",
            "ssim": row["scores"]["ssim"][0],
            "psnr": row["scores"]["psnr"][0],
            "picture": row["pictures"][0],
        }
    )


def read_order(values: Mapping[str, Any]) -> Order:
    """Return the order in a request's JSON; raises `ConfigError` naming what is wrong."""
    from ..config import from_mapping

    return from_mapping(values, Order, "the request")
