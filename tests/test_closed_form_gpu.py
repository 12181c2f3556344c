"""The analytic, active and generative attacks where the gradient lies on a GPU."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from gradveil import Attack, Defense, DualPrune, Identity, ThreatModel, Veil, observe
from gradveil.attacks import GGL, RGAP, Imprint, LinearReadout, LowRankCompletion, TrapWeights
from gradveil.capture import full_precision
from gradveil.data import load, to_pixels
from gradveil.generator import Generator, GeneratorSettings, train_generator
from gradveil.gradients import parameters
from gradveil.metrics import aligned, pair, ssim
from gradveil.models import build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def attacked(attack: Attack, name: str, defense: Defense, count: int, prior: object = None) -> torch.Tensor:
    photos = load("photos", split="test")
    batch = photos.batch(range(count), device="cuda")
    attack = attack.fitted(defense, photos.mean, photos.std)
    model = build(name, num_classes=photos.num_classes, input_shape=photos.input_shape).cuda().eval()
    model = attack.plant(model, photos.input_shape, torch.Generator().manual_seed(0))
    with full_precision():  # the worst case, as audits have it: TF32's rounding alone is noise enough to stop R-GAP
        payload = Veil(defense, parameters(model), seed=0, guard=None).protect(model, cross_entropy, batch)
    threat = ThreatModel(active=True, prior=True)
    seen = observe(
        payload,
        model,
        cross_entropy,
        batch,
        threat,
        num_classes=photos.num_classes,
        mean=photos.mean,
        std=photos.std,
        defense=defense,
        prior=prior,
    )
    found = attack.run(seen, torch.Generator().manual_seed(0))
    guess, truth = (to_pixels(x, photos.mean, photos.std) for x in (found.inputs, batch.inputs))
    return ssim(aligned(guess, pair(guess, truth)), truth)


@pytest.mark.parametrize(
    ("attack", "name", "defense", "count", "least"),
    [
        (LinearReadout(), "mlp", Identity(), 1, 0.99),
        (LowRankCompletion(), "mlp", DualPrune(), 1, 0.95),
        (LowRankCompletion(), "mlp", DualPrune(), 8, 0.9),
        (RGAP(), "cnn6", Identity(), 1, 0.99),
        (RGAP(), "cnn6", DualPrune(), 1, 0.95),
        (Imprint(), "resnet18", Identity(), 9, 0.9),
        (Imprint(), "resnet18", DualPrune(), 9, 0.9),
        (TrapWeights(), "mlp", Identity(), 8, 0.3),
    ],
    ids=repr,
)
def test_as_good_as_on_the_cpu(attack, name, defense, count, least):
    assert float(attacked(attack, name, defense, count).mean()) > least


def test_the_generator_trains_and_is_searched():
    photos = load("photos", split="train")
    made = train_generator(photos, GeneratorSettings(steps=20, batch=32, width=32), device="cuda")
    assert isinstance(made, Generator)
    for search in ("adam", "cma"):
        scores = attacked(GGL(search, steps=20), "lenet", DualPrune(), 1, made)
        assert bool(torch.isfinite(scores).all())
