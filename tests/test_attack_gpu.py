"""What only a GPU has: steps recorded as graphs, memory that ends, arithmetic that rounds."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from gradveil.attacks import GradientMatching, Joint, optimise, see_through_gradients
from gradveil.capture import captured, full_precision
from gradveil.core import Batch
from gradveil.defenses import DualPrune, Quantize, dgp

from .attack_kit import batch, model, rngs, rounds, uploads

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def on_gpu(count: int = 3) -> list[Batch]:
    return [Batch(*(t.cuda() for t in batch(i))) for i in range(count)]


@pytest.mark.parametrize("name", ["lenet", "cnn6", "resnet18"])
@pytest.mark.parametrize("attack", [GradientMatching(steps=5), see_through_gradients(steps=5, restarts=2)])
def test_a_graph_does_what_the_steps_do(name, attack, monkeypatch):
    seen = uploads(model(name).cuda(), on_gpu(), DualPrune())
    graphed = attack.run_many(seen, rngs(3))
    monkeypatch.setattr(optimise, "captured", lambda step, buffers: step)
    eager = attack.run_many(seen, rngs(3))
    for one, two in zip(graphed, eager, strict=True):
        # The sign of a slope near zero may differ by rounding, so a few pixels may have gone the other way.
        assert float(((one.inputs - two.inputs).abs() < 1e-3).float().mean()) > 0.95


def test_the_gpu_finds_what_the_cpu_finds():
    attack = GradientMatching(steps=120, lr=0.2, decay="cosine", tv=3e-2)
    on_cpu = attack.run_many(uploads(model(), [batch(0)]), rngs(1))[0]
    found = attack.run_many(uploads(model().cuda(), on_gpu(1)), rngs(1))[0]
    assert found.inputs.is_cuda
    assert found.loss == pytest.approx(on_cpu.loss, rel=0.5)


def test_recording_leaves_no_trace():
    counter = torch.zeros((), device="cuda")

    def step() -> None:
        counter.add_(1)

    replay = captured(step, [counter])
    assert replay is not step
    assert float(counter) == 0
    replay()
    replay()
    assert float(counter) == 2


def test_a_step_that_waits_for_the_cpu_runs_eagerly(caplog):
    counter = torch.zeros((), device="cuda")

    def step() -> None:
        counter.add_(float(counter) + 1)

    assert captured(step, [counter]) is step
    assert float(counter) == 0
    assert "cannot be recorded" in caplog.text
    assert float(torch.ones(3, device="cuda").sum()) == 3


def test_rounding_is_imitated_on_the_gpu_too():
    seen = uploads(model().cuda(), on_gpu(2), Quantize(1))
    found = GradientMatching(steps=5).run_many(seen, rngs(2))
    assert all(torch.isfinite(one.inputs).all() for one in found)


def test_what_does_not_fit_is_attacked_in_halves(monkeypatch):
    seen = uploads(model().cuda(), on_gpu(3))
    attack, sizes = GradientMatching(steps=2), []
    real = GradientMatching._together

    def small(self, clients) -> list:
        sizes.append(len(clients))
        if len(clients) > 1:
            raise torch.cuda.OutOfMemoryError("pretended")
        return real(self, clients)

    monkeypatch.setattr(GradientMatching, "_together", small)
    assert len(attack.run_many(seen, rngs(3))) == 3
    assert sizes == [3, 1, 2, 1, 1]


def test_full_precision_is_a_matter_of_the_attack_alone():
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    with full_precision():
        assert not torch.backends.cudnn.allow_tf32
    assert (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()) == before


def test_rounds_together_on_the_gpu():
    seen = rounds(model("cnn6").cuda(), on_gpu(3), dgp())
    found = Joint(GradientMatching(steps=5), rounds=2).run(seen, rngs(1)[0])
    assert found.inputs.is_cuda
    assert torch.isfinite(found.inputs).all()


def test_the_model_stays_where_and_as_it_was():
    net: nn.Module = model("resnet18").cuda()
    before: dict[str, Tensor] = copy.deepcopy(net.state_dict())
    seen = uploads(net, on_gpu(2))
    replace(GradientMatching(), steps=3).run_many(seen, rngs(2))
    assert all(torch.equal(t, before[name]) for name, t in seen[0].model.state_dict().items())
