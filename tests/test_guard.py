"""Planted models are refused, honest ones pass. `examples/guard_rates.py` measures the rates over many seeds."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from gradveil import Batch, Identity, Veil, dgp
from gradveil.attacks.imprint import Imprint
from gradveil.attacks.spotlight import Spotlight
from gradveil.attacks.traps import TrapWeights
from gradveil.cli import app
from gradveil.cli import commands as _commands  # noqa: F401
from gradveil.data import load
from gradveil.errors import GradientError, GuardError, StateError
from gradveil.gradients import gradient, parameters
from gradveil.guard import REMEMBERED, Guard, Seen, fingerprint
from gradveil.guard.looks import low_band, nested_shares, sketched
from gradveil.models import build
from gradveil.training import Settings, Trainer, assemble
from gradveil.training.fast import FastTrainer

PHOTOS = load("photos", split="test")
SHAPE = PHOTOS.input_shape
SMALL = ["lenet", 'lenet(init="default")', "cnn6", "mlp", "mlp(hidden=64)"]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(name: str, seed: int = 0, shape: tuple[int, ...] = SHAPE, classes: int = 10) -> nn.Module:
    return build(name, num_classes=classes, input_shape=shape, seed=seed)


def findings(net: nn.Module, shape: tuple[int, ...] | None = SHAPE, seed: int = 0) -> list[str]:
    return [str(f) for f in Guard().inspect(net, input_shape=shape, rng=rng(1000 + seed))]


def written(noise: float = 0.0, used: float = 1.0, measure: str = "mean", seed: int = 0) -> nn.Module:
    """Return a perceptron whose own first layer sorts pictures: rows permuted, scaled, and hidden in noise."""
    net = model("mlp", seed)
    layer = net.get_submodule("features.1")
    rows, pixels = 256, math.prod(SHAPE)
    order = torch.randperm(rows, generator=rng(seed))[: int(used * rows)]
    row = torch.ones(pixels) if measure == "mean" else torch.randn(pixels, generator=rng(seed))
    extra = torch.randn(len(order), pixels, generator=rng(seed + 1))
    extra *= noise * row.norm() / extra.norm(dim=1, keepdim=True)
    gains = 0.5 + torch.rand(len(order), 1, generator=rng(seed + 2))
    seen = PHOTOS.batch(range(60)).inputs.flatten(1) @ row
    thresholds = seen.mean() + seen.std() * torch.special.ndtri((torch.arange(len(order)) + 0.5) / len(order))
    with torch.no_grad():
        layer.weight[order] = gains * (row + extra)
        layer.bias[order] = -gains[:, 0] * thresholds
    return net


# What must be refused


@pytest.mark.parametrize("defense", [None, dgp()], ids=["plain", "decoys and dead rows"])
@pytest.mark.parametrize(("name", "bins"), [("lenet", 50), ("lenet", 1000), ("cnn6", 200), ("mlp", 400)])
def test_an_imprint_in_front_of_a_model_is_refused(name, bins, defense):
    planted = Imprint(bins=bins).fitted(defense, PHOTOS.mean, PHOTOS.std).plant(model(name), SHAPE, rng())
    assert "bins" in " ".join(findings(planted))
    assert findings(planted, shape=None)
    with pytest.raises(GuardError, match="adds"):
        Guard.pin(model(name)).admit(planted)


@pytest.mark.parametrize("connection", ["linear", "addition"])
@pytest.mark.parametrize("measure", ["fourier", "avg", "randn", "rand"])
def test_the_published_imprint_is_refused_with_every_measurement(measure, connection):
    pixels, bins = math.prod(SHAPE), 100
    row = {
        "fourier": torch.cos(math.pi / pixels * (torch.arange(pixels) + 0.5) * 32) * 128 / pixels,
        "avg": torch.ones(pixels) / pixels,
        "randn": torch.randn(pixels, generator=rng()) / math.sqrt(pixels),
        "rand": torch.rand(pixels, generator=rng()) / pixels,
    }[measure]
    first = nn.Linear(pixels, bins)
    with torch.no_grad():
        first.weight.copy_(1e-3 * row.expand(bins, -1))
        first.bias.copy_(-1e-3 * torch.special.ndtri((torch.arange(bins) + 0.5) / bins))
    back = nn.Linear(bins, pixels) if connection == "linear" else nn.AvgPool1d(bins)
    assert findings(nn.Sequential(nn.Flatten(), first, nn.ReLU(), back))


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2])
def test_trap_weights_are_refused(share):
    trapped = TrapWeights(share=share).plant(model("mlp"), SHAPE, rng())
    assert "trap" in findings(trapped)[0]


def test_traps_that_use_the_mean_of_the_pixels_are_refused():
    net = model("mlp")
    layer = net.get_submodule("features.1")
    half = torch.rand(256, math.prod(SHAPE) // 2, generator=rng())
    mirrored = torch.cat([half, -1.05 * half], 1)
    with torch.no_grad():
        for i in range(256):
            layer.weight[i] = mirrored[i, torch.randperm(mirrored.shape[1], generator=rng(i))]
    assert "trap" in findings(net)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"noise": 0.3},
        {"noise": 10.0},
        {"used": 0.5},
        {"used": 0.25, "noise": 1.0},
        {"used": 0.05},
        {"measure": "random"},
        {"measure": "random", "noise": 0.3},
    ],
    ids=str,
)
def test_an_imprint_in_the_models_own_layer_is_refused(settings):
    for seed in range(3):
        net = written(seed=seed, **settings)
        assert fingerprint(net) == fingerprint(model("mlp"))
        assert findings(net, seed=seed)


# What must pass


@pytest.mark.parametrize("name", SMALL)
def test_fresh_models_pass(name):
    for seed in range(12):
        shape = (SHAPE, (1, 28, 28), (1, 8, 8), (3, 48, 48))[seed % 4]
        net = model(name, seed, shape, (10, 100)[seed % 2])
        assert findings(net, shape, seed) == []
        assert findings(net, None, seed) == []
        assert findings(copy.deepcopy(net).bfloat16(), shape, seed) == []


@pytest.mark.parametrize("name", ["vgg11", "resnet18"])
def test_deep_models_pass_fresh_and_after_steps(name):
    net = model(name)
    veil = Veil(Identity(), parameters(net), seed=0)
    for step in range(2):
        batch = PHOTOS.batch(range(2 * step, 2 * step + 2))
        veil.protect(net, cross_entropy, batch)
        sgd(net, batch, 0.01)


@pytest.mark.parametrize(("name", "lr"), [("lenet", 0.1), ("mlp", 0.05), ("cnn6", 0.01)])
@pytest.mark.parametrize("decay", [0.0, 1e-2])
def test_training_passes_round_after_round(name, lr, decay):
    digits = load("digits")
    net = model(name, 0, digits.input_shape)
    guard, seen = Guard.pin(net, repeats=0), None
    for step in range(100):
        batch = digits.batch(range(32 * (step % 40), 32 * (step % 40) + 32))
        if step % 5 == 0:
            seen = guard.admit(net, seen, input_shape=digits.input_shape, rng=rng(step))
        sgd(net, batch, lr, decay)
    for changed in (pruned(net), dead(net)):
        assert findings(changed, digits.input_shape) == []


def sgd(net: nn.Module, batch: Batch, lr: float, decay: float = 0.0) -> None:
    params = dict(net.named_parameters())
    for name, g in gradient(net, cross_entropy, batch).items():
        params[name].data.mul_(1 - lr * decay).sub_(g, alpha=lr)


def pruned(net: nn.Module) -> nn.Module:
    out = copy.deepcopy(net)
    for p in out.parameters():
        if p.ndim > 1:
            p.data[p.abs() < p.abs().flatten().quantile(0.9)] = 0
    return out


def dead(net: nn.Module) -> nn.Module:
    out = copy.deepcopy(net)
    for p in out.parameters():
        p.data[: len(p) // 2] = 0
    return out


def test_equal_rows_with_equal_thresholds_sort_nothing_but_repeat():
    net = model("mlp")
    layer = net.get_submodule("features.1")
    with torch.no_grad():
        layer.weight.copy_((layer.weight[:1] - layer.weight[:1].mean()).expand(256, -1))
        layer.bias.zero_()
    assert findings(net) == ["features.1: 100% of its rows repeat another one (an imprint, or all silent but a few)"]


# The looks


def test_the_low_band_foretells_how_measurements_of_photos_correlate():
    rows = torch.randn(40, math.prod(SHAPE), generator=rng())
    measured = torch.corrcoef(rows @ load("photos").batch(range(400)).inputs.flatten(1).T)
    look = low_band(rows, SHAPE)
    units = look / look.norm(dim=1, keepdim=True)
    pairs = torch.triu_indices(40, 40, 1)
    both = torch.stack([measured[pairs[0], pairs[1]], (units @ units.T)[pairs[0], pairs[1]]])
    assert float(torch.corrcoef(both)[0, 1]) > 0.7
    unmoved = rows @ load("photos").batch(range(400)).inputs.flatten(1).T
    assert float((look.norm(dim=1) / unmoved.std(1)).median()) == pytest.approx(1, abs=0.35)


def test_a_sketch_keeps_angles():
    rows = torch.randn(20, 1000, generator=rng())
    rows[1] = -2 * rows[0]
    sketch = sketched(rows, rng(1))
    assert torch.allclose(sketch[1], -2 * sketch[0], atol=1e-3)
    assert float((sketch.norm(dim=1) / rows.norm(dim=1) - 1).abs().max()) < 0.35


def test_rows_nest_where_the_gap_exceeds_the_jitter():
    base, other = torch.eye(2)

    def share(noise: float, gap: float) -> float:
        rows = torch.stack([base, base + noise * other])[None]
        return nested_shares(rows, torch.tensor([0.0, gap]))[0]

    assert share(0.1, 0.5) == 1
    assert share(0.1, 0.01) == 0
    assert share(2.0, 0.5) == 0


# The shell


def private() -> Batch:
    return PHOTOS.batch(range(4))


def test_the_shell_refuses_before_anything_is_computed():
    planted = Imprint().fitted(None, PHOTOS.mean, PHOTOS.std).plant(model("lenet"), SHAPE, rng())
    calls: list[int] = []
    planted.register_forward_hook(lambda *_: calls.append(1))
    veil = Veil(dgp(), parameters(planted), seed=0)
    with pytest.raises(GuardError, match=r"imprint\.measure"):
        veil.protect(planted, cross_entropy, private())
    assert not calls
    assert veil.round == 0
    assert Veil(dgp(), parameters(planted), seed=0, guard=None).protect(planted, cross_entropy, private()).nbytes


def test_what_arrives_first_is_pinned_and_survives_a_restart(tmp_path):
    net = model("mlp")
    veil = Veil(dgp(), parameters(net), seed=0)
    veil.protect(net, cross_entropy, private())
    veil.save(tmp_path / "state.safetensors")
    again = Veil(dgp(), parameters(net), seed=5)
    again.load(tmp_path / "state.safetensors")
    other = copy.deepcopy(net)
    other.add_module("extra", nn.Identity())
    for shell in (veil, again):
        with pytest.raises(GuardError, match="not the one you defined"):
            shell.protect(other, cross_entropy, private())
        with pytest.raises(GuardError, match=r"changed by .* since the last round"):
            shell.protect(model("mlp", seed=3), cross_entropy, private())
        shell.protect(net, cross_entropy, private())
    with pytest.raises(StateError, match="guard"):
        Seen.from_state_dict({"structure": torch.zeros(1, dtype=torch.uint8)})


def test_a_model_that_never_changes_is_refused_if_asked():
    net = model("lenet")
    veil = Veil(dgp(), parameters(net), guard=Guard.pin(net, repeats=1))
    veil.protect(net, cross_entropy, private())
    veil.protect(net, cross_entropy, private())
    with pytest.raises(GuardError, match=r"same weights came 3 times \(a frozen model\)"):
        veil.protect(net, cross_entropy, private())


def test_a_frozen_model_is_refused_however_it_is_disguised():
    net, other = model("cnn6"), model("cnn6")
    sgd(other, private(), 0.01)
    guard = Guard.pin(net, repeats=0)
    seen = guard.admit(other, guard.admit(net))  # a model that was trained is welcome
    edited = copy.deepcopy(net)
    edited.get_submodule("features.0").weight.data[0, 0, 0, 0] += 0.1
    last = copy.deepcopy(net)
    list(last.parameters())[-1].data *= 1.01
    for frozen in (net, other, edited, last):
        with pytest.raises(GuardError, match="frozen"):
            guard.admit(frozen, seen)
    assert isinstance(Guard.pin(net).admit(net, seen), Seen)  # not unless asked
    again = Seen.from_state_dict(seen.state_dict())
    with pytest.raises(GuardError, match="frozen"):
        guard.admit(net, again)


def test_a_model_that_has_learned_its_data_by_heart_does_not_count_as_frozen():
    """The slowest honest training: next to no loss is left, ten clients, the paper's last learning rate."""
    settings = Settings("mlp(hidden=64)", "digits", users=10, rounds=400, lr="0.1", eval_every=1000)
    job = assemble(settings)
    for record in FastTrainer(job):
        loss = record.loss
    assert loss < 0.1
    trainer = Trainer(assemble(replace(settings, rounds=30, lr="0.005"), model=job.model))
    guard, seen = Guard.pin(job.model, repeats=0), None
    for _ in trainer:
        seen = guard.admit(trainer.model, seen)
    assert len(seen.sketches) == REMEMBERED


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_a_layer_swapped_in_mid_training_is_refused_at_any_scale(size):
    net = model("cnn6")
    seen = Guard().admit(net)
    conv = net.get_submodule("features.2")
    conv.weight.data = size * torch.randn(conv.weight.shape, generator=rng()) * conv.weight.data.std()
    with pytest.raises(GuardError, match=r"features\.2: it changed"):
        Guard().admit(net, seen)
    assert isinstance(Guard(jump=None).admit(net, seen), Seen)


