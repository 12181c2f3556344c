"""One picture out of a batch through noise that follows the size of the gradient: in a planted layer, or in an own one.

A defense that drowns each tensor in noise of so many times its root mean square can be fed a tensor whose energy sits
in few rows: of K rows, all silent but those, their mean stands out from the noise sqrt(K) times better than the rest
would let it. They are excited by the brightest picture of the batch alone, and their gradient is that picture. How many
they are makes no difference, unless the noise follows the largest row: then a quarter of them is as good as ever.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Literal, Self, get_args

import torch
from torch import Tensor, nn

from .. import check
from ..core import Attack, Defense, Knowledge, Observation, Reconstruction
from ..errors import NeedError
from ..models.inspect import layers
from .analytic import first_linear
from .imprint import NEVER, PHOTO_MEAN, PHOTO_SPREAD, ImprintBlock, Planted, planted_in
from .space import box

COLOUR = 0.1  # share of a picture's variance that is colour rather than brightness
Silence = Literal["copies", "scattered", "outgoing"]
ONES = 256  # inputs of the planted layer that are 1: their gradient is the factor of the row's, 256 times over
FAR = 8  # a picture's measurement in a random direction never gets so many times as far as a pixel does
BLUR = 0.3  # how much rows that fire together differ from each other, against what they have in common
COARSE = 0.05  # spatial frequency, in cycles per pixel, below which a photograph's spectrum is flat


@dataclass(frozen=True)
class _Light(Attack):
    """A threshold on brightness that about one picture in `batch` exceeds."""

    batch: int = 32
    center: float = 0.0
    spread: float = 0.46

    def __post_init__(self) -> None:
        check.at_least(1, batch=self.batch)
        check.positive(spread=self.spread)

    @property
    def needs(self) -> frozenset[Knowledge]:
        return frozenset({"active"})

    def fitted(self, defense: Defense | None, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        center = 0.0 if any(mean) else PHOTO_MEAN / std[0]  # normalised pictures have mean 0 by design
        return replace(self, center=center, spread=PHOTO_SPREAD * sum(1 / s for s in std) / len(std))

    def _threshold(self) -> float:
        return self.center + self.spread * self._quantile()

    def _quantile(self) -> float:
        """The threshold that one picture in `batch` exceeds, in spreads above the centre."""
        if self.batch == 1:
            return -10.0
        return float(torch.special.ndtri(torch.tensor(1 - 1 / self.batch, dtype=torch.float64)))

    def _brightness(self) -> float:
        """The mean brightness of the pictures above the threshold."""
        height = math.exp(-(self._quantile() ** 2) / 2) / math.sqrt(2 * math.pi)
        return self.center + self.spread * height * self.batch


@dataclass(frozen=True)
class Spotlight(_Light):
    """Plant a layer of `rows` rows of which a share `lit` fires, for about one picture in `batch`, and read their mean.

    How the others are silenced is for a client who looks at the model first: as copies of these that never fire, as
    rows in scattered directions that never fire, or as rows of a fresh layer whose outgoing weights are zero. In the
    last two cases those that fire differ a little from each other, too.

    What the defense's noise leaves is scaled by what inputs that are always 1 show, and smoothed as a photograph's
    spectrum suggests. The noise is measured on the silent rows. Returns one picture, or none where the row holds
    nothing but noise.

    Guarantees: exact without noise if exactly one picture of the batch exceeds the threshold. With noise of r times
    the root mean square of the tensor the signal-to-noise ratio of a pixel is about sqrt(rows) / r.
    """

    rows: int = 4096
    lit: float = 0.25
    gain: float = 1e-7
    silence: Silence = "copies"

    def __post_init__(self) -> None:
        super().__post_init__()
        check.one_of(get_args(Silence), silence=self.silence)
        check.at_least(2, rows=self.rows)
        check.fraction(lit=self.lit)
        check.positive(lit=self.lit, gain=self.gain)

    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        never = self.center + NEVER * self.spread
        thresholds = torch.full((self.rows,), never)
        thresholds[: self._count] = self._threshold()
        pattern = torch.randint(2, input_shape, generator=rng, device=rng.device).float().cpu() * 2 - 1
        size = math.prod(input_shape)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            weights = torch.cat([torch.full((size,), self.gain / size), torch.zeros(ONES)])
            block = ImprintBlock(thresholds, torch.ones(self.rows), weights, pattern, self._shift())
            self._hide(block, rng)
        like = next(model.parameters())
        return Planted(block.to(like.device, like.dtype), copy.deepcopy(model)).train(model.training)

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        name, _ = planted_in(seen.model)
        weight = seen.grads[f"{name}.measure.weight"].double()
        row = weight[: self._count].mean(0)
        noise = float(weight[self._count :].square().mean().sqrt()) / math.sqrt(self._count)
        low, high = box(seen)
        chance = 1 + 4 * math.sqrt(2 / len(row))
        factor = float(row[-ONES:].mean())
        if not factor or not float(row.square().mean()) > chance * noise**2:
            return Reconstruction(low.expand(1, *seen.input_shape)[:0], info={"noise": noise})
        picture = (row[:-ONES] / factor).view(seen.input_shape)
        picture = smoothed(picture - picture.mean(), noise / abs(factor)) + picture.mean() - self._shift()
        return Reconstruction(picture[None].to(low.dtype).clamp(low, high), info={"noise": noise / abs(factor)})

    @torch.no_grad()
    def _hide(self, block: ImprintBlock, rng: torch.Generator) -> None:
        """Let the silent rows look less alike."""
        if self.silence == "copies":
            return
        pixels, lit = block.pattern.numel(), block.measure.weight[: self._count]
        blur = torch.randn(len(lit), pixels, generator=rng, device=rng.device).to(lit)
        lit[:, :pixels] *= 1 + BLUR * (blur - blur.mean(1, keepdim=True))
        weight, bias = block.measure.weight[self._count :], block.measure.bias[self._count :]
        width = 1 / math.sqrt(weight.shape[1])  # as torch starts a layer
        weight.copy_(torch.rand(weight.shape, generator=rng, device=rng.device) * 2 * width - width)
        if self.silence == "scattered":
            pixel = abs(self.center + self._shift()) + 4 * self.spread
            bias.copy_(-FAR * pixel * weight.norm(dim=1))
        else:
            bias.copy_(torch.rand(bias.shape, generator=rng, device=rng.device) * 2 * width - width)
            block.mix.weight[:, self._count :] = 0

    @property
    def _count(self) -> int:
        """How many rows fire: never all, since the silent ones tell the noise."""
        return min(max(int(self.lit * self.rows), 1), self.rows - 1)

    def _shift(self) -> float:
        """What is added to every pixel: about no brightness is left, so that the energy of the row is contrast."""
        return -self._brightness()


@dataclass(frozen=True)
class OwnSpotlight(_Light):
    """Make a few units of the model's own first layer stand out, within what a client's guard lets pass, and read them.

    A share `lit` of the units fires for about one picture in `batch` and leads to the first class, `lead` times as
    strongly as others lead on. Each measures brightness and, less strongly, something random, so that none repeats
    another. All but a share `alive` of the units are zero, and so silent: their gradients show the noise.
    Needs a model whose first layer is `nn.Linear` with a bias, and a fully connected layer after it.
    """

    lit: float = 0.03
    alive: float = 0.26
    lead: float = 99.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check.fraction(lit=self.lit, alive=self.alive)
        check.positive(lit=self.lit, alive=self.alive, lead=self.lead)

    def plant(self, model: nn.Module, input_shape: tuple[int, ...], rng: torch.Generator) -> nn.Module:
        changed = copy.deepcopy(model)
        first, then, *_ = (*(layer for _, layer in layers(changed, input_shape)), None, None)
        whole = math.prod(input_shape)
        if not isinstance(first, nn.Linear) or first.bias is None or first.in_features != whole:
            raise NeedError("this attack needs a model whose first layer is nn.Linear with a bias")
        if not isinstance(then, nn.Linear):
            raise NeedError("this attack needs a fully connected layer after the first")
        lit, silent = self._units(first.out_features)
        random = torch.randn(len(range(first.out_features)[lit]), whole, generator=rng, device=rng.device).to(
            first.weight
        )
        with torch.no_grad():
            first.weight[silent], first.bias[silent] = 0, 0
            size = float(first.weight[lit].norm(dim=1).mean()) / math.sqrt(whole)
            first.weight[lit] = size * (1 + BLUR * (random - random.mean(1, keepdim=True)))
            first.bias[lit] = -size * whole * self._threshold()
            middle = float((then.weight - then.weight.mean(0)).abs().amax(0).median())
            then.weight[:, lit] = 0
            then.weight[0, lit] = self.lead * middle
        return changed

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        name, layer = first_linear(seen)
        weight = seen.grads[f"{name}.weight"].double()
        lit, silent = self._units(layer.out_features)
        row = weight[lit].mean(0)
        noise = float(weight[silent].square().mean().sqrt()) / math.sqrt(len(weight[lit]))
        low, high = box(seen)
        # What chance alone leaves: the units may hold less, and smoothing then makes it flat.
        energy = max(float(row.square().mean()) - noise**2, math.sqrt(2 / len(row)) * noise**2)
        if not energy:
            return Reconstruction(low.expand(1, *seen.input_shape)[:0], info={"noise": noise})
        factor = math.sqrt(energy / (1 + self._brightness() ** 2))  # a picture's contrast is about 1
        picture = (row / factor).view(seen.input_shape)
        picture = smoothed(picture - picture.mean(), noise / factor) + picture.mean()
        return Reconstruction(picture[None].to(low.dtype).clamp(low, high), info={"noise": noise / factor})

    def _units(self, units: int) -> tuple[slice, slice]:
        """Return which units are lit, and which silent: some always are, to tell the noise by."""
        lit = max(int(self.lit * units), 1)
        return slice(0, lit), slice(min(max(int(self.alive * units), lit + 1), units - lit), units)


def smoothed(picture: Tensor, noise: float) -> Tensor:
    """Return the Wiener estimate of a picture `[C, H, W]` of mean 0 and about unit variance in white noise.

    Assumes a spectrum that falls with the square of the frequency, and little colour.
    """
    if not noise or picture.ndim != 3:
        return picture
    height, width = picture.shape[1:]
    mirrored = torch.cat([picture, picture.flip(1)], 1)
    mirrored = torch.cat([mirrored, mirrored.flip(2)], 2)
    grey = mirrored.mean(0, keepdim=True)
    rows, columns = (torch.fft.fftfreq(2 * n, dtype=picture.dtype, device=picture.device) for n in (height, width))
    spectrum = 1 / (rows[:, None].square() + columns[None].square() + COARSE**2)
    spectrum = spectrum / spectrum.mean()

    def wiener(part: Tensor, variance: float, noise_variance: float) -> Tensor:
        keep = variance * spectrum / (variance * spectrum + noise_variance)
        back: Tensor = torch.fft.ifft2(torch.fft.fft2(part) * keep).real
        return back

    out = wiener(grey, 1 - COLOUR, noise**2 / len(picture)) + wiener(mirrored - grey, COLOUR, noise**2)
    return out[:, :height, :width]
