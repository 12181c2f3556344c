"""A stopped training goes on as it began, or not at all."""

from dataclasses import replace
from pathlib import Path

import pytest

from gradveil.data import load
from gradveil.errors import StateError
from gradveil.generator import GeneratorSettings
from gradveil.generator.training import Trainer

TINY = GeneratorSettings(steps=2, batch=4, latent=4, width=16)


def test_a_checkpoint_of_other_settings_or_data_is_refused(tmp_path: Path) -> None:
    digits = load("digits", size=8)
    path = tmp_path / "run.checkpoint"
    Trainer(digits, TINY, "cpu").save(path)
    Trainer(digits, TINY, "cpu").load(path)
    for changed in (replace(TINY, lr=1e-2), replace(TINY, batch=8), replace(TINY, seed=9)):
        with pytest.raises(StateError, match="other settings"):
            Trainer(digits, changed, "cpu").load(path)
    with pytest.raises(StateError, match="other data"):
        Trainer(replace(digits, images=255 - digits.images), TINY, "cpu").load(path)
