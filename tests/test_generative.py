"""The generative attack on a small random generator whose samples are the victims, and the generator's training."""

import copy
import dataclasses
import json

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from gradveil import Batch, Defense, DualPrune, Identity, Observation, ThreatModel, Veil, observe
from gradveil.attacks import missing, watch
from gradveil.attacks.bypass import before_bottleneck
from gradveil.attacks.cma import minimise_blindly
from gradveil.attacks.generative import GGL
from gradveil.data import load
from gradveil.defenses import PRECODE, Chain, GaussianNoise
from gradveil.errors import ConfigError, NeedError, StateError
from gradveil.generator import Generator, GeneratorSettings, load_generator, save_generator, train_generator
from gradveil.gradients import parameters
from gradveil.models import build

TINY = GeneratorSettings(steps=12, batch=16, latent=4, width=16, lr=3e-3)


@pytest.fixture(scope="module")
def generator() -> Generator:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Generator(num_classes=3, side=16, latent=6, width=16)
    with torch.no_grad():
        made.last.weight.mul_(10)  # untrained, it would paint everything the same grey
    return made.eval()


def victim(generator: nn.Module, defense: Defense, prior: object, seed: int = 1) -> tuple[Observation, Tensor]:
    """Return what the server sees of a client whose picture is a sample of the generator, and the picture."""
    latent = torch.randn(1, 6, generator=torch.Generator().manual_seed(seed))
    label = torch.tensor([1])
    with torch.no_grad():
        inputs = (generator(latent, label) - 0.5) / 0.25
    model = defense.prepare_model(build("lenet", num_classes=3, input_shape=(3, 16, 16), seed=seed))
    batch = Batch(inputs, label)
    payload = Veil(defense, parameters(model), seed=0).protect(model, cross_entropy, batch)
    threat = ThreatModel(prior=True)
    seen = observe(
        payload,
        model,
        cross_entropy,
        batch,
        threat,
        num_classes=3,
        mean=(0.5,) * 3,
        std=(0.25,) * 3,
        defense=defense,
        prior=prior,
    )
    return seen, inputs


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("defense", [Identity(), DualPrune()], ids=lambda d: d.key())
@pytest.mark.parametrize("attack", [GGL(steps=120, restarts=2), GGL("cma", steps=60)], ids=lambda a: a.search)
def test_a_sample_of_the_generator_is_found(generator, attack, defense):
    seen, truth = victim(generator, defense, generator)
    before = GGL(steps=1, pool=1, restarts=1).run(seen, rng())
    after = attack.run(seen, rng())
    assert after.loss < before.loss / 10
    assert (after.inputs - truth).square().mean() < (before.inputs - truth).square().mean() / 10
    assert after.labels is not None
    assert after.labels.tolist() == [1]


def test_it_repeats_itself_and_shows_pictures_on_the_way(generator):
    seen, _ = victim(generator, Identity(), generator)
    shown: list[tuple[int, ...]] = []
    with watch(lambda now: shown.append(tuple(now.inputs.shape)), every=10):
        one = GGL(steps=20, restarts=2).run(seen, rng())
    two = GGL(steps=20, restarts=2).run(seen, rng())
    assert torch.equal(one.inputs, two.inputs)
    assert shown == [(2, 1, 3, 16, 16)] * 2


@pytest.mark.parametrize("attack", [GGL(steps=30, restarts=2), GGL("cma", steps=5)], ids=lambda a: a.search)
def test_uploads_attacked_together_fare_as_each_alone(generator, attack):
    other = copy.deepcopy(generator)
    seen = [victim(generator, DualPrune(), prior)[0] for prior in (generator, generator, other)]
    seen[1] = dataclasses.replace(seen[1], grads={name: -g for name, g in seen[1].grads.items()})
    alone = [attack.run(one, rng()) for one in seen]
    for mine, theirs in zip(attack.run_many(seen, [rng() for _ in seen]), alone, strict=True):
        torch.testing.assert_close(mine.inputs, theirs.inputs, rtol=1e-3, atol=1e-3)
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-4)


def test_the_way_round_a_bottleneck_does_not_hide_the_rest_of_the_defense(generator):
    defense = Chain(PRECODE(latent=8), GaussianNoise(0.1))
    seen, _ = victim(generator, defense, generator)
    view = before_bottleneck(seen)
    assert view is not seen
    (target,) = GGL()._begin(seen, view).targets
    assert target.noise > 0.01


