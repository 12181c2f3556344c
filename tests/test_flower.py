"""The Flower mod and strategy in one process: the real ClientApp and strategy, without sockets."""

import contextlib
import copy
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
pytest.importorskip("flwr", reason="the flower extra is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from gradveil import (
    AlignedDualPrune,
    Batch,
    Chain,
    Defense,
    ErrorFeedback,
    Guard,
    Identity,
    Step,
    ThreatModel,
    Veil,
    adgp,
    dgp,
    local_update,
    models,
    observe,
    tree,
    wire,
)
from gradveil.attacks.imprint import Imprint
from gradveil.attacks.traps import TrapWeights
from gradveil.defenses import DPNoise, Hardened
from gradveil.engines import flower_download, flower_local
from gradveil.engines import flower_records as records
from gradveil.engines.flower import VeilMod
from gradveil.engines.flower_local import node_id as node
from gradveil.engines.flower_secure import SecureFedAvg, SecureVeilMod
from gradveil.engines.flower_strategy import VeiledFedAvg
from gradveil.engines.following import Account, following
from gradveil.engines.secure import FixedPoint, add_up, blind, new_key
from gradveil.engines.store import FileStore
from gradveil.engines.vote import vote
from gradveil.errors import EngineError, NeedError, StateError, WireError
from gradveil.gradients import per_example_gradient

CLIENTS = 4
loss_fn = nn.CrossEntropyLoss()


def build_model(norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 5)]
    return nn.Sequential(*layers[:1], nn.BatchNorm1d(40), *layers[1:]) if norm else nn.Sequential(*layers)


def batch_of(client: int, round_: int) -> Batch:
    rng = torch.Generator().manual_seed(100 * client + round_)
    inputs = torch.randn(16, 12, generator=rng)
    return Batch(inputs, (inputs[:, :5] + 0.1 * client).argmax(1))


LR = 0.5


