"""Training the generator: the decoder of a variational autoencoder that also has to deceive a discriminator.

The autoencoder makes real pictures reachable, which is what an attacker who searches the latent space needs; the
discriminator makes what lies between them look real. Train on public pictures only, never on those of the clients
under attack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from .. import check, tree
from ..core import Tensors
from ..data import Dataset
from ..errors import StateError
from ..files import write_tensors
from .helpers import Discriminator, Encoder
from .network import Generator

SAVE_EVERY = 1000  # steps between two checkpoints
SHIFT = 4  # pixels of 32 by which the discriminator's view is moved
BETAS = (0.5, 0.99)


@dataclass(frozen=True)
class GeneratorSettings:
    """How to train. The defaults suit 32x32 pictures and a large GPU: about 3 minutes on an H200."""

    steps: int = 8000
    batch: int = 256
    lr: float = 4e-4
    latent: int = 128
    width: int = 96
    noise: float = 0.1  # deviation of a pixel that the autoencoder need not explain
    adversarial: float = 0.1  # weight of deceiving the discriminator
    average: float = 0.999  # share of the kept weights that stays in each step
    seed: int = 0

    def __post_init__(self) -> None:
        check.at_least(1, steps=self.steps, batch=self.batch, latent=self.latent)
        check.positive(lr=self.lr, noise=self.noise)
        check.non_negative(adversarial=self.adversarial)
        check.fraction(average=self.average)


def train_generator(
    data: Dataset,
    settings: GeneratorSettings | None = None,
    *,
    device: torch.device | str = "cpu",
    checkpoint: str | Path | None = None,
    on_step: Callable[[int, dict[str, float]], None] | None = None,
    every: int = 50,
) -> Generator:
    """Return a generator trained on the pictures of `data`, in evaluation mode, on the CPU.

    Args:
        data: Public pictures; square, their side a multiple of 8.
        settings: How to train.
        device: Where to train.
        checkpoint: File the run is saved to now and then and when it is interrupted; a run found there goes on.
        on_step: Called every `every` steps with the steps done and the losses.
        every: Steps between two calls; each waits for the GPU.
    """
    trainer = Trainer(data, settings or GeneratorSettings(), device)
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists():
        trainer.load(path)
    try:
        while trainer.done < trainer.settings.steps:
            losses = trainer.step()
            if on_step is not None and (trainer.done % every == 0 or trainer.done == trainer.settings.steps):
                on_step(trainer.done, {name: float(value) for name, value in losses.items()})
            if path is not None and trainer.done % SAVE_EVERY == 0:
                trainer.save(path)
    finally:
        if path is not None:
            trainer.save(path)
    return trainer.kept.cpu().eval()


class Trainer:
    """A training run: `step` does one step, `save` and `load` carry all of its state."""

    def __init__(self, data: Dataset, settings: GeneratorSettings, device: torch.device | str) -> None:
        self.settings, self.device, self.done = settings, torch.device(device), 0
        self._origin = {"settings": repr(settings), "data": data.digest}
        channels, side, other = data.input_shape
        if side != other:
            raise ValueError(f"the generator needs square pictures, got {side} x {other}")
        self.images, self.labels = data.images.to(self.device), data.labels.to(self.device)
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.default_generator.manual_seed(settings.seed)
            made, self.kept = (
                Generator(data.num_classes, channels, side, settings.latent, settings.width) for _ in range(2)
            )
            makers = nn.ModuleDict({"generator": made, "encoder": Encoder(made)})
            critic = Discriminator(made)
        self.kept.load_state_dict(made.state_dict())
        self.kept.to(self.device).requires_grad_(False)
        fast = self.device.type == "cuda"
        layout = torch.channels_last if fast else torch.contiguous_format
        self.makers = makers.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        self.critic = critic.to(self.device, memory_format=layout)  # type: ignore[call-overload]
        self.make = torch.optim.Adam(self.makers.parameters(), settings.lr, BETAS, fused=fast)
        self.judge = torch.optim.Adam(self.critic.parameters(), settings.lr, BETAS, fused=fast)
        self.rng = torch.Generator(self.device).manual_seed(settings.seed)

    def step(self) -> dict[str, Tensor]:
        """Do one step: the discriminator learns from new fakes, then their makers from its verdict."""
        for optimizer in (self.make, self.judge):  # constant, then down to zero over the second half
            optimizer.param_groups[0]["lr"] = self.settings.lr * min(1.0, 2 - 2 * self.done / self.settings.steps)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            pictures, labels = self._draw()
            mean, log_var = self.makers["encoder"](pictures, labels)
            noise = torch.randn(2, *mean.shape, generator=self.rng, device=self.device)
            latents = torch.cat([mean + noise[0] * (log_var / 2).exp(), noise[1]])
            fakes = self.makers["generator"](latents, labels.repeat(2))
            real, fake = self._scores(pictures, fakes.detach(), labels)
            judged = F.relu(1 - real).mean() + F.relu(1 + fake).mean()
        self._descend(self.judge, judged)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            error = (fakes[: len(pictures)] - pictures).square().mean()
            divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean() / pictures[0].numel()
            deceived = -self.critic(self._moved(fakes), labels.repeat(2)).mean()
            made = error / (2 * self.settings.noise**2) + divergence + self.settings.adversarial * deceived
        self._descend(self.make, made)
        with torch.no_grad():
            new = list(self.makers["generator"].parameters())
            torch._foreach_lerp_(list(self.kept.parameters()), new, 1 - self.settings.average)
        self.done += 1
        return {"error": error.detach(), "divergence": divergence.detach(), "judged": judged.detach()}

    def _draw(self) -> tuple[Tensor, Tensor]:
        index = torch.randint(len(self.images), (self.settings.batch,), generator=self.rng, device=self.device)
        return self.images[index].float() / 255, self.labels[index]

    def _scores(self, pictures: Tensor, fakes: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.critic(self._moved(torch.cat([pictures, fakes])), labels.repeat(3))
        return scores[: len(pictures)], scores[len(pictures) :]

    def _moved(self, pictures: Tensor) -> Tensor:
        """Return the pictures in another light and moved a little, lest the discriminator learn them by heart."""
        count, side = len(pictures), pictures.shape[-1]
        light = 0.4 * torch.rand(count, 1, 1, 1, generator=self.rng, device=self.device) - 0.2
        reach = SHIFT * side // 32
        theta = torch.eye(2, 3, device=self.device).repeat(count, 1, 1)
        moves = torch.randint(-reach, reach + 1, (count, 2), generator=self.rng, device=self.device)
        theta[:, :, 2] = 2 * moves / side
        grid = F.affine_grid(theta, list(pictures.shape), align_corners=False)
        return F.grid_sample(
            (pictures + light).float(), grid, mode="nearest", padding_mode="reflection", align_corners=False
        )

    def _descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    def state_dict(self) -> Tensors:
        """Return everything the run needs to go on, as tensors."""
        parts: dict[str, Tensors] = {
            "makers": self.makers.state_dict(),
            "critic": self.critic.state_dict(),
            "kept": self.kept.state_dict(),
            "run": {"done": torch.tensor(self.done), "rng": self.rng.get_state()},
        }
        for name, optimizer in (("make", self.make), ("judge", self.judge)):
            moments = optimizer.state_dict()["state"]
            parts[name] = {f"{i}.{key}": value for i, state in moments.items() for key, value in state.items()}
        return {key: value for name, part in parts.items() for key, value in tree.under(name, part).items()}

    def save(self, path: Path) -> None:
        """Write the run to a file, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {name: t.detach().cpu().clone().contiguous() for name, t in self.state_dict().items()}
        write_tensors(path, own, self._origin)

    def load(self, path: Path) -> None:
        """Go on from a file written by `save`; raises `StateError` if it is of another run."""
        try:
            with safe_open(path, "pt") as file:
                origin = file.metadata() or {}
            saved = load_file(path)
            for name, module in (("makers", self.makers), ("critic", self.critic), ("kept", self.kept)):
                module.load_state_dict(tree.only(name, saved))
        except (OSError, SafetensorError, RuntimeError) as error:
            raise StateError(f"{path} is not a checkpoint of this training: {error}") from error
        for what, wanted in self._origin.items():
            if origin.get(what) != wanted:
                raise StateError(f"{path} is a checkpoint of training with other {what}: give the same, or delete it")
        for name, optimizer in (("make", self.make), ("judge", self.judge)):
            state: dict[int, Tensors] = {}
            for key, value in tree.only(name, saved).items():
                index, _, kind = key.partition(".")
                state.setdefault(int(index), {})[kind] = value
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
        self.rng.set_state(saved["run.rng"])
        self.done = int(saved["run.done"])
