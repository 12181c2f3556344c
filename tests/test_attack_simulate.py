"""The attacker's simulated clients against plain autograd on real ones."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from gradveil.attacks.layers import Layered, UnsupportedError
from gradveil.attacks.simulate import Vmapped, simulator
from gradveil.core import Batch
from gradveil.gradients import gradient

from .attack_kit import PHOTOS, batch, fedavg, model, observe, uploads

ROWS = [batch(0, 2), batch(2, 2), batch(4, 2)]


def stack(batches):
    return torch.stack([b.inputs for b in batches]), torch.stack([b.labels for b in batches])


def truth(net, batches):
    flat = [gradient(copy.deepcopy(net), cross_entropy, b) for b in batches]
    return torch.stack([torch.cat([g.flatten() for g in one.values()]) for one in flat])


def mixed() -> nn.Module:
    """Every layer with a rule, and in-place activations."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, dilation=2)]
    norms = [nn.GroupNorm(2, 6), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(96, 5), nn.LayerNorm(5), nn.ReLU()]
    head = nn.Linear(5, PHOTOS.num_classes)
    return nn.Sequential(*body, *norms, head).eval()


@pytest.mark.parametrize("name", ["lenet", "cnn6", "vgg11", "resnet18", "mixed"])
def test_layer_rules_equal_autograd(name):
    net = mixed() if name == "mixed" else model(name)
    rules = Layered(net, cross_entropy, [n for n, _ in net.named_parameters()], statistics=False)
    found = rules(*stack(ROWS))[0].detach()
    right = truth(net, ROWS)
    assert torch.linalg.vector_norm(found - right) < 1e-5 * torch.linalg.vector_norm(right)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["cnn6", "mixed"])
def test_second_derivatives_equal_vmap(name, size):
    net = mixed() if name == "mixed" else model(name)
    rows = [Batch(row.inputs[:size], row.labels[:size]) for row in ROWS]
    seen = uploads(net, rows[:1])[0]
    x, y = stack(rows)
    slopes = []
    for simulate in (Layered(net, cross_entropy, list(seen.grads), False), Vmapped(seen, False, False)):
        mine = x.clone().requires_grad_()
        slopes.append(torch.autograd.grad(simulate(mine, y)[0].square().sum(), mine)[0])
    assert torch.linalg.vector_norm(slopes[0] - slopes[1]) < 1e-5 * torch.linalg.vector_norm(slopes[1])


def test_the_model_is_left_alone():
    net = model("resnet18")
    before = copy.deepcopy(net.state_dict())
    seen = uploads(net, ROWS[:1])[0]
    simulator(seen)(*stack(ROWS))
    assert all(torch.equal(t, before[name]) for name, t in seen.model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in seen.model.parameters())


class Odd(nn.Module):
    """Looks like layers with rules, but uses one of its outputs in place: the check must notice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, 2), nn.Linear(4 * 49, PHOTOS.num_classes)

    def forward(self, x):
        return self.head(torch.relu_(self.conv(x)).flatten(1))


@pytest.mark.parametrize("net", [nn.Conv2d(3, 6, 3, groups=3), Odd()])
def test_what_no_rule_covers_goes_through_vmap(net):
    torch.manual_seed(0)
    whole = (
        net
        if isinstance(net, Odd)
        else nn.Sequential(net, nn.ReLU(), nn.Flatten(), nn.Linear(6 * 196, PHOTOS.num_classes))
    )
    seen = uploads(whole.eval(), ROWS[:1])[0]
    simulate = simulator(seen)
    assert isinstance(simulate, Vmapped)
    found, right = simulate(*stack(ROWS))[0], truth(whole, ROWS)
    assert torch.linalg.vector_norm(found - right) < 1e-5 * torch.linalg.vector_norm(right)


def test_batch_statistics_in_training_mode_and_untouched_buffers():
    net = mixed().train()
    seen = uploads(copy.deepcopy(net), ROWS[:1])[0]
    with pytest.raises(UnsupportedError, match="mixes"):
        Layered(net, cross_entropy, list(seen.grads), False)
    before = copy.deepcopy(seen.model.state_dict())
    found, right = simulator(seen)(*stack(ROWS))[0], truth(net, ROWS)
    assert torch.linalg.vector_norm(found - right) < 1e-5 * torch.linalg.vector_norm(right)
    assert all(torch.equal(t, before[name]) for name, t in seen.model.state_dict().items())


def frozen_batchnorm() -> nn.Module:
    """In training mode but for its BatchNorm, which goes by running statistics that are not the batch's."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 10))
    net[1].running_mean += 0.3
    net.train()[1].eval()
    return net


