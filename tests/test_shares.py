"""The largest share of one example in a gradient, against gradients computed one by one."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from gradveil import Batch, Hardened, Veil, shares, unseal
from gradveil.cli import app, commands
from gradveil.core import Grads
from gradveil.errors import NeedError
from gradveil.gradients import gradient, parameters
from gradveil.shares import Watch, gradient_and_shares

from . import attack_kit as kit

assert commands  # importing it registers the commands
SHAPE = (4, 6, 6)
Oracle = dict[str, float]


def batch(count: int = 5, shape: tuple[int, ...] = SHAPE) -> Batch:
    rng = torch.Generator().manual_seed(1)
    scale = torch.logspace(-1, 1, count).view(-1, *[1] * len(shape))  # some examples weigh more than others
    return Batch(scale * torch.randn(count, *shape, generator=rng), torch.arange(count) % 3)


def one_by_one(model: nn.Module, given: Batch) -> Oracle:
    """Return the largest shares by the obvious way, which holds where examples do not mix."""
    ones: list[Grads] = [gradient(model, cross_entropy, Batch(x[None], y[None])) for x, y in zip(*given, strict=True)]
    rms = {name: [float(one[name].square().mean().sqrt()) for one in ones] for name in ones[0]}
    return {name: max(each) / len(given.labels) for name, each in rms.items()}


def agree(model: nn.Module, given: Batch, rel: float = 1e-4) -> None:
    grads, found = gradient_and_shares(model, cross_entropy, given)
    plain = gradient(model, cross_entropy, given)
    assert all(torch.equal(g, plain[name]) for name, g in grads.items())
    assert {n: float(v) for n, v in found.items()} == pytest.approx(one_by_one(model, given), rel=rel, abs=1e-9)


@pytest.fixture
def only_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("this model should not need to be looked at one by one")

    monkeypatch.setattr(shares, "_one_by_one", fail)


@pytest.mark.usefixtures("only_fast")
@pytest.mark.parametrize("name", ["lenet", "cnn6", "mlp", "vgg11", "resnet18"])
def test_the_models_of_the_paper(name: str) -> None:
    agree(kit.model(name), kit.batch(0, 3), rel=1e-3)


def net(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(width, 3))


class Tokens(nn.Module):
    """Linear layers over places, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(36, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 8, bias=False))
        self.norm, self.head = nn.LayerNorm((4, 8)), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(self.body(x.flatten(2))).flatten(1))
        return out


def frozen() -> nn.Module:
    made = net(nn.Conv2d(4, 5, 3), nn.ReLU(), width=80)
    made[0].weight.requires_grad_(False)  # type: ignore[index,union-attr]
    return made


KNOWN: dict[str, Callable[[], nn.Module]] = {
    "grouped, strided, dilated": lambda: net(
        nn.Conv2d(4, 6, 3, padding=(2, 1), stride=2, groups=2), nn.Tanh(), nn.Conv2d(6, 8, 2, dilation=2), width=16
    ),
    "overwritten in place": lambda: net(nn.Conv2d(4, 5, 3), nn.ReLU(inplace=True), nn.Conv2d(5, 6, 2), width=54),
    "group norm": lambda: net(nn.Conv2d(4, 6, 3, bias=False), nn.GroupNorm(3, 6), nn.ReLU(inplace=True), width=96),
    "batch norm at rest": lambda: net(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), width=96).eval(),
    "tokens": Tokens,
    "a frozen weight": frozen,
}


@pytest.mark.usefixtures("only_fast")
@pytest.mark.parametrize("kind", KNOWN)
def test_known_layers(kind: str) -> None:
    torch.manual_seed(0)
    agree(KNOWN[kind](), batch())


@pytest.mark.usefixtures("only_fast")
def test_slopes_that_cancel_without_batchnorm_leave_shares_as_they_are() -> None:
    """As in a fresh classifier with as many examples of each class."""
    model = net(width=144)
    nn.init.zeros_(model[-1].weight)  # type: ignore[index,arg-type]
    nn.init.zeros_(model[-1].bias)  # type: ignore[index,arg-type]
    agree(model, batch(6))


class Twice(nn.Module):
    """Uses a weight twice: by calling its layer again, past the layer, or through another layer that holds it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.first, self.head = how, nn.Linear(144, 144), nn.Linear(144, 3)
        self.second = nn.Linear(144, 144)
        if how == "tied":
            self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x.flatten(1)))
        if self.how == "called":
            hidden = self.first(hidden)
        if self.how == "past":
            hidden = F.linear(hidden, self.first.weight)
        out: Tensor = self.head(self.second(hidden))
        return out


class Looks(nn.Module):
    """Takes whole batches only, if `whole`; else its gradient is what any other's is."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.weight, self.whole = nn.Parameter(torch.randn(3, 144)), whole

    def forward(self, x: Tensor) -> Tensor:
        if self.whole and len(x) == 1:
            raise ValueError("a batch of one")
        out = x.flatten(1) @ self.weight.T
        return out if out.sum().item() > 0 else out * 1.0


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(36, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x.flatten(2))[0][:, -1])
        return out


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "called twice": lambda: Twice("called"),
    "used past its layer": lambda: Twice("past"),
    "tied": lambda: Twice("tied"),
    "a weight of no layer": Looks,
    "lstm": Sequence,
    "padded by name": lambda: net(nn.Conv2d(4, 5, 3, padding="same"), width=180),
    "a kind not known": lambda: net(nn.Flatten(2), nn.Conv1d(4, 5, 3), width=170),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_models_are_looked_at_one_by_one(kind: str) -> None:
    torch.manual_seed(0)
    agree(OTHERS[kind](), batch())


