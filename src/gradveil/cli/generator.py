"""`gradveil generator`: train the prior of the generative attack, and look at what it paints."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..data import load
from ..generator import GeneratorSettings, load_generator, save_generator, train_generator
from ..training.job import pick_device
from . import app, err, out

generator_app = typer.Typer(help="The picture generator that the attack GGL searches.", no_args_is_help=True)
app.add_typer(generator_app, name="generator")

DEFAULTS = GeneratorSettings()
Device = Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU where there is one.")]


@generator_app.command()
def train(
    target: Annotated[Path, typer.Option("--out", "-o", help="File to write, FILE.safetensors.")],
    data: Annotated[str, typer.Option(help="cifar10, cifar100, digits, photos, or a folder of pictures.")] = "cifar10",
    size: Annotated[int | None, typer.Option(help="Side of the pictures, a multiple of 8.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = DEFAULTS.steps,
    batch: Annotated[int, typer.Option(help="Pictures per step.")] = DEFAULTS.batch,
    lr: Annotated[float, typer.Option(help="Learning rate.")] = DEFAULTS.lr,
    latent: Annotated[int, typer.Option(help="Length of a latent.")] = DEFAULTS.latent,
    width: Annotated[int, typer.Option(help="Width of the networks, a multiple of 16.")] = DEFAULTS.width,
    seed: Annotated[int, typer.Option(help="Settles all random draws.")] = DEFAULTS.seed,
    device: Device = "auto",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from FILE.checkpoint, left by a stopped run.")
    ] = False,
) -> None:
    """Train a generator on the training pictures of a public dataset.

    The defaults take about 3 minutes on an H200 for CIFAR-10. On a CPU use something like --size 16 --width 32
    --batch 32 --steps 2000. Never train on the pictures of the clients under attack.
    """
    checkpoint = target.with_name(target.name + ".checkpoint")
    if checkpoint.exists() and not resume:
        raise ValueError(f"{checkpoint} holds a stopped run: go on with --resume, or delete it")
    settings = GeneratorSettings(steps=steps, batch=batch, lr=lr, latent=latent, width=width, seed=seed)
    pictures = load(data, split="train", size=size)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[news]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=err, refresh_per_second=2) as bar:
        task = bar.add_task(f"generator for {pictures.name}", total=steps, news="")

        def show(done: int, losses: dict[str, float]) -> None:
            bar.update(task, completed=done, news="  ".join(f"{name} {value:.4f}" for name, value in losses.items()))

        made = train_generator(pictures, settings, device=pick_device(device), checkpoint=checkpoint, on_step=show)
    save_generator(made, target)
    checkpoint.unlink()
    out.print(f"{target}: {target.stat().st_size / 1e6:.1f} MB", highlight=False, soft_wrap=True)


@generator_app.command()
def sample(
    target: Annotated[Path, typer.Option("--out", "-o", help="Picture to write, FILE.png.")],
    file: Annotated[Path | None, typer.Option(help="Generator file; by default the one of gradveil.")] = None,
    rows: Annotated[int, typer.Option(help="Samples per class.", min=1)] = 8,
    seed: Annotated[int, typer.Option(help="Settles the latents.")] = 0,
) -> None:
    """Paint samples of a generator, one column per class."""
    from PIL import Image

    made = load_generator(file)
    channels, side, _ = made.shape
    classes = min(made.num_classes, 20)
    latents = torch.randn(rows * classes, made.latent, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        pictures = made(latents, torch.arange(classes).repeat(rows))
    grid = pictures.view(rows, classes, channels, side, side).permute(0, 3, 1, 4, 2)
    pixels = (grid.reshape(rows * side, classes * side, channels) * 255).round().byte()
    image = Image.fromarray(pixels.expand(-1, -1, 3).contiguous().numpy())
    image.resize((4 * image.width, 4 * image.height), Image.Resampling.NEAREST).save(target)
    out.print(str(target), highlight=False, soft_wrap=True)
