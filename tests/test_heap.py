"""What a step frees is there for the next one, without the system mapping it again."""

import platform
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from gradveil.cli.heap import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()

def step():
    return [torch.ones(8_000_000) for _ in range(3)]

step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_not_mapped_again() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True).stdout)
        for how in ("plain", "keep")
    }
    assert faults["keep"] < faults["plain"] / 10
