"""The generator network and its file."""

import json
from importlib import resources
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from .. import check
from ..errors import ConfigError
from ..files import write_tensors

FORMAT = "gradveil generator 1"
EMBEDDING = 32
NORM_GROUPS = 8


class Block(nn.Module):
    """Double the side, then twice normalise, scale and shift by the code, and convolve; around a shortcut."""

    def __init__(self, wide_in: int, wide_out: int, code: int) -> None:
        super().__init__()
        self.styles = nn.ModuleList(nn.Linear(code, 2 * wide) for wide in (wide_in, wide_out))
        self.convs = nn.ModuleList(nn.Conv2d(wide, wide_out, 3, padding=1) for wide in (wide_in, wide_out))
        self.shortcut = nn.Conv2d(wide_in, wide_out, 1)

    def forward(self, h: Tensor, code: Tensor) -> Tensor:
        """Return `[N, wide_out, 2 H, 2 W]`."""
        h = F.interpolate(h, scale_factor=2.0)
        out = h
        for style, conv in zip(self.styles, self.convs, strict=True):
            scale, shift = style(code)[:, :, None, None].chunk(2, 1)
            out = conv(F.silu(F.group_norm(out, NORM_GROUPS) * (1 + scale) + shift))
        summed: Tensor = out + self.shortcut(h)
        return summed


class Generator(nn.Module):
    """`self(latent [N, latent], label [N])` gives pictures `[N, C, side, side]` in 0..1; latents are N(0, 1)."""

    def __init__(
        self, num_classes: int = 10, channels: int = 3, side: int = 32, latent: int = 128, width: int = 96
    ) -> None:
        super().__init__()
        check.at_least(1, num_classes=num_classes, channels=channels, latent=latent)
        if side % 8 or width % 16 or min(side, width) < 1:
            raise ValueError(f"side must be a multiple of 8 and width of 16, got {side} and {width}")
        self.latent, self.num_classes, self.width, self.shape = latent, num_classes, width, (channels, side, side)
        code, start = latent + EMBEDDING, side // 8
        self.embed = nn.Embedding(num_classes, EMBEDDING)
        self.stem = nn.Linear(code, 2 * width * start**2)
        widths = (2 * width, 2 * width, width, width // 2)
        self.blocks = nn.ModuleList(Block(a, b, code) for a, b in pairwise(widths))
        self.last = nn.Conv2d(width // 2, channels, 3, padding=1)

    def forward(self, latent: Tensor, label: Tensor) -> Tensor:
        """Return pictures."""
        code = torch.cat([latent, self.embed(label)], dim=1)
        start = self.shape[1] // 8
        h = self.stem(code).view(-1, 2 * self.width, start, start)
        for block in self.blocks:
            h = block(h, code)
        return torch.sigmoid(self.last(F.silu(h)).float())


def save_generator(generator: Generator, path: str | Path) -> None:
    """Write a generator to a safetensors file in half precision, atomically."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    channels, side, _ = generator.shape
    made = {
        "num_classes": generator.num_classes,
        "channels": channels,
        "side": side,
        "latent": generator.latent,
        "width": generator.width,
    }
    halves = {name: t.detach().to("cpu", torch.float16).contiguous() for name, t in generator.state_dict().items()}
    write_tensors(path, halves, {"format": FORMAT, "generator": json.dumps(made)})


def load_generator(path: str | Path | None = None) -> Generator:
    """Return the generator in a file written by `save_generator`, in evaluation mode, its weights frozen.

    Without a path, the one that comes with gradveil: trained by this project on the training pictures of CIFAR-10.
    """
    if path is None:
        path = Path(str(resources.files("gradveil") / "assets" / "generator_cifar10.safetensors"))
    try:
        with safe_open(path, framework="pt") as opened:
            metadata = opened.metadata() or {}
            tensors = {name: opened.get_tensor(name).float() for name in opened.keys()}  # noqa: SIM118  (not a dict)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read the generator {path}: {error}; make one with gradveil generator train"
        ) from error
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path} is not a generator of this version ({FORMAT})")
    # Drawn at random first, then replaced: the global generator must not notice.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        generator = Generator(**json.loads(metadata["generator"]))
    try:
        generator.load_state_dict(tensors)
    except RuntimeError as error:
        raise ConfigError(f"{path} does not hold the generator its header describes: {error}") from error
    return generator.eval().requires_grad_(False)
