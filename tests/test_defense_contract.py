"""One contract for every defense. A new one is tested by adding it to `defenses.CLASSES` (or `PRESETS`).

Add a row to `EXAMPLES` if it cannot be built without arguments or hides behind chance, and to `UNBOUNDED` if error
feedback around it piles up, with the reason.
"""

import copy
import dataclasses
import json

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from gradveil import defenses, tree
from gradveil.core import Batch, Defense, Grads, State, Step
from gradveil.defenses import CLASSES, DEFENSES, PRESETS, Chain, ErrorFeedback, GaussianNoise, Identity, Outpost, TopK
from gradveil.errors import NeedError
from gradveil.gradients import gradient, parameters, per_example_gradient
from gradveil.spec import build, to_spec, to_text
from gradveil.veil import Veil, derive_rng, unseal

EXAMPLES: dict[type[Defense], Defense] = {
    ErrorFeedback: ErrorFeedback(TopK(0.25)),
    Chain: Chain(ErrorFeedback(TopK()), GaussianNoise(sent_only=True)),
    Outpost: Outpost(always=True),  # else its gate lets one gradient in eleven pass as it is
}
UNBOUNDED = {
    "dual_prune": "its largest entries never leave",
    "aligned_dual_prune": "its largest entries, and all outside the mask, never leave",
    "soteria": "the same classifier columns stay hidden while the batch is the same",
}

CASES: list[Defense] = [EXAMPLES[c] if c in EXAMPLES else c() for c in CLASSES]
CASES += [d for d in (make() for make in PRESETS.values()) if d not in CASES]


def keeps_residual(defense: Defense) -> bool:
    return defense.residual(defense.init({"w": torch.zeros(1)})) is not None


PLAIN = [d for d in CASES if not d.noisy and "per_example" not in d.needs and not keeps_residual(d)]
# Whatever remembers what it held back: everything plain inside ErrorFeedback, and what keeps a residual of its own.
KEEPERS: list[Defense] = [ErrorFeedback(d) for d in PLAIN]
KEEPERS += [d for d in CASES if keeps_residual(d) and not d.noisy and d not in KEEPERS]
every = pytest.mark.parametrize("defense", CASES, ids=to_text)


