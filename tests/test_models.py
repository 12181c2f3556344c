import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradveil import models
from gradveil.core import Batch
from gradveil.errors import ConfigError, NeedError
from gradveil.gradients import gradient

CIFAR = (3, 32, 32)
# The paper's communication table rests on these counts: (10 classes, 100 classes, tensors)
COUNTS = {
    "lenet": (15_826, 85_036, 8),
    "cnn6": (154_256, 442_256, 7),
    "vgg11": (9_231_114, 9_277_284, 34),
    "resnet18": (11_173_962, 11_220_132, 62),
    "mlp": (3072 * 256 + 256 + 256 * 10 + 10, 3072 * 256 + 256 + 256 * 100 + 100, 4),
}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", models.MODELS)
def test_parameter_counts_are_the_papers(name: str):
    ten, hundred, tensors = COUNTS[name]
    model = models.build(name, num_classes=10, input_shape=CIFAR)
    assert size(model) == ten
    assert len(list(model.parameters())) == tensors
    assert size(models.build(name, num_classes=100, input_shape=CIFAR)) == hundred
    assert model.training


def test_the_paper_charges_these_mebibytes():
    up_and_down = {"lenet": 0.121, "cnn6": 1.177, "vgg11": 70.428, "resnet18": 85.251}
    for name, mebibytes in up_and_down.items():
        assert round(2 * COUNTS[name][0] * 4 / 2**20, 3) == mebibytes


def test_layer_tables():
    def shapes(name: str) -> list[tuple[int, ...]]:
        return [tuple(p.shape) for p in models.build(name, num_classes=10, input_shape=CIFAR).parameters()]

    conv, bias = (12, 12, 5, 5), (12,)
    assert shapes("lenet") == [(12, 3, 5, 5), bias, conv, bias, conv, bias, (10, 768), (10,)]
    assert [math.prod(s) for s in shapes("cnn6")] == [576, 3888, 11664, 11664, 20736, 73728, 32000]
    weights = [math.prod(s) + s[0] for s in shapes("vgg11") if len(s) == 4]
    assert weights == [1792, 73856, 295168, 590080, 1180160, 2359808, 2359808, 2359808]
    resnet = models.build("resnet18", num_classes=10, input_shape=CIFAR)
    assert [size(stage) for stage in resnet.get_submodule("features")][:5] == [1856, 147968, 525568, 2099712, 8393728]
    for name, count in (("vgg11", 5504), ("resnet18", 9600)):
        buffers = models.build(name, num_classes=10, input_shape=CIFAR).named_buffers()
        assert sum(b.numel() for key, b in buffers if "running" in key) == count


def test_feature_sizes_on_the_way():
    def sides(name: str) -> list[int]:
        x, found = torch.zeros(1, *CIFAR), []
        for layer in models.build(name, num_classes=10, input_shape=CIFAR).eval().get_submodule("features"):
            x = layer(x)
            found.append(x.shape[-1])
        return found

    assert sides("lenet")[::2] == [16, 8, 8]
    assert sides("cnn6")[::2] == [17, 9, 9, 9, 5, 5]
    assert sides("resnet18") == [32, 32, 16, 8, 4, 1]
    assert sides("vgg11")[-2:] == [1, 1]


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 48, 64), (4, 1, 5)])
@pytest.mark.parametrize("name", models.MODELS)
def test_any_picture_shape_trains(name: str, shape: tuple[int, ...]):
    model = models.build(name, num_classes=7, input_shape=shape).eval()
    batch = Batch(torch.rand(2, *shape), torch.tensor([0, 6]))
    assert model(batch.inputs).shape == (2, 7)
    assert all(g.isfinite().all() for g in gradient(model, F.cross_entropy, batch).values())


@pytest.mark.parametrize("name", ["lenet", "cnn6", "mlp", "resnet18"])
def test_the_seed_settles_every_weight_and_nothing_else_moves(name: str):
    torch.manual_seed(123)
    expected = torch.rand(3)
    torch.manual_seed(123)
    first, again, other = (models.build(name, num_classes=10, input_shape=CIFAR, seed=s) for s in (4, 4, 5))
    assert torch.equal(torch.rand(3), expected)
    for a, b, c in zip(first.parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c) or a.unique().numel() == 1


def test_initial_weights_are_the_published_ones():
    zhu = models.build("lenet", num_classes=10, input_shape=CIFAR)
    every = torch.cat([p.detach().flatten() for p in zhu.parameters()])
    assert 0.49 < every.abs().max() <= 0.5
    assert abs(float(every.std()) - 1 / math.sqrt(12)) < 0.01
    plain = models.build('lenet(init="default")', num_classes=10, input_shape=CIFAR)
    assert max(float(p.detach().abs().max()) for p in plain.parameters()) < 0.12
    spreads = {"resnet18": 1 / math.sqrt(3 * 27), "resnet18(init='kaiming')": math.sqrt(2 / (64 * 9))}
    for text, spread in spreads.items():
        conv = models.build(text, num_classes=10, input_shape=CIFAR).get_parameter("features.stem.0.weight")
        assert abs(float(conv.detach().std()) / spread - 1) < 0.1, text


