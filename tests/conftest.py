"""One torch thread: tiny double-backward graphs run far slower with two."""

import os

os.environ.setdefault("NUMBA_NUM_THREADS", "2")
os.environ.setdefault("GRADVEIL_OFFLINE", "1")  # no test may download

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)