def followed_app(*mods: Any, epochs: int = 1, follow: bool = True, optimizer: Any = torch.optim.SGD) -> ClientApp:
    """A client that goes through its 16 examples in steps of 8."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        client, round_ = context.node_config["partition-id"], message.content["config"]["server-round"]
        model, batch = build_model(), batch_of(client, round_)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        descent = optimizer(model.parameters(), lr=LR)
        with following(model, descent) if follow else contextlib.nullcontext():
            for rows in [torch.arange(0, 8), torch.arange(8, 16)] * epochs:
                descent.zero_grad()
                loss_fn(model(batch.inputs[rows]), batch.labels[rows]).backward()
                descent.step()
        content = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 16})}
        return Message(RecordDict(content), reply_to=message)

    return app


def make_app(*mods: Any, norm: bool = False, spoil: Callable[[int, int, Message], Any] | None = None) -> ClientApp:
    """An ordinary FedAvg client. `spoil(client, round, reply)` replaces what the app answers."""
    app = ClientApp(mods=list(mods))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        assert not [key for key in message.content if key.startswith("gradveil")]
        client, round_ = context.node_config["partition-id"], message.content["config"]["server-round"]
        model = build_model(norm)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        model.train()
        update = local_update(model, loss_fn, [batch_of(client, round_)], lr=0.5)
        state = {n: t - update[n] if n in update else t for n, t in model.state_dict().items()}
        metrics = MetricRecord({"num-examples": 16 + client, "loss": 1.0})
        reply = Message(RecordDict({"arrays": ArrayRecord(state), "metrics": metrics}), reply_to=message)
        return reply if spoil is None else spoil(client, round_, reply)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model = build_model(norm)
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        batch = batch_of(context.node_config["partition-id"], 0)
        accuracy = (model.eval()(batch.inputs).argmax(1) == batch.labels).float().mean().item()
        content = RecordDict({"metrics": MetricRecord({"num-examples": 16, "accuracy": accuracy})})
        return Message(content, reply_to=message)

    @app.query("raw")
    def raw(message: Message, context: Context) -> Message:
        return Message(RecordDict({"arrays": ArrayRecord(build_model().state_dict())}), reply_to=message)

    return app


class LocalGrid(flower_local.LocalGrid):
    """`meddle` may change, drop or add replies; `sent` remembers the questions."""

    def __init__(self, app: ClientApp, meddle: Callable[[list[Message]], list[Message]] = lambda r: r) -> None:
        super().__init__(app, CLIENTS)
        self.meddle, self.sent = meddle, list[Message]()

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        questions = list(messages)
        self.sent += questions
        replies = list(super().send_and_receive(questions))
        return self.meddle(replies) if replies else []


def initial(norm: bool = False) -> ArrayRecord:
    return ArrayRecord(build_model(norm).state_dict())


def run(strategy: FedAvg, grid: LocalGrid, rounds: int = 3, norm: bool = False) -> dict[str, Tensor]:
    result = strategy.start(grid, initial(norm), num_rounds=rounds)
    return dict(result.arrays.to_torch_state_dict()) if result.arrays else {}


def tree_of(context: Context) -> dict[str, Tensor]:
    return records.tensors_of(context.state["gradveil"])


# ------------------------------------------------------------------------------------- what it does


def test_without_a_defense_it_is_fedavg() -> None:
    want = run(FedAvg(), LocalGrid(make_app()))
    got = run(VeiledFedAvg(Identity()), LocalGrid(make_app(VeilMod(Identity()))))
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-6)


def test_the_bytes_are_those_of_the_veil() -> None:
    bodies = []

    def keep(replies: list[Message]) -> list[Message]:
        bodies.extend(r.content["arrays"]["update"].data for r in replies if "arrays" in r.content)
        return replies

    run(VeiledFedAvg(dgp(), fraction_evaluate=0.0), LocalGrid(make_app(VeilMod(dgp())), keep), rounds=1)
    model = build_model()
    update = local_update(model, loss_fn, [batch_of(0, 1)], lr=0.5)
    before = dict(model.state_dict())
    update = {n: before[n] - (before[n] - update[n]) for n in update}  # the app answers with weights
    assert Veil(dgp(), update).seal(update, 16).body in bodies


@pytest.mark.parametrize("defense", [dgp(), adgp()], ids=["dgp", "adgp"])
def test_training_works_and_answers_are_small(defense: Defense) -> None:
    sizes: list[int] = []

    def weigh(replies: list[Message]) -> list[Message]:
        sizes.extend(len(r.content["arrays"]["update"].data) for r in replies if "arrays" in r.content)
        return replies

    strategy = VeiledFedAvg(defense)
    result = strategy.start(LocalGrid(make_app(VeilMod(defense)), weigh), initial(), num_rounds=20)
    accuracy = [float(m["accuracy"]) for m in result.evaluate_metrics_clientapp.values()]
    assert not strategy.rejected
    assert accuracy[-1] > 0.6 > accuracy[0]
    dense = 4 * sum(t.numel() for t in build_model().state_dict().values())
    assert max(sizes) < 0.5 * dense


@pytest.mark.parametrize("defense", [dgp(), adgp()], ids=["dgp", "adgp"])
def test_nothing_is_lost_when_replies_are(defense: Defense) -> None:
    """sum of updates = what the server used + the upload on its way + the residual."""
    turn = 0

    def drop(replies: list[Message]) -> list[Message]:
        nonlocal turn
        turn += 1
        asked = [r for r in replies if r.has_content() and "arrays" in r.content]
        if not asked:
            return replies
        return [r for i, r in enumerate(replies) if (turn * 7 + i * 3) % 4]

    updates: dict[int, dict[str, Tensor]] = {}

    def note(client: int, round_: int, reply: Message) -> Message:
        seen[client] = {n: t.double() for n, t in reply.content["arrays"].to_torch_state_dict().items()}
        return reply

    seen: dict[int, dict[str, Tensor]] = {}
    grid = LocalGrid(make_app(VeilMod(defense), spoil=note), drop)
    strategy = VeiledFedAvg(defense, fraction_evaluate=0.0)
    arrays, used = initial(), tree.zeros_like({n: t.double() for n, t in build_model().state_dict().items()})
    for round_ in range(1, 9):
        before = {n: t.double() for n, t in arrays.to_torch_state_dict().items()}
        replies = list(grid.send_and_receive(strategy.configure_train(round_, arrays, ConfigRecord(), grid)))
        for client, after in seen.items():
            updates[client] = tree.add(updates.get(client, tree.zeros_like(before)), tree.sub(before, after))
        seen.clear()
        new, _ = strategy.aggregate_train(round_, replies)
        for reply in replies:  # what the server took, decoded by hand
            if strategy.used.get(reply.metadata.src_node_id) == reply.content["gradveil"]["upload"]:
                body = reply.content["arrays"]["update"].data
                like = {n: t.float() for n, t in before.items()}
                sent = wire.decode(body, like=like, within=strategy._round.mask if strategy._round else None)
                used = tree.add(used, {n: t.double() for n, t in sent.items()})
        arrays = new if new is not None else arrays
    held = tree.zeros_like(used)
    for client, context in enumerate(grid.contexts.values()):
        memory = tree_of(context)
        held = tree.add(held, {n: t.double() for n, t in tree.only("veil.state.residual", memory).items()})
        if int(memory["upload.about"][0]) != strategy.used.get(node(client)):
            like = {n: t.float() for n, t in used.items()}
            mask = None if "upload.mask" not in memory else records.unpack_masks(memory["upload.mask"], like)
            on_its_way = wire.decode(memory["upload.body"].numpy().tobytes(), like=like, within=mask)
            held = tree.add(held, {n: t.double() for n, t in on_its_way.items()})
    total = {n: sum(u[n] for u in updates.values()) for n in used}
    for name, want in total.items():
        assert isinstance(want, Tensor)
        torch.testing.assert_close(used[name] + held[name], want, rtol=0, atol=1e-5)


def test_sparse_download_gives_the_same_model_for_fewer_bytes() -> None:
    def train(sparse: bool) -> tuple[dict[str, Tensor], int]:
        strategy = VeiledFedAvg(dgp(), sparse_download=sparse)
        grid = LocalGrid(make_app(VeilMod(dgp())), lambda rs: [r for r in rs if r.metadata.src_node_id != node(3)])
        model = run(strategy, grid, rounds=5)
        down = sum(len(a.data) for m in grid.sent for r in m.content.array_records.values() for a in r.values())
        return model, down

    (full, full_bytes), (sparse, sparse_bytes) = train(False), train(True)
    assert all(torch.equal(full[name], sparse[name]) for name in full)
    assert sparse_bytes < 0.8 * full_bytes


@pytest.mark.parametrize("buffers", ["local", "send"])
def test_batchnorm_buffers_stay_or_are_sent(buffers: Any) -> None:
    app = make_app(VeilMod(dgp(), buffers=buffers), norm=True)
    grid, strategy = LocalGrid(app), VeiledFedAvg(dgp(), sparse_download=True)
    model = run(strategy, grid, rounds=3, norm=True)
    assert not strategy.rejected
    moved = not torch.equal(model["1.running_mean"], torch.zeros(40))
    assert moved == (buffers == "send")
    assert int(model["1.num_batches_tracked"]) == 0  # a count never leaves
    memory = tree_of(grid.contexts[node(0)])
    assert int(memory["buffer.1.num_batches_tracked"]) == 3  # and goes on counting on the node
    assert ("buffer.1.running_mean" in memory) == (buffers == "local")


# ------------------------------------------------------------------------------------- fail closed


def answer_with(**extra: Any) -> Callable[[int, int, Message], Any]:
    def spoil(client: int, round_: int, reply: Message) -> Message:
        return Message(RecordDict({**reply.content, **extra}), reply_to=_question())

    return spoil


def _question() -> Message:
    return Message(RecordDict(), dst_node_id=1, message_type="train")


def _integer_array(client: int, round_: int, reply: Message) -> Message:
    reply.content["arrays"]["0.weight"] = Array(torch.ones(40, 12, dtype=torch.int64).numpy())
    return reply


def _nan(client: int, round_: int, reply: Message) -> Message:
    reply.content["arrays"]["0.weight"] = Array(torch.full((40, 12), float("nan")).numpy())
    return reply


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (answer_with(config=ConfigRecord({"raw": b"secret"})), "neither the model nor metrics"),
        (answer_with(more=ArrayRecord(build_model().state_dict())), "expected one ArrayRecord"),
        (answer_with(metrics=MetricRecord({"num-examples": 16, "list": [0.5, 0.25]})), "single finite numbers"),
        (answer_with(metrics=MetricRecord({"loss": 1.0})), "num-examples"),
        (answer_with(arrays=ArrayRecord({"0.weight": Array(torch.ones(2).numpy())})), "not the model it got"),
        (_integer_array, "not the model it got"),
        (_nan, "NaN or infinity"),
        (lambda *_: None, "NoneType instead of a Message"),
        (lambda *_: {"arrays": 1}, "dict instead of a Message"),
    ],
)
def test_a_wrong_answer_of_the_app_never_leaves(spoil: Callable[[int, int, Message], Any], why: str) -> None:
    left: list[Message] = []

    def keep(replies: list[Message]) -> list[Message]:
        left.extend(replies)
        return replies

    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    grid = LocalGrid(make_app(VeilMod(dgp()), spoil=spoil), keep)
    assert run(strategy, grid, rounds=1) == {}
    assert all(reply.has_error() and not reply.has_content() for reply in left)
    assert all(why in one.reason for one in strategy.rejected)
    assert not any(context.state for context in grid.contexts.values())  # and no state has changed


def _raises(client: int, round_: int, reply: Message) -> Message:
    raise ValueError(f"bad values: {batch_of(client, round_).inputs}")


def _says(client: int, round_: int, reply: Message) -> Message:
    return Message(Error(0, f"bad values: {batch_of(client, round_).inputs}"), reply_to=_question())


@pytest.mark.parametrize(("spoil", "why"), [(_raises, "raised ValueError"), (_says, "answered with error 0")])
def test_the_text_of_an_error_stays_on_the_node(
    spoil: Callable[[int, int, Message], Any], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower sends what an app raises to the server, and torch likes to print the tensor that was wrong."""
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    run(strategy, LocalGrid(make_app(VeilMod(dgp()), spoil=spoil)), rounds=1)
    assert len(strategy.rejected) == CLIENTS
    assert all(why in one.reason and "tensor" not in one.reason for one in strategy.rejected)
    assert "tensor" in caplog.text