@pytest.mark.parametrize("rows", [13, 40])
def test_a_few_rows_or_the_biases_swapped_in_call_for_another_look(rows):
    for seed in range(4):
        net, planted = model("mlp", seed), written(used=rows / 256, seed=seed)
        seen = Guard().admit(net, rng=rng(seed))
        with pytest.raises(GuardError, match="bins"):
            Guard().admit(planted, seen, rng=rng(100 + seed))
        net.get_submodule("features.1").bias.data -= 1.0
        with pytest.raises(GuardError, match="trap"):
            Guard().admit(net, seen, rng=rng(100 + seed))


def test_plain_tensors_are_guarded_too():
    def tensors(net: nn.Module) -> dict[str, Tensor]:
        return parameters(net)

    seen = Guard().admit(tensors(model("mlp")))
    with pytest.raises(GuardError, match=r"features\.1"):
        Guard(jump=None).admit(tensors(written()), seen)


@pytest.mark.parametrize(
    "bad",
    [{"pairs": 2.0}, {"groups": 2.0}, {"traps": -1.0}, {"gain": 0.0}, {"jump": -1.0}, {"repeats": -1}, {"repeats": 16}],
)
def test_bad_limits_are_named(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        Guard(**bad)


def test_the_command_tells_honest_weights_from_planted_ones(tmp_path):
    file = tmp_path / "arrived.safetensors"
    save_file(written().state_dict(), file)
    runner = CliRunner()
    bad = runner.invoke(app, ["guard", "mlp", "--weights", str(file)])
    assert bad.exit_code == 1
    assert "features.1" in bad.output
    assert runner.invoke(app, ["guard", "mlp"]).exit_code == 0


@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e-30])
def test_an_imprint_cannot_hide_behind_tiny_weights(scale: float) -> None:
    net = model("mlp")
    layer = net.get_submodule("features.1")
    with torch.no_grad():
        layer.weight[130:] = scale / math.prod(SHAPE)
        layer.bias[130:] = -scale * torch.linspace(-1, 1, len(layer.bias) - 130)
    assert findings(net)


