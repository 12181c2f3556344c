"""Prove on a GPU that the optimisation attacks work: ResNet18, 20 CIFAR-10 test pictures, none, Top-k and dual pruning.

    python examples/proof_attacks.py --out results/proof

Every case goes through `gradveil attack`, keeps what it has, and is skipped when it is there already, so a stopped run
goes on with the same command. The last lines are a table; the figures are in proof.json.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

NAIVE = "masked='never', weighting='none', reapply='never'"
# name: attack, defense, further options of `gradveil attack`
CASES = {
    "ig_none": ("inverting_gradients", "none", []),
    "ig_topk_naive": (f"inverting_gradients({NAIVE})", "topk", []),
    "ig_topk_masked": ("inverting_gradients", "topk", []),
    "ig_dgp_naive": (f"inverting_gradients({NAIVE})", "dgp", []),
    "ig_dgp_masked": ("inverting_gradients", "dgp", []),
    "gi_none": ("gi_paper", "none", []),
    "gi_full_none": ("see_through_gradients", "none", []),
    "gi_dgp_masked": ("gi_paper", "dgp", []),
    "ig_sign_aware": ("inverting_gradients", "quantize(bits=1)", ["--group", "10"]),
    "ig_dgp_round3_masked": ("inverting_gradients", "dgp", ["--rounds", "3", "--lr", "0"]),
    "ig_dgp_round3_joint": ("joint(rounds=2)", "dgp", ["--rounds", "3", "--lr", "0"]),
    "ig_dgp_frozen8": ("repeated_rounds", "dgp", ["--rounds", "8", "--freeze"]),
    "ig_none_inferred": ("inverting_gradients", "none", ["--labels", "inferred"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/proof"))
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--pictures", default="20")
    parser.add_argument("--steps", default="2500")
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    results = {}
    for name in given.only:
        attack, defense, more = CASES[name]
        folder = given.out / name
        if not (folder / "scores.json").exists():
            common = ["--model", given.model, "--data", given.data, "--device", given.device, "--steps", given.steps]
            chosen = ["--pictures", given.pictures, "--attack", attack, "--defense", defense, "--out", str(folder)]
            subprocess.run([sys.executable, "-m", "gradveil", "attack", *common, *chosen, *more], check=True)
        found = json.loads((folder / "scores.json").read_text())
        results[name] = {key: fmean(values) for key, values in found["scores"].items()} | {"seconds": found["seconds"]}
        (given.out / "proof.json").write_text(json.dumps(results, indent=1) + "\n")
    for name, row in results.items():
        print(f"{name:24}" + "  ".join(f"{key} {value:.3f}" for key, value in row.items()))


if __name__ == "__main__":
    main()