def normed(*norms: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), *norms, nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 10)).train()


TWICE = nn.LayerNorm([4, 4, 4])
NORMS = {
    "batch": lambda: normed(nn.BatchNorm2d(4)),
    "batch, bare": lambda: normed(nn.BatchNorm2d(4, affine=False, track_running_stats=False)),
    "batch, frozen": frozen_batchnorm,
    "instance": lambda: normed(nn.InstanceNorm2d(4, affine=True)),
    "layer, twice": lambda: normed(TWICE, TWICE),
    "group": lambda: normed(nn.GroupNorm(2, 4)),
}


@pytest.mark.parametrize("name", NORMS)
def test_second_derivatives_of_normalisation_equal_plain_autograd(name):
    torch.manual_seed(0)
    net = NORMS[name]().double()
    rows = [Batch(b.inputs.double(), b.labels) for b in ROWS]
    seen = uploads(net, rows[:1])[0]
    x, y = stack(rows)
    mine = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(Vmapped(seen, False, False)(mine, y)[0].square().sum(), mine)
    for i, row in enumerate(x):
        own = row.clone().requires_grad_()
        again = copy.deepcopy(net)
        loss = cross_entropy(again(own), y[i])
        grads = torch.autograd.grad(loss, list(again.parameters()), create_graph=True)
        (right,) = torch.autograd.grad(sum(g.square().sum() for g in grads), own)
        assert torch.linalg.vector_norm(found[i] - right) < 1e-9 * torch.linalg.vector_norm(right)


@pytest.mark.parametrize("training", [False, True])
def test_statistics_gap_by_both_ways(training):
    net = model("vgg11").train(training)
    seen = uploads(net, ROWS[:1])[0]
    _, gap = simulator(seen, statistics=True)(*stack(ROWS))
    _, again = Vmapped(seen, True, False)(*stack(ROWS))
    assert gap is not None
    assert again is not None
    assert gap.shape == (3,)
    assert torch.allclose(gap, again, rtol=1e-4)


@pytest.mark.parametrize("steps", [1, 3])
def test_local_steps_equal_a_fedavg_client(steps):
    seen = fedavg(model("lenet"), ROWS[0], steps=steps, lr=0.1)
    right = torch.cat([g.flatten() for g in seen.grads.values()])
    for simulate in (simulator(seen), Vmapped(seen, False, False)):
        found = simulate(*stack(ROWS[:1]))[0][0]
        assert torch.linalg.vector_norm(found - right) < 1e-4 * torch.linalg.vector_norm(right)


def test_local_steps_on_shares_of_the_examples():
    from gradveil.defenses import Identity
    from gradveil.gradients import local_update, parameters
    from gradveil.veil import Veil

    net, whole = model("lenet"), ROWS[0]
    parts = [Batch(whole.inputs[i : i + 1], whole.labels[i : i + 1]) for i in range(2)]
    update = local_update(copy.deepcopy(net), cross_entropy, parts, 0.1)
    payload = Veil(Identity(), parameters(net), seed=0).seal(update, 2)
    seen = observe(payload, net, whole, Identity(), local_steps=2, local_lr=0.1)
    found = simulator(seen, split=True)(*stack([whole]))[0][0]
    right = torch.cat([g.flatten() for g in update.values()])
    assert torch.linalg.vector_norm(found - right) < 1e-4 * torch.linalg.vector_norm(right)