def test_a_dead_row_of_huge_weights_does_not_blind_the_memory() -> None:
    honest, swapped = model("mlp"), written()
    layer = swapped.get_submodule("features.1")
    with torch.no_grad():
        layer.weight[255], layer.bias[255] = 1e25, -3e38
    for guard in (Guard(), Guard(jump=None)):
        with pytest.raises(GuardError):
            guard.admit(swapped, guard.admit(honest, input_shape=SHAPE), input_shape=SHAPE)


def test_a_transposed_convolution_has_a_bias_of_another_length() -> None:
    for outputs in (8, 64):
        Guard().admit(nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.ConvTranspose2d(32, outputs, 8)))


def test_where_the_guard_looks_cannot_be_foreseen() -> None:
    net = model("lenet")
    assert len({Guard().admit(net).seed for _ in range(4)}) == 4


def test_a_batch_that_fails_does_not_count_as_a_look_at_the_model() -> None:
    net = model("lenet")
    veil = Veil(dgp(), parameters(net), guard=Guard.pin(net, repeats=0))
    good = PHOTOS.batch(range(2))
    with pytest.raises(GradientError):
        veil.protect(net, cross_entropy, Batch(good.inputs * math.nan, good.labels))

    def interrupted(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyboardInterrupt  # in a notebook

    with pytest.raises(KeyboardInterrupt):
        veil.protect(net, interrupted, good)
    veil.protect(net, cross_entropy, good)
    with pytest.raises(GuardError, match="frozen"):
        veil.protect(net, cross_entropy, good)


# A layer of which one row fires


def lit(net: nn.Module, silence: str = "copies", share: float = 0.25, batch: int = 32) -> nn.Module:
    attack = Spotlight(batch=batch, silence=silence, lit=share).fitted(None, PHOTOS.mean, PHOTOS.std)
    return attack.plant(net, SHAPE, rng())


@pytest.mark.parametrize("batch", [1, 32])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.25], ids=["one row", "few rows", "many rows"])
@pytest.mark.parametrize("silence", ["copies", "scattered", "outgoing"])
def test_a_planted_layer_of_which_few_rows_fire_is_refused(silence, share, batch):
    own = model("lenet")
    planted = lit(own, silence, share or 1e-9, batch)
    with pytest.raises(GuardError, match="not the one you defined"):
        Guard.pin(own).admit(planted, input_shape=SHAPE, rng=rng())
    for seed in range(3):
        with pytest.raises(GuardError, match="looks manipulated"):
            Guard().admit(planted, input_shape=SHAPE, rng=rng(seed))


