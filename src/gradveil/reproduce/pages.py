"""docs/results.md, rendered from the recorded results and nothing else."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..data.cifar import LAYOUTS, SIZES
from ..errors import ConfigError
from . import plots
from .cells import AttackCell, key
from .columns import Found, columns_for, paper_only
from .entry import Entry
from .figures import deviations, figures_of, results_of, shown, summarise, told_figures
from .scales import SCALES, Scale
from .store import OTHER_COPY, load, on_original
from .tables import DISTANCE, FEEDBACK, TABLES, entries

HEAD = """# Results

<!-- Rendered from results/ by `gradveil reproduce render`: change the results or the renderer, not this page. -->

Every line comes from result files under `results/` that hold the command (two early trainings of LeNet lack it),
commit, hardware, seconds, seed and the score of every single picture. "Paper" is what the DGP paper (AAAI 2024) prints.
Where ours differs from it by more than the spread, and by more than its last digit can say (0.0005, or 0.05 % of larger
values), a sentence below the table says why: tested, or a guess. What was not run is named as such.

{contents}
## How to run it

```
gradveil reproduce all                                     # quick scale: minutes on a CPU, to see that every table runs
gradveil reproduce main --scale full --root DATA --train   # the paper's settings, for a GPU; also --seeds 0,1,2
gradveil reproduce view main --scale full --root DATA      # reconstructions beside the originals, as a page
gradveil reproduce render                                  # this page, from results/
```

`DATA` holds `cifar-10-batches-bin`, the published binary version. LPIPS needs its published weights
([where](dependencies.md)). `--dry` lists the cells, `--cells` picks some, `--minutes` stops in time: what is recorded
is not run again, and a search (IG, GI) or a training that was stopped goes on where it stopped; other attacks begin
their cell anew. On an H200 IG takes 40 s for 20 pictures on ResNet18, and 100 epochs of training 150 s. Quick results
go to `results/quick`, which is not kept here. What the paper leaves open is set for a whole table by `--rounds`,
`--labels` and `--mode`.

## How to read this page

- **LPIPS**: low means recovered. **SSIM**: high means recovered; "blind" is what the best guess reaches that never
  looks at the gradient. **SSIM7** is the kind the paper's figures fit: a flat 7x7 window and a data range of 2, under
  which plain grey scores about 0.25. It is there to compare with the paper; judge leakage by SSIM against blind.
- **identified**: how often the private picture is the reconstruction's nearest among 99 others and the pictures of its
  own upload, by MSE, SSIM or LPIPS, whichever ranks it best. In brackets: the best blind guess.
- **±** is two standard errors over all pictures, or half the range of the seeds' means if that is wider. Without it
  there is one value only, and any difference from the paper counts as one.