def test_other_messages_may_answer_with_metrics_only() -> None:
    grid = LocalGrid(make_app(VeilMod(dgp())))
    question = Message(RecordDict(), dst_node_id=node(0), message_type="query.raw")
    (reply,) = grid.send_and_receive([question])
    assert reply.has_error()
    assert "unprotected" in reply.error.reason


def test_a_server_without_gradveil_gets_nothing() -> None:
    grid = LocalGrid(make_app(VeilMod(dgp())))
    assert run(FedAvg(fraction_evaluate=0.0), grid, rounds=1) == {}


def test_integer_parameters_are_refused_unless_kept_local() -> None:
    arrays = {**build_model().state_dict(), "table": torch.arange(3)}
    app = ClientApp(mods=[])

    def answer(message: Message) -> Message:
        content = RecordDict({"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})})
        return Message(content, reply_to=message)

    for local, works in (((), False), (("table",), True)):
        mod = VeilMod(Identity(), local=local)
        grid = LocalGrid(app)
        strategy = VeiledFedAvg(Identity(), local=("table",), fraction_evaluate=0.0)
        grid.app = lambda m, c, mod=mod: mod(m, c, lambda m, c: answer(m))  # type: ignore[assignment,misc]
        result = strategy.start(grid, ArrayRecord(arrays), num_rounds=1)
        assert (result.arrays is not None and "table" in result.arrays) == works


def test_defenses_that_need_more_are_refused_at_once() -> None:
    with pytest.raises(NeedError, match="per_example"):
        VeilMod(DPNoise())


FOLLOWED = Hardened(noise=2.0, examples=16, balance=1.0)


@pytest.mark.parametrize("epochs", [1, 2])
def test_the_noise_covers_the_largest_example_the_app_followed(epochs: int) -> None:
    """By the obvious way: the gradients of single examples, step by step, each example in one step of a pass."""
    grid = LocalGrid(followed_app(VeilMod(FOLLOWED, follow=True, seed=1), epochs=epochs))
    run(VeiledFedAvg(FOLLOWED, fraction_evaluate=0.0), grid, rounds=1)
    model, batch = build_model(), batch_of(0, 1)
    descent = torch.optim.SGD(model.parameters(), lr=LR)
    steps = []
    for rows in [torch.arange(0, 8), torch.arange(8, 16)] * epochs:
        part = Batch(batch.inputs[rows], batch.labels[rows])
        each = per_example_gradient(model, loss_fn, part)
        steps.append({n: LR / 8 * g.flatten(1).square().mean(1).sqrt().amax() for n, g in each.items()})
        descent.zero_grad()
        loss_fn(model(part.inputs), part.labels).backward()
        descent.step()
    largest = {n: torch.stack([step[n] for step in steps]).sort().values[-epochs:].sum() for n in steps[0]}
    sizes = tree.only("veil.state.last", tree_of(grid.contexts[node(0)]))
    weights = [n for n in largest if n.endswith("weight")]
    for name in weights:  # the root of the sixteen
        assert float(sizes[name]) == pytest.approx(4 * float(largest[name]), rel=1e-4)
    loose = LocalGrid(followed_app(VeilMod(FOLLOWED, seed=1), epochs=epochs, follow=False))
    run(VeiledFedAvg(FOLLOWED, fraction_evaluate=0.0), loose, rounds=1)
    before = tree.only("veil.state.last", tree_of(loose.contexts[node(0)]))
    assert all(float(before[name]) < float(sizes[name]) for name in weights)


@pytest.mark.parametrize(
    ("app", "why"),
    [({"follow": False}, "the app followed no example"), ({"optimizer": torch.optim.Adam}, "not through Adam")],
)
def test_an_update_whose_examples_are_not_followed_is_refused(app: dict[str, Any], why: str) -> None:
    strategy = VeiledFedAvg(FOLLOWED, fraction_evaluate=0.0)
    run(strategy, LocalGrid(followed_app(VeilMod(FOLLOWED, follow=True), **app)), rounds=1)
    assert len(strategy.rejected) == CLIENTS
    assert all(why in one.reason for one in strategy.rejected)


def test_training_past_what_is_followed_is_refused() -> None:
    """An update that moves another tensor than those of the model that was followed has unknown shares."""
    account = Account([{"w": torch.ones(())}], examples=4)
    assert account.largest({"w": torch.ones(2), "frozen": torch.zeros(2)}, 2) == {"w": 1.0, "frozen": 0.0}
    with pytest.raises(NeedError, match="other changed in training"):
        account.largest({"w": torch.ones(2), "other": torch.ones(2)}, 4)


def test_a_lost_residual_stops_the_upload() -> None:
    strategy, mod = VeiledFedAvg(dgp(), fraction_evaluate=0.0), VeilMod(dgp())
    grid = LocalGrid(make_app(mod))
    arrays = ArrayRecord(run(strategy, grid, rounds=2))
    grid.contexts[node(0)].state = RecordDict()  # lost
    old = copy.deepcopy(grid.contexts[node(1)].state)
    strategy.start(grid, arrays, num_rounds=1)
    assert [one.node for one in strategy.rejected] == [node(0)]
    assert "missing or stale" in strategy.rejected[0].reason
    strategy.rejected.clear()
    grid.contexts[node(1)].state = old  # a backup from before the last round
    strategy.start(grid, arrays, num_rounds=1)
    assert {one.node for one in strategy.rejected} == {node(0), node(1)}
    strategy.rejected.clear()
    grid.app = make_app(VeilMod(dgp(), restart_lost=True))
    strategy.start(grid, arrays, num_rounds=1)
    assert not strategy.rejected


# ------------------------------------------------------------------------------------- a hostile server

SHAPE = (1, 8, 8)


def picture_app(calls: list[int], **more: Any) -> ClientApp:
    """A client that notes in `calls` whenever it is made to train; any model will do."""
    app = ClientApp(mods=[VeilMod(dgp(), **more)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        calls.append(context.node_config["partition-id"])
        rng = torch.Generator().manual_seed(len(calls))
        state = message.content["arrays"].to_torch_state_dict()
        new = ArrayRecord({n: t - 0.01 * torch.randn(t.shape, generator=rng) for n, t in state.items()})
        return Message(RecordDict({"arrays": new, "metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app


def picture_model() -> nn.Module:
    return models.build("mlp(hidden=64)", num_classes=10, input_shape=SHAPE)


def planted(kind: str) -> nn.Module:
    rng = torch.Generator().manual_seed(0)
    if kind == "traps":
        return TrapWeights(share=0.05).plant(picture_model(), SHAPE, rng)
    attack = Imprint(bins=40).fitted(dgp() if kind == "decoys" else None, (0.5,), (0.25,))
    return attack.plant(picture_model(), SHAPE, rng)


@pytest.mark.parametrize("kind", ["imprint", "decoys", "traps"])
def test_a_manipulated_model_is_refused_before_any_training(kind: str) -> None:
    calls: list[int] = []
    left: list[Message] = []
    grid = LocalGrid(picture_app(calls), lambda replies: left.extend(replies) or replies)  # type: ignore[func-returns-value]
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    start = ArrayRecord(planted(kind).state_dict())
    strategy.start(grid, start, num_rounds=1)
    assert len(left) == CLIENTS
    assert all(r.has_error() and not r.has_content() and "looks manipulated" in r.error.reason for r in left)
    assert not calls
    assert not any(context.state for context in grid.contexts.values())
    grid.app = picture_app(calls, guard=None)  # switched off by name only, and then the attack goes through
    strategy.start(grid, start, num_rounds=1)
    assert len(calls) == CLIENTS == len(strategy.used)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_model_swapped_between_honest_rounds_is_refused(sparse: bool, tmp_path: Path) -> None:
    """The memory of the guard lives with the residual, in a file, and honest rounds go on before and after."""
    calls: list[int] = []
    grid = LocalGrid(picture_app(calls, folder=tmp_path))
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0, sparse_download=sparse)
    honest = ArrayRecord(picture_model().state_dict())
    larger = ArrayRecord(models.build("mlp(hidden=65)", num_classes=10, input_shape=SHAPE).state_dict())

    def one_round(number: int, arrays: ArrayRecord) -> ArrayRecord | None:
        replies = grid.send_and_receive(strategy.configure_train(number, arrays, ConfigRecord(), grid))
        return strategy.aggregate_train(number, replies)[0]

    for number in (1, 2, 3):
        honest = one_round(number, honest)
    assert len(calls) == 3 * CLIENTS
    strategy._download = flower_download.Sender()  # what it sends next is another model
    assert one_round(4, larger) is None
    assert ["it adds" in one.reason for one in strategy.rejected] == [True] * CLIENTS
    assert one_round(5, honest) is not None
    assert len(calls) == 4 * CLIENTS


def test_a_pinned_guard_knows_the_model_before_it_arrives() -> None:
    calls: list[int] = []
    guard = Guard.pin(picture_model().state_dict(), jump=None)
    grid = LocalGrid(picture_app(calls, guard=guard))
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    other = models.build("mlp(hidden=63)", num_classes=10, input_shape=SHAPE)
    assert not strategy.start(grid, ArrayRecord(other.state_dict()), num_rounds=1).arrays
    assert not calls
    assert strategy.start(grid, ArrayRecord(picture_model().state_dict()), num_rounds=2).arrays
    with pytest.raises(NeedError, match="state_dict"):
        VeilMod(dgp(), guard=Guard.pin(picture_model()))


def test_a_new_job_number_does_not_wipe_the_guards_memory(tmp_path: Path) -> None:
    calls: list[int] = []
    grid = LocalGrid(picture_app(calls, folder=tmp_path, guard=Guard(jump=0.75, repeats=0)))

    def job(state: dict[str, Tensor]) -> list[str]:
        """One round of a server with a new job number; what its clients refused."""
        strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
        strategy.start(grid, ArrayRecord(state), num_rounds=1)
        return [one.reason for one in strategy.rejected]

    model = dict(picture_model().state_dict())
    assert job(model) == []
    assert len(calls) == CLIENTS
    torch.manual_seed(0)
    refused = {
        "the same weights came 2 times": model,
        "the order differs": dict(reversed(model.items())),
        "float64": {n: t.double() for n, t in model.items()},
        "it changed by": {n: torch.randn_like(t) * t.std() for n, t in model.items()},
    }
    for why, state in refused.items():
        reasons = job(state)
        assert len(reasons) == CLIENTS
        assert all(why in reason for reason in reasons), reasons
    assert len(calls) == CLIENTS
    assert job({n: t + 0.01 * t.std() * torch.randn_like(t) for n, t in model.items()}) == []  # training goes on
    other = models.build("mlp(hidden=65)", num_classes=10, input_shape=SHAPE)
    assert job(dict(other.state_dict())) == []
    assert len(list(tmp_path.glob("guard-*.safetensors"))) == 2 * CLIENTS
    assert len(list(tmp_path.glob("[0-9a-f]*-*.safetensors"))) == 3 * CLIENTS  # residuals stay with their jobs


def test_two_jobs_at_once_cannot_both_find_a_model_unseen(tmp_path: Path) -> None:
    inner: list[str] = []
    mod = VeilMod(dgp(), folder=tmp_path, guard=Guard(jump=None, repeats=0))

    def meanwhile(client: int, round_: int, reply: Message) -> Message:
        if not inner:
            inner.append("asked")
            strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
            run(strategy, LocalGrid(make_app(mod)), rounds=1)
            inner.extend(one.reason for one in strategy.rejected)
        return reply

    assert run(VeiledFedAvg(dgp(), fraction_evaluate=0.0), LocalGrid(make_app(mod, spoil=meanwhile)), rounds=1)
    assert any("another process is using" in reason for reason in inner)


# ------------------------------------------------------------------------------------- hostile or broken clients


def _with_body(reply: Message, change: Callable[[bytes], bytes]) -> Message:
    old = reply.content["arrays"]["update"]
    body = change(old.data)
    reply.content["arrays"]["update"] = Array("uint8", (len(body),), old.stype, body)
    return reply


def _claim(reply: Message, number: Any) -> Message:
    reply.content["metrics"]["num-examples"] = number
    return reply


def _late(reply: Message) -> Message:
    reply.content["gradveil"]["round"] = 99
    return reply


HOSTILE: dict[str, Callable[[Message], list[Message]]] = {
    "garbage": lambda r: [_with_body(r, lambda b: os.urandom(len(b)))],
    "truncated": lambda r: [_with_body(r, lambda b: b[: len(b) // 2])],
    "empty": lambda r: [_with_body(r, lambda b: b"")],
    "late": lambda r: [_late(r)],
    "no metrics": lambda r: [Message(RecordDict({"arrays": r.content["arrays"]}), reply_to=_question())],
    "dense": lambda r: [answer_with(arrays=initial())(0, 0, r)],
    "zero examples": lambda r: [_claim(r, 0)],
    "float examples": lambda r: [_claim(r, 1e300)],
    "config only": lambda r: [Message(RecordDict({"gradveil": ConfigRecord({"upload": 1})}), reply_to=_question())],
    "odd metric": lambda r: [answer_with(metrics=MetricRecord({"num-examples": 16, "x": float("nan")}))(0, 0, r)],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_answer_is_rejected_and_the_round_goes_on(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def meddle(replies: list[Message]) -> list[Message]:
        return [*HOSTILE[name](replies[0]), *replies[1:]]

    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    assert run(strategy, LocalGrid(make_app(VeilMod(dgp())), meddle), rounds=1)
    assert len(strategy.rejected) == 1
    assert len(strategy.used) == CLIENTS - 1
    assert f"the answer of node {strategy.rejected[0].node} is not used" in caplog.text


def test_duplicates_count_once() -> None:
    once = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    want = run(once, LocalGrid(make_app(VeilMod(dgp()))), rounds=2)
    twice = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    got = run(twice, LocalGrid(make_app(VeilMod(dgp())), lambda r: [*r, r[0], r[1]]), rounds=2)
    for name in want:
        torch.testing.assert_close(got[name], want[name])
    assert len(twice.rejected) == 4


def test_a_lie_about_examples_is_bounded() -> None:
    def lie(replies: list[Message]) -> list[Message]:
        _claim(replies[0], 2**60)
        return replies

    honest = run(VeiledFedAvg(dgp(), max_examples=1, fraction_evaluate=0.0), LocalGrid(make_app(VeilMod(dgp()))), 1)
    lied = run(VeiledFedAvg(dgp(), max_examples=1, fraction_evaluate=0.0), LocalGrid(make_app(VeilMod(dgp())), lie), 1)
    for name in honest:
        torch.testing.assert_close(lied[name], honest[name])


@pytest.mark.parametrize("sparse", [False, True])
def test_updates_that_overflow_together_are_not_used(sparse: bool, caplog: pytest.LogCaptureFixture) -> None:
    like = dict(build_model().state_dict())
    most = wire.encode(tree.tmap(lambda t: torch.full_like(t, torch.finfo(torch.float32).max), like))
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0, sparse_download=sparse)
    grid = LocalGrid(make_app(VeilMod(dgp())), lambda replies: [_with_body(r, lambda _: most) for r in replies])
    assert run(strategy, grid, rounds=1) == {}
    assert not strategy.used
    assert "the model would hold NaN or infinity" in caplog.text
    grid.meddle = lambda replies: replies
    assert run(strategy, grid, rounds=1)


def test_a_client_cannot_end_the_run_through_evaluation() -> None:
    def meddle(replies: list[Message]) -> list[Message]:
        if "arrays" not in replies[0].content:
            replies[0] = Message(RecordDict({"m": MetricRecord({"x": [1.0, 2.0]})}), reply_to=_question())
        return replies

    strategy = VeiledFedAvg(dgp())
    result = strategy.start(LocalGrid(make_app(VeilMod(dgp())), meddle), initial(), num_rounds=2)
    assert len(strategy.rejected) == 2
    assert "accuracy" in result.evaluate_metrics_clientapp[2]


# ------------------------------------------------------------------------------------- aligned masks


def _zero(mask: Tensor) -> Tensor:
    return torch.zeros_like(mask)


@pytest.mark.parametrize("change", [_zero, torch.ones_like, lambda b: b[:-1], lambda b: b | 1])
def test_an_impossible_mask_is_refused_and_its_proposer_barred(change: Callable[[Tensor], Tensor]) -> None:
    evil = set()

    def meddle(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if (
                reply.has_content()
                and "gradveil-mask" in reply.content
                and len(evil | {reply.metadata.src_node_id}) < 2
            ):
                evil.add(reply.metadata.src_node_id)
                body = torch.frombuffer(bytearray(reply.content["gradveil-mask"]["mask"].data), dtype=torch.uint8)
                forged = records.blob(change(body).numpy().tobytes(), records.MASK)
                reply.content["gradveil-mask"] = ArrayRecord({"mask": forged})
        return replies

    strategy = VeiledFedAvg(adgp(), proposers=1, fraction_evaluate=0.0)
    model = run(strategy, LocalGrid(make_app(VeilMod(adgp())), meddle), rounds=2)
    assert model
    assert len(strategy.used) == CLIENTS
    assert strategy.barred == evil


def test_a_mask_of_the_right_size_in_the_wrong_places_is_outvoted() -> None:
    """One of five proposers asks for everybody's smallest entries: the vote still captures most of the energy."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(4000, generator=rng)
    clients = [{"w": common + torch.randn(4000, generator=rng)} for _ in range(5)]
    defense = AlignedDualPrune()
    honest = [defense.propose(c, {}, _step()) for c in clients]
    evil = {"w": ~_largest(clients[0]["w"], 2400)}

    def energy(mask: dict[str, Tensor]) -> float:
        shares = [float((c["w"] ** 2 * mask["w"]).sum() / (c["w"] ** 2).sum()) for c in clients[1:]]
        return sum(shares) / len(shares)

    alone, single = energy(evil), energy(honest[0])
    voted = energy(vote([evil, *honest[1:]], rng))
    assert int(vote([evil, *honest[1:]], rng)["w"].sum()) == 1600
    assert voted > single > alone + 0.15


def _step() -> Any:
    return Step(rng=torch.Generator())


def _largest(values: Tensor, count: int) -> Tensor:
    return torch.zeros_like(values, dtype=torch.bool).index_fill(0, values.abs().topk(count).indices, True)


# ------------------------------------------------------------------------------------- secure aggregation

SECURE = ErrorFeedback(Chain(AlignedDualPrune(), FixedPoint()))


def uploads(grid: LocalGrid, mask: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """What each client sent last, out of its own memory."""
    like = {n: torch.zeros(m.shape) for n, m in mask.items()}
    bodies = [tree_of(context)["upload.body"].numpy().tobytes() for context in grid.contexts.values()]
    return [wire.decode(body, like=like, within=mask) for body in bodies]


def test_the_server_learns_the_sum_and_nothing_else() -> None:
    seen: list[Tensor] = []

    def keep(replies: list[Message]) -> list[Message]:
        for reply in replies:
            if reply.has_content() and "arrays" in reply.content:
                seen.append(torch.frombuffer(bytearray(reply.content["arrays"]["update"].data), dtype=torch.uint8))
        return replies

    grid = LocalGrid(make_app(SecureVeilMod(SECURE)), keep)
    strategy = SecureFedAvg(SECURE, fraction_evaluate=0.0)
    model = run(strategy, grid, rounds=1)
    assert not strategy.rejected
    assert strategy.last_sum is not None
    assert strategy._round is not None
    assert strategy._round.mask is not None
    sent = uploads(grid, strategy._round.mask)
    for name, total in strategy.last_sum.items():
        assert torch.equal(total, sum(one[name] for one in sent))  # type: ignore[arg-type]
        torch.testing.assert_close(model[name], build_model().state_dict()[name] - total / CLIENTS)
    assert strategy.seen is not None
    batch = batch_of(0, 1)  # the audit attacks the sum through the same gate as any upload
    view = observe(strategy.seen, build_model(), loss_fn, batch, ThreatModel(), num_classes=5)
    assert view.num_examples == 16 * CLIENTS + sum(range(CLIENTS))
    assert all(torch.equal(view.grads[n], t / CLIENTS) for n, t in strategy.last_sum.items())
    for body in seen:  # every byte value about equally often; plain words would be nearly all 0x00 and 0xff on top
        counts = torch.bincount(body.long(), minlength=256).float()
        assert float(((counts - counts.mean()) ** 2 / counts.mean()).sum()) < 400  # chi-squared, 255 degrees
    plain = FixedPoint().to_words(sent[0], strategy._round.mask)
    assert all(plain.tobytes() != body.numpy().tobytes() for body in seen)


@pytest.mark.parametrize("fault", ["drop", "garbage"])
def test_a_missing_or_false_vector_voids_the_round_and_loses_nothing(fault: str) -> None:
    active = True

    def meddle(replies: list[Message]) -> list[Message]:
        if active and "arrays" in replies[0].content:
            if fault == "drop":
                return replies[1:]
            _with_body(replies[0], lambda body: os.urandom(len(body)))
        return replies

    grid = LocalGrid(make_app(SecureVeilMod(SECURE)), meddle)
    strategy = SecureFedAvg(SECURE, fraction_evaluate=0.0)
    assert run(strategy, grid, rounds=2) == {}
    active = False
    assert run(strategy, grid, rounds=1)
    memory = tree_of(grid.contexts[node(0)])
    update = tree.zeros_like(dict(build_model().state_dict()))
    for round_ in (1, 2, 1):
        step = local_update(build_model(), loss_fn, [batch_of(0, round_)], lr=0.5)
        update = tree.add(update, step)
    held = tree.only("veil.state.residual", memory)
    assert strategy._round is not None
    assert strategy._round.mask is not None
    sent = uploads(grid, strategy._round.mask)[0]
    for name in update:
        torch.testing.assert_close(held[name] + sent[name], update[name], rtol=0, atol=1e-5)


def test_a_secure_client_sends_nothing_to_a_curious_server() -> None:
    strategy = VeiledFedAvg(SECURE, fraction_evaluate=0.0)
    assert run(strategy, LocalGrid(make_app(SecureVeilMod(SECURE))), rounds=1) == {}
    assert "nothing is sent in the clear" in strategy.rejected[0].reason
    with pytest.raises(EngineError, match="does not round"):
        SecureVeilMod(adgp())


def test_streams_cancel_and_bad_keys_are_refused() -> None:
    pairs = [new_key() for _ in range(3)]
    keys = [public for _, public in pairs]
    words = [torch.randint(2**32, (1001,)).numpy().astype("uint32") for _ in pairs]
    hidden = {
        i: blind(w, secret, keys, b"round 1") for i, (w, (secret, _)) in enumerate(zip(words, pairs, strict=True))
    }
    assert (add_up(hidden) == words[0] + words[1] + words[2]).all()
    other = blind(words[0], pairs[0][0], keys, b"round 2")
    assert (other != hidden[0]).mean() > 0.99
    for bad in (keys[:2], [keys[0], keys[1], keys[1]], keys[1:], [keys[0], keys[1], bytes(32)]):
        with pytest.raises(EngineError):
            blind(words[0], pairs[0][0], bad, b"round 1")


# ------------------------------------------------------------------------------------- memory in files


def test_a_file_carries_the_residual_over_runs_and_servers(tmp_path: Path) -> None:
    mod = VeilMod(dgp(), folder=tmp_path / "nodes")
    checkpoint = tmp_path / "server.safetensors"
    whole = run(VeiledFedAvg(dgp(), fraction_evaluate=0.0), LocalGrid(make_app(VeilMod(dgp()))), rounds=4)

    first = VeiledFedAvg(dgp(), fraction_evaluate=0.0, checkpoint=checkpoint)
    assert first.resume() is None
    run(first, LocalGrid(make_app(mod)), rounds=2)
    again = VeiledFedAvg(dgp(), fraction_evaluate=0.0, checkpoint=checkpoint)
    arrays = again.resume()
    grid = LocalGrid(make_app(mod))  # new contexts: the nodes restarted too
    for round_ in (3, 4):
        replies = grid.send_and_receive(again.configure_train(round_, arrays, ConfigRecord(), grid))
        arrays, _ = again.aggregate_train(round_, replies)
    assert not again.rejected
    resumed = arrays.to_torch_state_dict()
    for name in whole:
        torch.testing.assert_close(resumed[name], whole[name], rtol=1e-5, atol=1e-6)
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "nodes").glob("*.safetensors")} == {0o600}


def test_two_nodes_cannot_share_a_memory(tmp_path: Path) -> None:
    """One would take back what the other has sent, and both would count."""
    grid = LocalGrid(make_app(VeilMod(dgp(), folder=tmp_path)))
    for context in grid.contexts.values():
        context.node_config["partition-id"] = 0
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    assert run(strategy, grid, rounds=1)
    assert len(strategy.used) == 1
    assert len(strategy.rejected) == CLIENTS - 1
    assert all("partition-id of its own" in one.reason for one in strategy.rejected)


def test_a_state_too_large_for_flower_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradveil.engines.flower_memory.CONTEXT_BYTES", 1000)
    strategy = VeiledFedAvg(dgp(), fraction_evaluate=0.0)
    assert run(strategy, LocalGrid(make_app(VeilMod(dgp()))), rounds=1) == {}
    assert "gradveil-dir" in strategy.rejected[0].reason


def test_the_store_survives_a_kill_and_refuses_company(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "a.safetensors")
    with store.claimed():
        assert store.load() == {}
        store.save({"x": torch.ones(3)})
        with pytest.raises(StateError, match="another process"), store.claimed():
            pass
    (tmp_path / "a.safetensors.tmp").write_bytes(b"half a file")  # killed while writing
    assert torch.equal(store.load()["x"], torch.ones(3))
    store.save({"x": torch.zeros(3)})
    assert torch.equal(store.load()["x"], torch.zeros(3))
    store.path.write_bytes(b"rubbish")
    with pytest.raises(StateError, match="cannot read"):
        store.load()


def test_a_mask_that_does_not_fit_is_an_error_not_a_crash() -> None:
    like = {"w": torch.zeros(9)}
    for body in (b"", b"x", b"xxx"):
        content = RecordDict({"gradveil-mask": ArrayRecord({"mask": records.blob(body, records.MASK)})})
        with pytest.raises(WireError, match="9 positions"):
            records.read_mask(content, like)
