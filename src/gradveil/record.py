"""What every result file says about where it came from."""

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy
import torch

from . import __version__


def environment() -> dict[str, Any]:
    """Return versions, hardware, commit and time, as plain data for a result file."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "gradveil": __version__,
        "commit": commit(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "cuda": torch.version.cuda,
        "gpu": gpu,
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def command() -> str:
    """Return the command line of this process as a reader would type it, wherever the program is installed."""
    script = Path(sys.argv[0])
    if script.stem in ("gradveil", "__main__"):
        return shlex.join(["gradveil", *sys.argv[1:]])
    return shlex.join(["python", "/".join(script.parts[-2:]), *sys.argv[1:]])


def commit() -> str | None:
    """Return the commit of the checkout this package runs from, `+` for changed files, or None outside one.

    `GRADVEIL_COMMIT` speaks for a copy of a checkout, whose history may be missing or older than its files.
    """
    named = os.environ.get("GRADVEIL_COMMIT")
    if named:
        return named
    folder = Path(__file__).resolve().parent
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        return None
    return f"{head}+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else head


def write_json(path: str | Path, value: Any) -> None:
    """Write plain data as JSON, atomically; makes the folder if there is none."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(value, indent=1) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write a text, atomically: a kill leaves the old file or the new one."""
    path = Path(path)
    scratch = path.with_name(path.name + ".tmp")
    scratch.write_text(text, encoding="utf-8")
    scratch.replace(path)


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