- **told the defense**: what the same attack reaches in the hands of somebody who knows the defense and allows for it,
  which the paper does not ask (IG and GI in 1,000 steps instead of 2,500); spreads, LPIPS and pictures stand under
  [beyond](#beyond).
- **min, max**: of each seed's pictures, then the mean over the seeds. **n**: pictures of all seeds together.
- **run**: hardware, date and commits; a `+` behind a commit means changes that were not committed.
- Unless a line says otherwise the attacked model is freshly initialised and in evaluation mode, labels are given, and
  the upload is the client's first (no error-feedback history). The paper leaves all of these open; lines with the other
  values stand under [beyond](#beyond). Uploads without content are never scored.
- A green tile among the reconstructions is a copy of the private picture (above 40 dB), left out because pictures of a
  dataset are not kept here. `gradveil reproduce view` shows all originals, from your own copy of the data.
- CIFAR-10 is the original, known by its digest. Results on other copies stand apart, at the end.

| attacker | who that is |
|---|---|
| `ig`, `gi`, `rob`, `rgap` | the paper's four, who do not allow for the defense; `rob` plants a layer, uploads of 9 |
| `ig+mask`, `gi+mask`, `rgap+mask` | the same, told the defense: behind pruning they compare only what arrived |
| `rob+fit` | Rob with its planted layer fitted to the defense |
| `ig+band` | also uses that what did not arrive lies above or below the sent band |
| `ig+eased` | the mask-aware one by a schedule of our own: plain Adam, large steps, smoothing that eases off |
| `ig+coarse` | looks for a picture of 8 by 8 pixels only, which finds form under noise |
| `ig+chain` | follows the client from its first round and subtracts what it was held back |
| `spotlight` | plants a layer of which a quarter fires, all for the same picture |
| `ggl` | searches a generator trained on public pictures; `short`: for fewer steps, which fit less of the noise |
| the label alone | a random picture of that generator, of the right class: what goes beyond it is the gradient's |

| defense | what that is |
|---|---|
| `ats_r`, `ats_t` | ATS; compared with the picture as ATS changed it, and with the raw one |
| `outpost` | attacked with its gate open: shut, it sends the raw gradient |
| `topk`, `topk5` | Top-k that keeps 20 %, and 5 %, with error feedback |
| `dgp-nofeedback`, `adgp-nofeedback` | without error feedback |
| `hardened1` | the noise and rounding of `hardened` on single examples; `hardened` mixes 32 before it sends |
"""
NOTES = {
    "R-GAP on CNN6": "PRECODE has no line, nor has it one in the paper: a random bottleneck leaves no chain of layers "
    "to solve.",
    "GGL where the paper has none: ADGP, and under noise": "Whoever knows the label paints pictures of its class: what "
    "goes beyond the first line comes from the upload. `hardened` mixes 32 pictures, of which one is searched.",
    "FedAvg: several local steps": "A client takes all its steps on one picture.",
    "FedAvg: four local steps, each on a picture of its own": "Four pictures in an upload. The attacker knows the "
    "labels and their order.",
}
RECORDED_NOTES = {  # of the recorded runs at full scale, not of the tables
    "Rob on ResNet18": "Behind Outpost Rob finds little whether it is told or not; a layer planted against noise finds "
    "the pictures: [spotlight](#a-planted-layer-of-which-a-quarter-fires-all-for-one-picture-the-client-has-no-guard).",
    "Communication and computation": "The seconds are those spent between gradient and encoding, on one H200 (without "
    "a defense: a look whether all numbers are finite). Soteria on LeNet was timed on two CPU cores and compares with "
    "no other row.",
    "GGL with a generator of our own": "Behind DGP the search finds more than behind the raw gradient. That this is "
    "because DGP takes away the largest entries, which say more about the label than about the picture, is a guess.",
    "Clients in training mode: BatchNorm by the batch's own statistics": "Without a defense nothing is found either: "
    "these lines say what the attacker cannot do, and nothing for any defense. With one picture in a batch the "
    "gradient of the deep layers turns with every small change of the picture (the search ends at a cosine distance "
    "of 0.7), and this descent does not get near.",
    "Trained models": "Weights are trained undefended where the attack runs, and not kept: on ResNet18 lines of other "
    "commits were attacked on models trained again by the same recipe. LeNet of seed 2 never leaves chance (10 % after "
    "100 epochs): what its gradients give away is not what a model that has learnt gives away.",
    "Accuracy under Dirichlet partitions": "Why DGP and ADGP diverge: "
    "[users whose data differ](training.md#users-whose-data-differ).",
    "Accuracy, CIFAR-100": "The 50,000 and 10,000 pictures as published (their deviations per channel are the "
    "published ones), in our own order, which training shuffles anyway. The same runs on CIFAR-10 follow. In the paper "
    "DGP that prunes 80 % trains better than Top-k that prunes 95 % on every model; here on VGG11; on ResNet18 both "
    "end alike, and on the two small ones Top-k ends higher, on CIFAR-10 on CNN6 only.",
    DISTANCE: "Between the top 5 and 10 % of DGP the distance jumps. The "
    "classifier's bias has ten entries, of which 5 % round down to none; at 10 % the largest one goes, which belongs "
    "to the true label and is about a third of the squared gradient. So at 5 % DGP sends the label, and that one "
    "number is most of what arrives, by energy.",
}
PLOTS = {DISTANCE: "results-distance.png", FEEDBACK: "results-accuracy.png"}  # beside docs/results.md
OTHER_HEAD = """## Another copy of CIFAR-10

These ran on a copy whose pictures went through JPEG (310 bytes each) and came in another order. That costs accuracy and
makes pictures smoother, so they compare with each other only.
"""
MANY = 8  # headings from which a table gets a list of them


@dataclass(frozen=True)
class _Page:
    """Where the results of a page lie, where its pictures are, how the plot of a part is called, and under which
    heading each reason was first given.
    """

    folder: Path
    scale: str
    pictures: str
    plots: dict[str, str]
    said: dict[str, str] = field(default_factory=dict)


def render_table(name: str, scale: Scale, folder: Path, pictures: str) -> str:
    """Return one table, or all, at one scale, the paper's values beside ours; `pictures` leads to the strips."""
    parts = [f"# {name}, {scale.name} scale\n\n{scale.explained}\n"]
    page = _Page(folder, scale.name, pictures, plot_names(scale.name))
    for one in TABLES if name == "all" else (name,):
        parts.append(f"## {one}\n\n{(TABLES[one].__doc__ or '').strip()}\n")
        parts += [_part(page, title, part) for title, part in _parts(entries(one, scale)).items()]
    return "\n".join(parts)


def render(folder: Path) -> str:
    """Return the page for the results in `folder`."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}: results lie where gradveil reproduce wrote them (--out)")
    parts: list[str] = []
    contents = [["table", "what", "lines recorded"]]
    page = _Page(folder, "full", "../results/full", PLOTS)
    for name, make in TABLES.items():
        what, lines = (make.__doc__ or "").strip(), entries(name, SCALES["full"])
        recorded = sum(bool(results_of(folder, "full", entry)) for entry in lines)
        contents.append([f"[{name}](#{name})", what, f"{recorded} of {len(lines)}"])
        parts.append(f"## {name}\n\n{what} `gradveil reproduce {name} --scale full`\n")
        found = _parts(lines)
        if len(found) > MANY:
            parts.append("".join(f"- [{title}](#{_anchor(title)})\n" for title in found))
        parts += [_part(page, title, part) for title, part in found.items()]
    parts.append(_other_copies(folder))
    return "\n".join([HEAD.format(contents=table(contents)), *parts])


def plot_names(scale: str) -> dict[str, str]:
    """Return the names of the plots beside the pages of `render_table`, of which one folder holds both scales.

    >>> list(plot_names("quick").values())
    ['results-distance-quick.png', 'results-accuracy-quick.png']
    """
    return {title: f"{Path(name).stem}-{scale}.png" for title, name in PLOTS.items()}


def plots_of(folder: Path, scale: str = "full", names: dict[str, str] = PLOTS) -> dict[str, bytes]:
    """Return the plots that belong beside a page for the results in `folder`, as PNG by their `names`."""
    lines = entries("figures", SCALES[scale])
    points, curves = plots.distances(lines, folder, scale), plots.accuracies(lines, folder, scale)
    found = {names[DISTANCE]: plots.draw_distances(points)} if points else {}
    return found | ({names[FEEDBACK]: plots.draw_accuracies(curves)} if curves else {})


def _parts(lines: list[Entry]) -> dict[str, list[Entry]]:
    found: dict[str, list[Entry]] = {}
    for entry in lines:
        found.setdefault(entry.part, []).append(entry)
    return found


def _part(page: _Page, title: str, lines: list[Entry]) -> str:
    """Return one heading with its table."""
    results = [results_of(page.folder, page.scale, entry) for entry in lines]
    figures = [
        figures_of(entry, found) | told_figures(page.folder, page.scale, entry) if found else {}
        for entry, found in zip(lines, results, strict=True)
    ]
    notes = NOTES | (RECORDED_NOTES if page.scale == "full" else {})
    text = "\n\n".join([f"### {title}", *([notes[title]] if title in notes else []), *_of_part(results)]) + "\n\n"
    if not any(results) and not any(entry.paper for entry in lines):
        return f"{text}Not run: {'; '.join(entry.label for entry in lines)}.\n"
    columns = columns_for(lines, figures)
    attacked = isinstance(lines[0].cell, AttackCell)
    rows = [["", *(name for name, _ in columns), *(["n"] if attacked else []), "seeds", "run"]]
    run: list[tuple[Entry, Found]] = []
    for entry, found, figure in zip(lines, results, figures, strict=True):
        if found:
            cells = [show(entry, figure) for _, show in columns]
            count = [str(sum(r["n"] for r in found))] if attacked else []
            rows.append([entry.label, *cells, *count, ", ".join(str(_seed(r)) for r in found), _run(found)])
            run.append((entry, figure))
        elif entry.paper:
            cells = [paper_only(name, entry) for name, _ in columns]
            rows.append([entry.label, *cells, *([""] if attacked else []), "", "not run"])
    text += table(rows)
    missing = [entry.label for entry, found in zip(lines, results, strict=True) if not (found or entry.paper)]
    text += f"\nNot run: {'; '.join(missing)}.\n" if missing else ""
    text += _sentences(title, run, page.said) if page.scale == "full" else ""
    text += f"\n![{title}]({page.plots[title]})\n" if any(results) and title in page.plots else ""
    return text + _strips(page, lines, results)


def _of_part(results: list[list[dict[str, Any]]]) -> list[str]:
    """Return a sentence for each dataset of which only the first pictures were at hand."""
    known = [r for found in results for r in found if "sizes" in r]
    used = {(r["cell"]["data"], r["sizes"]["test"], r["sizes"]["train"]) for r in known}
    return [
        f"Of {LAYOUTS[data].title} the first {test} test pictures and the first {train} training pictures were at "
        "hand: those attacked, and those an attacker has besides, are drawn from them."
        for data, test, train in sorted(used)
        if data in LAYOUTS and (test, train) != (SIZES["test"], SIZES["train"])
    ]


def _sentences(title: str, run: list[tuple[Entry, Found]], said: dict[str, str]) -> str:
    """Return a sentence for each reason why lines differ from the paper; one given before is pointed at."""
    lines = ""
    for why, which in deviations(run).items():
        first = said.setdefault(why, title)
        lines += f"- {which}: {why if first == title else f'as under [{first}](#{_anchor(first)}).'}\n"
    return f"\nDifferent from the paper:\n\n{lines}" if lines else ""


def _anchor(title: str) -> str:
    return "".join(c for c in title.lower().replace(" ", "-") if c.isalnum() or c == "-")


def _run(results: list[dict[str, Any]]) -> str:
    """Return hardware, dates and commits of results, each once."""
    found: list[list[str]] = [[], [], []]
    for result in results:
        where = result["environment"]
        used_gpu = str(result.get("device") or result.get("resolved", {}).get("device", "")).startswith("cuda")
        commit = where["commit"] or "unknown"
        commit = commit[:10] + ("+" if commit.endswith("+") else "")
        hardware = where["gpu"] if used_gpu else f"{where['cores']} CPU cores"
        for kept, value in zip(found, (hardware, where["time"][:10], f"`{commit}`"), strict=True):
            kept += [value] if value not in kept else []
    ended = ", diverged" if any(result.get("status") == "diverged" for result in results) else ""
    return ", ".join(value for kept in found for value in kept) + ended


def _seed(result: dict[str, Any]) -> int:
    return int(result["settings"]["seed"] if result["kind"] == "training" else result["seed"])


def _strips(page: _Page, lines: list[Entry], results: list[list[dict[str, Any]]]) -> str:
    """Return the reconstructions of a part, folded; the originals are shown by `gradveil reproduce view` only."""
    shown_ = {key(e.cell): e.label for e, found in zip(lines, results, strict=True) if found and "victims" in found[0]}
    if not shown_:
        return ""
    rows = "".join(f"| {label} | ![{label}]({page.pictures}/{name}.webp) |\n" for name, label in shown_.items())
    return f"\n<details><summary>Reconstructions</summary>\n\n| | |\n|---|---|\n{rows}\n</details>\n"


def table(rows: list[list[str]]) -> str:
    """Return rows, the first of them the headings, as a Markdown table."""
    head, *body = rows
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in body)]) + "\n"


def _other_copies(folder: Path) -> str:
    files = [*(folder / "full").glob("*.json"), *(folder / OTHER_COPY).glob("*.json")]
    rows = [["cell", "accuracy, %", "SSIM", "blind", "LPIPS", "n", "run"]]
    for path in sorted(files, key=lambda path: path.name):
        result = load(path)
        if on_original(result):
            continue
        if result["kind"] == "training":
            ended = result["accuracy"] if result["status"] == "finished" else math.nan
            figures = [shown(100 * ended, 2), "", "", "", ""]
        else:
            ssim, lpips = (shown(summarise([result["scores"][name]]).mean) for name in ("ssim", "lpips"))
            blind = shown(max(card["ssim"] for card in result["floor"].values()))
            figures = ["", ssim, blind, lpips, str(result["n"])]
        rows.append([f"`{path.stem}`", *figures, _run([result])])
    return f"{OTHER_HEAD}\n{table(rows)}" if len(rows) > 1 else ""
