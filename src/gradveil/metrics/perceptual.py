"""LPIPS version 0.1 on AlexNet features (Zhang et al. 2018).

Each picture is mapped to one vector such that the distance of two pictures is the squared Euclidean distance of their
vectors: weights and spatial mean are folded into the vectors, so that N x M distances cost N + M network passes.
"""

import hashlib
import os
import pickle
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from ..core import Tensors
from ..data.download import cache_folder, download
from ..errors import ConfigError
from .images import require_pictures

MIN_SIDE = 31  # smaller pictures vanish in AlexNet's poolings
FILE = "lpips_alex.safetensors"
VARIABLE = "GRADVEIL_LPIPS_WEIGHTS"
# Over names and values of all 15 tensors: whatever file they come from, they are the published ones or refused.
DIGEST = "d145128d9124c6774f6f46d8108637bbe666d00314e7861bea46b991d97af474"
ALEXNET = ("https://download.pytorch.org/models/alexnet-owt-7be5be79.pth", "7be5be79")
HEADS = (
    "https://raw.githubusercontent.com/richzhang/PerceptualSimilarity/"
    "082bb24f84c091ea94de2867d34c4544f68e0963/lpips/weights/v0.1/alex.pth",
    "df73285e35b22355a2df87cdb6b70b343713b667eddbda73e1977e0c860835c0",
)
LAYERS = ((0, 4, 2), (3, 1, 2), (6, 1, 1), (8, 1, 1), (10, 1, 1))  # index in AlexNet's features, stride, padding
POOL_BEFORE = (3, 6)
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
CHUNK = 128  # pictures per network pass


def lpips(guess: Tensor, truth: Tensor) -> Tensor:
    """Return the perceptual distance of each pair of pictures, 0 for equal ones.

    Pictures of one channel are shown in grey. At 32x32 three of the five layers see a single position: another photo
    can come nearer than a coarse thumbnail of the right one, so this score alone proves no privacy.
    """
    require_pictures(guess, truth)
    weights = lpips_weights(guess.device)
    parts = zip(torch.split(guess, CHUNK), torch.split(truth, CHUNK), strict=True)
    return torch.cat([(embed(a, weights) - embed(b, weights)).square().sum(dim=1) for a, b in parts])


def lpips_available() -> bool:
    """Say whether the weights can be had: found, or downloaded now unless `GRADVEIL_OFFLINE` is set."""
    try:
        lpips_weights()
    except ConfigError:
        return False
    return True


def lpips_weights(device: torch.device | str = "cpu") -> Tensors:
    """Return the published weights from `$GRADVEIL_LPIPS_WEIGHTS`, the cache folder or the network; else raise."""
    chosen = os.environ.get(VARIABLE)
    path = Path(chosen).expanduser() if chosen else cache_folder() / FILE
    if chosen and not path.is_file():
        raise ConfigError(f"{VARIABLE} names {path}, which does not exist")
    if not path.is_file() and (failure := _download(path)):
        raise ConfigError(f"LPIPS has no weights ({failure}): set {VARIABLE} to a copy of {FILE}")
    return _read(path, path.stat().st_mtime_ns, torch.device(device))


@torch.no_grad()
def embed(pictures: Tensor, weights: Tensors) -> Tensor:
    """Return one vector per picture `[N, C, H, W]` in 0..1; squared distances of vectors are LPIPS."""
    if min(pictures.shape[-2:]) < MIN_SIDE:
        raise ValueError(f"lpips needs pictures of at least {MIN_SIDE} pixels a side, got {tuple(pictures.shape[-2:])}")
    shift, scale = (pictures.new_tensor(v).view(3, 1, 1) for v in (SHIFT, SCALE))
    x = (2 * pictures.expand(-1, 3, -1, -1) - 1 - shift) / scale
    parts = []
    for tap, (index, stride, padding) in enumerate(LAYERS):
        if index in POOL_BEFORE:
            x = F.max_pool2d(x, 3, 2)
        x = F.relu(F.conv2d(x, weights[f"features.{index}.weight"], weights[f"features.{index}.bias"], stride, padding))
        unit = x / (torch.linalg.vector_norm(x, dim=1, keepdim=True) + 1e-10)
        share = weights[f"lin{tap}.weight"].view(1, -1, 1, 1) / unit[0, 0].numel()
        parts.append((unit * share.sqrt()).flatten(1))
    return torch.cat(parts, dim=1)


def digest(weights: Tensors) -> str:
    """Return a SHA-256 over names, shapes and values."""
    total = hashlib.sha256()
    for name in sorted(weights):
        total.update(f"{name} {tuple(weights[name].shape)} ".encode())
        total.update(weights[name].detach().float().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()


@lru_cache(maxsize=4)
def _read(path: Path, _changed: int, device: torch.device) -> Tensors:
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read the LPIPS weights in {path}: {error}") from error
    if digest(weights) != DIGEST:
        raise ConfigError(f"{path} does not hold the published LPIPS v0.1 AlexNet weights")
    return {name: tensor.to(device) for name, tensor in weights.items()}


@lru_cache(maxsize=4)  # also remembers a failure: an unreachable network is waited for once, not at every score
def _download(target: Path) -> str | None:
    """Put the weights at `target`, or return why not."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{FILE}.") as scratch:
            heads, alexnet = (Path(scratch) / name for name in ("heads", "alexnet"))
            download(HEADS[0], heads, HEADS[1])
            download(ALEXNET[0], alexnet, ALEXNET[1])
            whole = Path(scratch) / FILE
            save_file(_join(alexnet, heads), whole)
            os.replace(whole, target)
    except (OSError, ConfigError, pickle.UnpicklingError, KeyError) as error:
        return str(error)
    return None


def _join(alexnet: Path, heads: Path) -> Tensors:
    """Return the tensors LPIPS needs under the names it knows them by."""
    features = torch.load(alexnet, map_location="cpu", weights_only=True)
    linear = torch.load(heads, map_location="cpu", weights_only=True)
    taken = {
        f"features.{i}.{part}": features[f"features.{i}.{part}"] for i, *_ in LAYERS for part in ("weight", "bias")
    }
    taken |= {f"lin{tap}.weight": linear[f"lin{tap}.model.1.weight"] for tap in range(len(LAYERS))}
    return {name: tensor.detach().contiguous() for name, tensor in taken.items()}
