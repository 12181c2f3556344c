"""What an attacker who knows which entries arrived gets behind pruning, and behind what might blunt it, row by row.

    python examples/known_mask.py attack --device cuda
    python examples/known_mask.py table docs/hardened.md

One picture per upload, labels known, fresh model in evaluation mode. Rows that are recorded are skipped.
"""

import re
from pathlib import Path
from typing import Annotated

import frontier
import typer
from frontier_view import Entry, Store, floor

STEPS, PICTURES = 1000, 8
MARKED = re.compile(r"(<!-- known mask models=(\S+) -->\n)(.*?)(<!-- /known mask -->)", re.DOTALL)
# What the server receives, the defense, and the rounds of other pictures before.
ROWS = (
    ("raw gradient", "none", 0),
    ("Top-k, 20 % sent", "topk", 0),
    ("DGP, 20 % sent", "dgp", 0),
    ("DGP that sends 1 %", "dual_prune(top=0.01, bottom=0.98)", 0),
    ("1 % drawn at random", "random_dgp(keep=0.01)", 0),
    ("0.1 % drawn at random", "random_dgp(keep=0.001)", 0),
    *((f"DGP, {age} earlier round{'s' * (age > 1)}", "dgp", age) for age in (1, 4, 16, 64)),
    *(
        (f"DGP, residual warmed by {n} private picture{'s' * (n > 1)}", f"warmed_dgp(batches={n + 1})", n)
        for n in (1, 4, 16)
    ),
    ("DGP, signs only", "chain(dual_prune, quantize(bits=1))", 0),
    ("DGP, noise as large as what is sent", "noisy_band(noise=1.0, limit=100.0)", 0),
    ("DGP, four times that noise", "noisy_band(noise=4.0, limit=100.0)", 0),
    ("DGP, noise as large, taken back, 16 earlier rounds", "noisy_band(noise=1.0)", 16),
    ("a quarter of the entries in turn, 16 earlier rounds", "rotating_dgp(every=4)", 16),
    ("an eighth of the entries in turn, 16 earlier rounds", "rotating_dgp(every=8)", 16),
)

app = typer.Typer(add_completion=False, help=__doc__)


@app.command()
def attack(
    model: frontier.Model = "resnet18",
    root: frontier.Root = "",
    device: Annotated[str, typer.Option()] = "cpu",
    pictures: Annotated[int, typer.Option(help="pictures attacked")] = PICTURES,
    steps: Annotated[int, typer.Option(help="steps of the attack")] = STEPS,
    data_name: frontier.Data = "cifar10",
    row: Annotated[str, typer.Option(help="only rows whose name holds this")] = "",
    out: frontier.Out = Path("results/known_mask"),
) -> None:
    """Run the rows that are not recorded yet."""
    for _, defense, age in (one for one in ROWS if row in one[0]):
        frontier.attack(
            [defense],
            attack=[f"inverting_gradients(steps={steps})"],
            model=model,
            root=root,
            device=device,
            pictures=pictures,
            data_name=data_name,
            age=age,
            out=out,
        )


@app.command()
def table(page: Path, out: frontier.Out = Path("results/known_mask")) -> None:
    """Write the recorded rows between the markers of a page."""
    text = page.read_text(encoding="utf-8")
    page.write_text(fill_page(text, Store(out)), encoding="utf-8")


def fill_page(text: str, store: Store) -> str:
    """Return a page with the table between its markers written anew."""
    return MARKED.sub(lambda m: m[1] + render(store, m[2].split(",")) + m[4], text)


def render(store: Store, models: list[str]) -> str:
    """Return the table of some models in Markdown; what was not run is named."""
    found: dict[tuple[str, str, int], Entry] = {
        (model, e["defense"], e["setting"]["age"]): e
        for model in models
        for e in store.entries("attack", model=model, n=PICTURES)
        if e["attack"] == f"inverting_gradients(steps={STEPS})"
    }
    headings = ["what the server receives", *(f"{model}: SSIM, LPIPS, identified" for model in models)]
    lines = [f"| {' | '.join(headings)} |", "|---" * len(headings) + "|"]
    for label, defense, age in ROWS:
        cells = [_figures(found.get((model, defense, age))) for model in models]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    if found:
        some = next(iter(found.values()))
        best = f"SSIM {floor(some):.2f} and {floor(some, 'identified'):.0%}"
        lines += ["", f"{some['setting']['n']} pictures, {some['attack']}; blind guesses reach {best}."]
    return "\n".join(lines) + "\n"


def _figures(entry: Entry | None) -> str:
    if entry is None:
        return "not run"
    mean = entry["mean"]
    lpips = [f"{mean['lpips']:.3f}"] if "lpips" in mean else []  # needs weights that may not be at hand
    return ", ".join([f"{mean['ssim']:.3f}", *lpips, f"{mean['identified']:.0%}"])


if __name__ == "__main__":
    app()