def only_one_leads_on(head: Tensor) -> None:
    head[:, 1:] = 0


def the_others_lead_to_all_classes_alike(head: Tensor) -> None:
    head[:, 1:] = head[:1, 1:].clone()


def one_leads_on_much_more(head: Tensor) -> None:
    head[:, 0] *= 200


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (only_one_leads_on, "lead nowhere"),
        (the_others_lead_to_all_classes_alike, "lead nowhere"),
        (one_leads_on_much_more, "times as large"),
    ],
)
def test_an_own_unit_made_to_stand_out_is_refused(change, why):
    net = model("mlp")
    with torch.no_grad():
        change(net.get_parameter("classifier.weight"))
    assert why in findings(net)[0]


def test_a_layer_of_which_few_rows_are_not_zero_is_refused():
    net = model("mlp")
    with torch.no_grad():
        net.get_parameter("features.1.weight")[60:] = 0
    assert findings(net) == ["features.1: 77% of its rows are zero (all silent but a few)"]


def test_tables_of_indices_among_the_tensors_pass():
    tensors = {**dict(model("mlp").named_parameters()), "table": torch.arange(49 * 49).view(49, 49)}
    assert Guard().inspect(tensors, rng=rng()) == []


def test_a_layer_that_starts_at_zero_passes():
    net = model("mlp")
    nn.init.zeros_(net.get_parameter("classifier.weight"))
    assert findings(net) == []