def test_the_prior_must_be_granted_and_be_a_generator(generator):
    assert missing(GGL(), ThreatModel()) == ["prior"]
    with pytest.raises(NeedError, match="generator"):
        GGL().run(victim(generator, Identity(), torch.zeros(4, 3, 16, 16))[0], rng())


def test_without_a_search_it_paints_the_class_and_never_looks_at_the_gradient(generator):
    attack = GGL(steps=60).blind()
    seen = dataclasses.replace(victim(generator, Identity(), generator)[0], labels=torch.tensor([1]))
    other = dataclasses.replace(seen, grads={name: torch.zeros_like(g) for name, g in seen.grads.items()})
    one, two = attack.run(seen, rng()), attack.run(other, rng())
    assert torch.equal(one.inputs, two.inputs)
    assert one.labels is not None
    assert one.labels.tolist() == [1]
    drawn = generator(torch.randn(1, 6, generator=rng()), torch.tensor([1]))
    torch.testing.assert_close(one.inputs * 0.25 + 0.5, drawn)
    assert not torch.equal(one.inputs, attack.run(seen, torch.Generator().manual_seed(1)).inputs)


def test_cma_solves_an_ill_conditioned_problem():
    scales = torch.logspace(0, 3, 8, dtype=torch.float64)
    best, lowest = minimise_blindly(lambda x: (scales * (x - 1).square()).sum(1), torch.zeros(8), 0.5, 16, 250, rng())
    assert lowest < 1e-8
    assert torch.allclose(best, torch.ones(8, dtype=torch.float64), atol=1e-3)


def test_training_reduces_the_error_and_resumes_exactly(tmp_path):
    digits = load("digits", size=8)
    errors: list[float] = []
    whole = train_generator(digits, TINY, on_step=lambda _, losses: errors.append(losses["error"]), every=1)
    assert len(errors) == 12
    assert errors[-1] < 0.8 * errors[0]

    class StoppedError(RuntimeError):
        pass

    def stop(step: int, losses: dict[str, float]) -> None:
        if step == 5:
            raise StoppedError

    kept = tmp_path / "run.safetensors"
    with pytest.raises(StoppedError):
        train_generator(digits, TINY, checkpoint=kept, on_step=stop, every=1)
    resumed = train_generator(digits, TINY, checkpoint=kept)
    for a, b in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(StateError, match="not a checkpoint"):
        train_generator(digits, dataclasses.replace(TINY, latent=5), checkpoint=kept)


def test_the_file_keeps_the_generator(generator, tmp_path):
    save_generator(generator, tmp_path / "g.safetensors")
    back = load_generator(tmp_path / "g.safetensors")
    latent, label = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
    assert back.shape == (3, 16, 16)
    assert float((back(latent, label) - generator(latent, label).detach()).abs().max()) < 0.02
    assert not any(p.requires_grad for p in back.parameters())
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match="cannot read"):
        load_generator(tmp_path / "bad.safetensors")


def test_the_full_size_file_stays_small():
    assert 2 * sum(p.numel() for p in Generator().parameters()) < 4e6


def test_the_command_trains_resumes_and_paints(tmp_path):
    from gradveil.cli import app
    from gradveil.cli import commands as _registered  # noqa: F401

    file, picture = tmp_path / "g.safetensors", tmp_path / "g.png"
    small = ["--data", "digits", "--size", "8", "--width", "16", "--latent", "4", "--batch", "8", "--steps", "3"]
    train = ["generator", "train", *small, "--device", "cpu", "--out", str(file)]
    runner = CliRunner()
    left = tmp_path / "g.safetensors.checkpoint"
    left.write_bytes(b"")
    assert "--resume" in str(runner.invoke(app, train).exception)
    left.unlink()
    assert runner.invoke(app, train).exit_code == 0
    assert not left.exists()
    assert runner.invoke(app, ["generator", "sample", "--file", str(file), "--out", str(picture)]).exit_code == 0
    assert picture.stat().st_size > 500

    # What it is for: the attack that searches it stands beside what the label alone paints.
    found = tmp_path / "attack"
    options = ["--model", "mlp(hidden=16)", "--data", "digits", "--pictures", "2", "--labels", "known"]
    command = ["attack", "--attack", "ggl(steps=3, pool=4)", "--generator", str(file), *options, "--out", str(found)]
    done = runner.invoke(app, command)
    assert done.exit_code == 0, done.output
    floor = json.loads((found / "scores.json").read_text())["floor"]
    assert len(floor["label alone"]["ssim"]) == 2
    assert floor["label alone"]["ssim"] != floor["random_picture"]["ssim"]