def test_where_batchnorm_mixes_each_example_has_what_passes_through_its_own_activations(only_fast: None) -> None:
    """By the obvious way: every example gets a copy of each weight, and its share is the gradient in that copy."""
    torch.manual_seed(0)
    model, given = net(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True), width=80).train(), batch()
    conv, norm, _, _, head = model  # type: ignore[misc]
    count, own = len(given.labels), {}
    for name, p in model.named_parameters():
        own[name] = p.detach().expand(count, *p.shape).clone().requires_grad_()
    maps = torch.cat(
        [F.conv2d(x[None], w, b) for x, w, b in zip(given.inputs, own["0.weight"], own["0.bias"], strict=True)]
    )
    normal = F.batch_norm(maps, None, None, training=True, eps=norm.eps)
    hidden = (normal * own["1.weight"][..., None, None] + own["1.bias"][..., None, None]).relu().flatten(1)
    out = torch.einsum("ni,noi->no", hidden, own["4.weight"]) + own["4.bias"]
    slopes = torch.autograd.grad(cross_entropy(out, given.labels), list(own.values()))
    each = dict(zip(own, slopes, strict=True))
    # What is common to all patches, and a bias, BatchNorm takes out again: shares along them cancel.
    common = F.unfold(given.inputs, 3).mean((0, 2)).view(4, 3, 3)
    each["0.weight"] = each["0.weight"] - each["0.bias"][:, :, None, None, None] * common
    each["0.bias"] = torch.zeros_like(each["0.bias"])
    expected = {n: float(g.flatten(1).square().mean(1).sqrt().amax()) for n, g in each.items()}
    assert torch.allclose(each["0.weight"].sum(0), gradient(model, cross_entropy, given)["0.weight"], atol=1e-5)
    _, found = gradient_and_shares(model, cross_entropy, given)
    assert {n: float(v) for n, v in found.items()} == pytest.approx(expected, rel=1e-3, abs=1e-6)
    assert isinstance(conv, nn.Conv2d)
    assert isinstance(head, nn.Linear)


def test_a_watch_follows_passes_that_add_up_in_a_loop_of_ones_own() -> None:
    torch.manual_seed(0)
    model, given = KNOWN["group norm"](), batch(6)
    expected = one_by_one(model, given)
    with Watch(model) as watch:
        for _ in range(2):  # what was asked for once does not count again
            model.zero_grad()
            for rows in ([0, 1], [2, 3, 4, 5]):
                inputs, labels = given.inputs[rows], given.labels[rows]
                (len(rows) / 6 * cross_entropy(model(inputs), labels)).backward()
                with torch.no_grad():
                    model(given.inputs)  # a look at the accuracy brings nothing
                model(given.inputs)  # nor does a pass without a way back
            found = watch.largest({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
            assert found is not None
            assert {n: float(v) for n, v in found.items()} == pytest.approx(expected, rel=1e-4)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("how", ["scaled", "clipped", "by name", "rows are not examples"])
def test_a_watch_does_not_guess(how: str) -> None:
    """A gradient that somebody changed, or inputs whose rows no layer shows, are told from shares."""
    torch.manual_seed(0)
    model, given = KNOWN["tokens"](), batch()
    if how == "rows are not examples":
        model = nn.Sequential(nn.Flatten(0, 1), nn.Flatten(), nn.Linear(36, 3))
        given = Batch(given.inputs, given.labels.repeat_interleave(4))
    with Watch(model) as watch:
        out = model(x=given.inputs) if how == "by name" else model(given.inputs)
        cross_entropy(out, given.labels).backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        if how in ("scaled", "clipped"):
            grads = {name: g * (0.5 if how == "clipped" else 1024.0) for name, g in grads.items()}
        assert (watch.largest(grads) is None) == (how != "by name")


@pytest.mark.parametrize("padding", [1, "same"])  # the second is looked at one by one
def test_a_model_is_left_as_one_gradient_leaves_it(padding: int | str) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 5, 3, padding=padding))
    model = net(*layers, width=80).train()
    other = copy.deepcopy(model)
    _, found = gradient_and_shares(model, cross_entropy, batch())
    gradient(other, cross_entropy, batch())
    assert all(torch.equal(b, same) for b, same in zip(model.buffers(), other.buffers(), strict=True))
    assert all(module.training and not module._forward_hooks for module in model.modules())
    assert all(math.isfinite(float(share)) for share in found.values())


def test_half_precision_is_not_mistaken_for_another_use_of_a_weight(only_fast: None) -> None:
    model, given = kit.model("resnet18"), kit.batch(0, 4)
    _, exact = gradient_and_shares(model, cross_entropy, given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, found = gradient_and_shares(model, cross_entropy, given)
    assert {n: float(v) for n, v in found.items()} == pytest.approx({n: float(v) for n, v in exact.items()}, rel=0.1)


def test_a_model_that_needs_whole_batches_says_what_to_do_and_sends_nothing() -> None:
    model, given = Looks(whole=True), batch(32)
    veil = Veil(Hardened(), parameters(model), seed=0, guard=None)
    with pytest.raises(NeedError, match=r"a batch of one.*hardened\(balance=0\)"):
        veil.protect(model, cross_entropy, given)
    assert veil.round == 0
    loose = Veil(Hardened(balance=0), parameters(model), seed=0, guard=None)
    assert any(bool(t.any()) for t in unseal(loose.protect(model, cross_entropy, given)).values())


def test_bench_protect_tells_every_release_over_the_gradient_alone(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    words = ["bench", "protect", "--model", "lenet", "--batch-size", "4", "--repeats", "2", "--json", str(file)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    times = json.loads(file.read_text())["ms"]
    assert list(times) == ["gradient alone", "none", "dgp", "hardened(balance=0)", "hardened"]
    assert all(len(each) == 2 and min(each) > 0 for each in times.values())