class TinyNet(nn.Module):
    """A classifier with BatchNorm in evaluation, a scalar parameter and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.conv = nn.Conv2d(3, 4, 3, stride=2)
        self.norm = nn.BatchNorm2d(4)
        self.classifier = nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.tanh(self.norm(self.conv(x)) * self.scale).flatten(1))


@dataclasses.dataclass
class Client:
    """A defense with all it may need, fixed by a seed."""

    defense: Defense
    model: nn.Module
    batch: Batch
    grads: Grads

    def step(self, round_: int = 0, seed: int = 0) -> Step:
        place = self.batch.inputs.device.type
        rng = derive_rng(seed, "0", round_, device=place)
        step = Step(rng, round_, self.model, self.batch, num_examples=32)
        if "mask" not in self.defense.needs:
            return step
        return dataclasses.replace(step, mask=self.defense.propose(self.grads, self.init(), step))

    def init(self) -> State:
        return self.defense.init(parameters(self.model))

    def send(self, grads: Grads | None = None, state: State | None = None, **step: int) -> tuple[Grads, State]:
        at = self.step(**step)
        return self.defense.apply(self.grads if grads is None else grads, self.init() if state is None else state, at)


def client(defense: Defense, device: str = "cpu") -> Client:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = defense.prepare_model(TinyNet().eval()).to(device)
        batch = Batch(torch.rand(4, 3, 8, 8).to(device), torch.tensor([0, 1, 2, 4], device=device))
        compute = per_example_gradient if "per_example" in defense.needs else gradient
        return Client(defense, model, batch, compute(model, cross_entropy, batch))


def same(a: Grads, b: Grads) -> bool:
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def copied(tensors: Grads) -> Grads:
    return tree.tmap(torch.clone, tensors)


def test_every_defense_is_in_the_tables_under_its_own_name() -> None:
    assert len({c.key() for c in CLASSES}) == len(CLASSES)
    for c in CLASSES:
        assert DEFENSES[c.key()] is c
        assert getattr(defenses, c.__name__) is c
        assert (c.__doc__ or "").strip()


@every
def test_nothing_handed_in_is_changed(defense: Defense) -> None:
    user = client(defense)
    state, step = user.init(), user.step()
    before = copied(user.grads), copied(state), copied(user.model.state_dict()), user.batch.inputs.clone()
    mask, chance = copied(step.mask or {}), torch.get_rng_state()
    defense.apply(user.grads, state, step)
    assert same(user.grads, before[0])
    assert same(state, before[1])
    assert same(user.model.state_dict(), before[2])
    assert torch.equal(user.batch.inputs, before[3])
    assert same(step.mask or {}, mask)
    assert torch.equal(torch.get_rng_state(), chance)
    assert all(p.grad is None for p in user.model.parameters())


@every
def test_the_model_and_the_batch_are_prepared_as_copies(defense: Defense) -> None:
    model = TinyNet()
    weights, keys = copied(model.state_dict()), list(model.state_dict())
    prepared = defense.prepare_model(model)
    assert list(model.state_dict()) == keys
    assert same(model.state_dict(), weights)
    again = defense.prepare_model(copy.deepcopy(model))
    assert same(prepared.state_dict(), again.state_dict()), "all parties must build the same model"

    user = client(defense)
    inputs = user.batch.inputs.clone()
    out = defense.prepare_batch(user.batch, user.step())
    assert torch.equal(user.batch.inputs, inputs)
    assert (out.inputs.shape, out.inputs.dtype, len(out.labels)) == (inputs.shape, inputs.dtype, 4)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_keys_shapes_types_and_device_are_kept(defense: Defense, dtype: torch.dtype) -> None:
    user = client(defense)
    state = {name: t.to(dtype) if t.is_floating_point() else t for name, t in user.init().items()}
    sent, after = user.send(tree.tmap(lambda g: g.to(dtype), user.grads), state)
    like = parameters(user.model)
    assert list(sent) == list(like)
    for name, g in sent.items():
        assert (g.shape, g.dtype, g.device) == (like[name].shape, dtype, like[name].device)
        assert bool(torch.isfinite(g).all())
        assert not g.requires_grad
    assert {n: (t.shape, t.dtype) for n, t in after.items()} == {n: (t.shape, t.dtype) for n, t in state.items()}


@every
def test_the_seed_and_the_round_settle_the_output(defense: Defense) -> None:
    user = client(defense)
    assert same(user.send()[0], user.send()[0])
    assert same(user.send()[1], user.send()[1])
    if defense.noisy:
        assert not same(user.send(round_=0)[0], user.send(round_=1)[0])
        assert not same(user.send(seed=0)[0], user.send(seed=1)[0])


@every
def test_a_zero_gradient_is_no_trouble(defense: Defense) -> None:
    user = client(defense)
    user.grads = tree.zeros_like(user.grads)
    sent, state = user.send()
    for g in [*sent.values(), *state.values()]:
        assert bool(torch.isfinite(g).all())
    if not defense.noisy:
        assert not any(bool(g.any()) for g in sent.values())


@every
def test_no_nan_comes_out_of_extreme_gradients(defense: Defense) -> None:
    user = client(defense)
    generator = torch.Generator().manual_seed(1)

    def spread(g: Tensor) -> Tensor:
        return torch.randn(g.shape, generator=generator) * 10 ** torch.empty(g.shape).uniform_(
            -30, 15, generator=generator
        )

    user.grads = tree.tmap(spread, user.grads)
    state: State | None = None
    for round_ in range(3):
        sent, state = user.send(state=state, round_=round_)
        for g in [*sent.values(), *state.values()]:
            assert bool(torch.isfinite(g).all())


@every
def test_the_state_survives_safetensors(defense: Defense) -> None:
    user = client(defense)
    _, state = user.send()
    loaded = load(save({name: t.contiguous() for name, t in state.items()}))
    loaded = {name: loaded[name] for name in state}
    assert same(loaded, state)
    straight, resumed = user.send(state=state, round_=1), user.send(state=loaded, round_=1)
    assert same(straight[0], resumed[0])
    assert same(straight[1], resumed[1])


@every
def test_it_works_in_a_chain(defense: Defense) -> None:
    user = client(defense)
    alone, _ = user.send()
    chains = [Chain(defense, Identity())]
    if "per_example" in defense.needs:
        with pytest.raises(ValueError, match="first in a Chain"):
            Chain(Identity(), defense)
    else:
        chains.append(Chain(Identity(), defense))
    for chain in chains:
        assert chain.needs == defense.needs
        assert chain.noisy == defense.noisy
        sent, _ = dataclasses.replace(user, defense=chain).send()
        assert same(sent, alone)


@pytest.mark.parametrize("defense", KEEPERS, ids=to_text)
def test_what_is_held_back_is_not_lost(defense: Defense) -> None:
    user = client(defense)
    state, given, sent = user.init(), tree.zeros_like(user.grads), tree.zeros_like(user.grads)
    for round_ in range(4):
        grads = tree.tmap(lambda g, factor=1 + round_: g * factor, user.grads)
        out, state = user.send(grads, state, round_=round_)
        given, sent = tree.add(given, grads), tree.add(sent, out)
    scale = max(float(g.abs().max()) for g in sent.values() if g.numel())
    for name, held in held_by(user, state).items():
        torch.testing.assert_close(sent[name] + held, given[name], rtol=1e-5, atol=1e-6 * max(scale, 1.0))
    # An upload that did not arrive goes back whole.
    returned = held_by(user, defense.take_back(out, state))
    for name, held in held_by(user, state).items():
        torch.testing.assert_close(returned[name], held + out[name])


def held_by(user: Client, state: State) -> Grads:
    held = user.defense.residual(state)
    assert held is not None
    assert list(held) == list(user.grads)
    return held


@pytest.mark.parametrize("defense", [d for d in CASES if d not in PLAIN], ids=to_text)
def test_error_feedback_refuses_what_it_would_undo(defense: Defense) -> None:
    with pytest.raises(ValueError, match=r"noise|per-example|residual"):
        ErrorFeedback(defense)


@pytest.mark.parametrize("defense", KEEPERS, ids=to_text)
def test_the_residual_stays_bounded(defense: Defense) -> None:
    user = client(defense)
    state, step, norms = user.init(), user.step(), []
    for round_ in range(120):
        step = dataclasses.replace(step, rng=derive_rng(0, "0", round_), round=round_)
        _, state = defense.apply(user.grads, state, step)
        norms.append(tree.global_norm(held_by(user, state)))
    growth = max(norms[60:]) / max(max(norms[:60]), 1e-12)
    operator = defense.inner if isinstance(defense, ErrorFeedback) else defense
    if operator.key() in UNBOUNDED:
        assert growth > 1.5, f"{operator.key()} is listed as unbounded, yet its residual stopped growing"
    else:
        assert growth < 1.5


@every
def test_plain_data_and_text_rebuild_it(defense: Defense) -> None:
    assert build(DEFENSES, json.loads(json.dumps(to_spec(defense))), "defense") == defense
    assert build(DEFENSES, to_text(defense), "defense") == defense
    assert eval(repr(defense), {c.__name__: c for c in CLASSES}) == defense


@every
def test_it_is_a_frozen_value(defense: Defense) -> None:
    assert hash(defense) == hash(copy.deepcopy(defense))
    assert defense == copy.deepcopy(defense)
    with pytest.raises(dataclasses.FrozenInstanceError):
        defense.anything = 1  # type: ignore[attr-defined]


@every
def test_a_need_that_is_not_met_is_named(defense: Defense) -> None:
    user = client(defense)
    for need in defense.needs - {"per_example"}:
        step = dataclasses.replace(user.step(), **{need: None})
        with pytest.raises(NeedError, match=need):
            defense.apply(user.grads, user.init(), step)


@every
def test_what_arrives_is_what_the_defense_let_out(defense: Defense) -> None:
    user = client(defense)
    veil = Veil(defense, parameters(user.model), seed=0)
    step = user.step()
    sent, _ = user.send()
    payload = veil.seal(user.grads, 32, model=user.model, batch=user.batch, mask=step.mask)
    arrived = unseal(payload, like=parameters(user.model), within=step.mask)
    assert same(arrived, sent)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@every
def test_it_works_where_the_gradient_lives(defense: Defense) -> None:
    user = client(defense, "cuda")
    prepared = defense.prepare_batch(user.batch, user.step())
    assert prepared.inputs.is_cuda
    sent, state = user.send()
    assert all(t.is_cuda for t in [*sent.values(), *state.values()])
    assert all(bool(torch.isfinite(t).all()) for t in sent.values())
    assert same(sent, user.send()[0])
    arrived = unseal(
        Veil(defense, parameters(user.model), seed=0).seal(
            user.grads, 32, model=user.model, batch=user.batch, mask=user.step().mask
        ),
        like=parameters(user.model),
        within=user.step().mask,
    )
    assert same(tree.tmap(Tensor.cpu, arrived), tree.tmap(Tensor.cpu, sent))