@pytest.mark.parametrize("change", ["added", "other shape"])
def test_a_veil_refuses_parameters_that_are_not_its_own(change):
    own = model("lenet")
    other = lit(own) if change == "added" else model("lenet", classes=7)
    veil = Veil(dgp(), parameters(own))
    with pytest.raises(GuardError, match="not those this veil was made for"):
        veil.protect(other, cross_entropy, load("photos").batch(range(2)))
    assert veil.round == 0
    veil.admit(dict(own.state_dict()))
    with pytest.raises(GuardError, match="not those"):
        veil.admit({name: t for name, t in own.state_dict().items() if "weight" in name})


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_does_not_blind_the_guard(value: float) -> None:
    """Minus infinity before a ReLU never fires: the gradient stays finite, and would be sent."""
    net = written()
    with torch.no_grad():
        net.get_submodule("features.1").weight[0, 0] = value
    assert findings(net) == ["features.1.weight: it holds NaN or infinity"]
    bright = [i for i in range(60) if PHOTOS.batch([i]).inputs[0, 0, 0, 0] > 0]
    batch = PHOTOS.batch(bright[:4])
    assert all(torch.isfinite(g).all() for g in gradient(net, cross_entropy, batch).values()) == (value == -math.inf)
    with pytest.raises(GuardError, match="NaN or infinity"):
        Veil(dgp(), parameters(net)).protect(net, cross_entropy, batch)