def test_lenet_and_cnn6_use_their_activations():
    lenet, cnn6 = (models.build(n, num_classes=10, input_shape=CIFAR) for n in ("lenet", "cnn6"))
    assert sum(isinstance(m, nn.Sigmoid) for m in lenet.modules()) == 3
    assert [m.negative_slope for m in cnn6.modules() if isinstance(m, nn.LeakyReLU)] == [0.2] * 6


class Shuffled(nn.Module):
    """Registers its layers in another order than it uses them."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(5, num_classes)
        self.drop = nn.Dropout(0.5)
        self.norm = nn.BatchNorm1d(5)
        self.body = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(self.norm(self.body(x.flatten(1)))))
        return out


def any_shape(input_shape, **rest):
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), rest["num_classes"]))


def number():
    return 3


class WithFeatures(nn.Flatten):
    def forward(self, x):
        return super().forward(x)[:, :4], x


def wrong_width():
    return nn.Sequential(nn.Flatten(), nn.Linear(12, 9))


def test_models_by_import_path():
    here = __name__
    assert isinstance(models.build(f"{here}:Shuffled", num_classes=4, input_shape=(3, 2, 2)), Shuffled)
    assert models.build(f"{here}:any_shape", num_classes=4, input_shape=(1, 3, 3))(torch.zeros(1, 1, 3, 3)).shape == (
        1,
        4,
    )
    same = [models.build(f"{here}:Shuffled", num_classes=4, input_shape=(3, 2, 2), seed=1).head.weight for _ in "ab"]
    assert torch.equal(*same)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet81", "unknown model 'resnet81': did you mean resnet18"),
        ("lenet(init='best')", "model lenet: init must be one of zhu, default"),
        ("mlp(wide=3)", "model mlp: .*wide"),
        ("nowhere.at.all:net", "cannot import"),
        ("torch:zeros", "torch:zeros"),
        (f"{__name__}:missing", "cannot import"),
        (f"{__name__}:CIFAR", "not callable"),
        (f"{__name__}:number", "gave int, expected an nn.Module"),
        (f"{__name__}:wrong_width", r"gives outputs \(2, 9\) for 2 inputs, expected \(2, 4\)"),
        (f"{__name__}:WithFeatures", "gives a tuple, expected a tensor"),
        (f"{__name__}:Shuffled", "cannot take inputs of shape"),
    ],
)
def test_unusable_models_say_why(name: str, message: str):
    shape = (3, 4, 4) if name.endswith("Shuffled") else (3, 2, 2)
    with pytest.raises(ConfigError, match=message):
        models.build(name, num_classes=4, input_shape=shape)


@pytest.mark.parametrize("shape", [(), (3,), (1, 32), (3, 32), (3, 0, 8), (0, 8, 8), (-1, 8, 8), (3, 8, 8, 8)])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_shape_a_model_cannot_take_is_refused(name: str, shape: tuple[int, ...]):
    if name == "mlp" and shape and min(shape) > 0:
        pytest.skip("a perceptron takes inputs of any shape")
    with pytest.raises(ConfigError, match=f"model {name}|input_shape must"):
        models.build(name, num_classes=4, input_shape=shape)


def test_layers_are_found_in_the_order_of_use():
    model = Shuffled(4)
    assert models.first_layer(model)[0] == "head"  # registration order, for want of an input
    assert models.first_layer(model, (3, 2, 2)) == ("body", model.body)
    assert models.last_linear(model, (3, 2, 2)) == ("head", model.head)
    assert [name for name, _ in models.layers(model, (3, 2, 2))] == ["body", "norm", "head"]


def test_looking_leaves_no_trace():
    model = Shuffled(4)
    model.drop.eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    models.layers(model, (3, 2, 2))
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert not model.drop.training
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", models.MODELS)
def test_the_classifier_and_first_layer_of_known_models(name: str):
    model = models.build(name, num_classes=10, input_shape=CIFAR)
    for shape in (None, CIFAR):
        key, head = models.last_linear(model, shape)
        assert key == "classifier"
        assert head.out_features == 10
        assert models.first_layer(model, shape)[1].weight is next(model.parameters())
    assert models.has_batchnorm(model) == (name in ("vgg11", "resnet18"))


def test_a_model_without_linear_layer_is_refused():
    with pytest.raises(NeedError, match=r"no nn\.Linear"):
        models.last_linear(nn.Conv2d(1, 1, 1))
    with pytest.raises(NeedError, match="no layer with parameters"):
        models.first_layer(nn.Flatten())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_building_leaves_the_gpu_generator_alone():
    before = torch.cuda.get_rng_state()
    model = models.build("lenet", num_classes=10, input_shape=CIFAR).cuda()
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert models.last_linear(model, CIFAR)[0] == "classifier"
    with torch.device("cuda"):
        same = models.build("lenet", num_classes=10, input_shape=CIFAR)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(model.parameters(), same.parameters(), strict=True))


def test_every_module_gets_its_own_mode_back() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.BatchNorm1d(2), nn.Dropout())).train()
    net[1][0].eval()  # a user's frozen statistics
    before = [module.training for module in net.modules()]
    with models.evaluating(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == before
