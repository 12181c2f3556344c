"""`gradveil ats-search`: look for ATS policies that suit a model and its data."""

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from rich.table import Table
from torch import nn
from torch.nn.functional import cross_entropy

from .. import check, data, models, spec
from ..defenses.ats import ATS, TRANSFORMATIONS, parse_policy
from ..defenses.ats_search import Judge, Scored, draw_policies, rank
from ..record import environment, write_json
from ..training.job import pick_device
from . import app, err, out

PUBLISHED = ("3-1-7", "43-18-18", "21-13-3", "7-4-15")


@app.command("ats-search")
def ats_search(
    dataset: Annotated[str, typer.Option("--data", help="a dataset's name, or a folder of pictures")] = "digits",
    model: Annotated[str, typer.Option(help="the network the policy is for")] = "lenet",
    candidates: Annotated[int, typer.Option(help="random policies to draw; a real search takes hundreds")] = 30,
    pictures: Annotated[int, typer.Option(help="pictures whose gradients are followed")] = 5,
    jacobians: Annotated[int, typer.Option(help="pictures whose Jacobians are compared")] = 60,
    epochs: Annotated[int, typer.Option(help="epochs of training on a tenth of the data, for the privacy score")] = 5,
    floor: Annotated[float | None, typer.Option(help="least accuracy score (default: the candidates' median)")] = None,
    size: Annotated[int | None, typer.Option(help="side of the pictures in pixels (default: the dataset's)")] = None,
    device: Annotated[str, typer.Option(help="cpu, or cuda for a GPU")] = "cpu",
    seed: Annotated[int, typer.Option(help="settles candidates, pictures, training and noise")] = 0,
    json_out: Annotated[Path | None, typer.Option("--json", help="also write every score to this file")] = None,
) -> None:
    """Draw transformation policies for ATS at random, and print the two most private as a defense you can use.

    The two are those with the lowest privacy scores among the drawn policies whose accuracy score is high enough; each
    picture takes one of them by chance. No policy and the published ones are scored too, to compare with: they cannot
    be chosen, and may be better. Both scores are the published heuristics; no attack is run, so audit the result before
    you trust it.
    """
    check.at_least(1, pictures=pictures)
    check.at_least(2, jacobians=jacobians)
    check.at_least(0, epochs=epochs)
    device = str(pick_device(device))
    source = data.load(dataset, size=size)
    rng = torch.Generator().manual_seed(seed)
    judge = _judge(source, model, pictures, jacobians, epochs, device, seed, rng)
    drawn = [policy for policy in draw_policies(candidates, rng) if policy not in PUBLISHED]
    scored = [judge.score(policy) for policy in track(drawn, "scoring", console=err, transient=True)]
    known = [judge.score(policy) for policy in ("", *PUBLISHED)]
    best = rank(scored, floor)
    out.print(_table(best[:10], known))
    if best:
        found = ATS("+".join(one.policy for one in best[:2]), source.mean, source.std)
        out.print(f"{_chosen(best, len(scored), floor)}: {spec.to_text(found)}", soft_wrap=True, highlight=False)
    else:
        out.print(f"none of {len(scored)} drawn policies has an accuracy score of {floor}: lower --floor or draw more")
    if json_out:
        rows = [{**one._asdict(), "drawn": one in scored} for one in (*scored, *known)]
        settings = {"data": dataset, "model": model, "pictures": pictures, "jacobians": jacobians, "epochs": epochs}
        write_json(json_out, {"settings": {**settings, "seed": seed}, "environment": environment(), "scores": rows})


def _chosen(best: list[Scored], drawn: int, floor: float | None) -> str:
    """Return what was chosen among what, in words."""
    enough = "the median" if floor is None else f"{floor:g}"
    if len(best) == 1:
        return f"the only one of {drawn} drawn policies whose accuracy score reaches {enough}"
    return f"the two most private of {len(best)} drawn policies whose accuracy score reaches {enough}, as a hybrid"


def _judge(
    source: data.Dataset,
    model: str,
    pictures: int,
    jacobians: int,
    epochs: int,
    device: str,
    seed: int,
    rng: torch.Generator,
) -> Judge:
    order = torch.randperm(len(source), generator=rng)
    tenth = max(len(source) // 10, 1)
    if tenth + pictures + jacobians > len(source):
        raise ValueError(f"{source.name} has {len(source)} pictures, too few for {pictures} + {jacobians} and a tenth")
    fresh, trained = (
        models.build(model, num_classes=source.num_classes, input_shape=source.input_shape, seed=seed).to(device)
        for _ in range(2)
    )
    _train(trained, source.subset(order[:tenth]), epochs, device, rng)
    return Judge(
        trained=trained.eval(),
        fresh=fresh.eval(),
        loss_fn=cross_entropy,
        victims=source.batch(order[tenth : tenth + pictures], device),
        others=source.batch(order[-jacobians:], device),
        mean=source.mean,
        std=source.std,
        seed=seed,
    )


def _train(model: nn.Module, source: data.Dataset, epochs: int, device: str, rng: torch.Generator) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in track(range(epochs), "training", console=err, transient=True):
        for indices in torch.randperm(len(source), generator=rng).split(32):
            if len(indices) > 1:  # BatchNorm cannot train on one picture
                batch = source.batch(indices, device)
                optimiser.zero_grad()
                cross_entropy(model(batch.inputs), batch.labels).backward()
                optimiser.step()


def _table(best: list[Scored], known: list[Scored]) -> Table:
    table = Table(
        "policy",
        "transformations",
        "privacy (lower is better)",
        "accuracy (higher is better)",
        title="ATS policies: the most private drawn, then no policy and the published ones",
    )
    for section in (best, known):
        for one in section:
            steps = [TRANSFORMATIONS[i] for policy in parse_policy(one.policy) for i in policy]
            words = ", ".join(f"{name} {level}" for name, level in steps)
            table.add_row(one.policy or "-", words, f"{one.privacy:.4f}", f"{one.accuracy:.3f}")
        table.add_section()
    return table
