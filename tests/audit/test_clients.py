"""Clients that work at the same time send what they would have sent one after the other."""

import time
from dataclasses import replace

import pytest
import torch

from gradveil.attacks import Chained
from gradveil.audit import Plan, clients, subject
from gradveil.core import Attack
from gradveil.defenses import DEFENSES
from gradveil.gradients import gradient
from gradveil.spec import build

RANDOM_LAYERS, MASKED, WAITING = "chain(precode, dgp)", "adgp", "hardened(examples=6)"


@pytest.mark.parametrize("text", ["dgp", MASKED, RANDOM_LAYERS, WAITING])
def test_threads_change_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(model="lenet", data="digits", pictures=6, batch_size=2, round=2)
    found = subject(plan, defenses={text: build(DEFENSES, text, "defense")})
    column = clients.column_info("realistic", plan, found)
    in_turn = clients.uploads(plan, found, column, text)
    monkeypatch.setattr(clients, "_at_once", lambda device: 3)
    together = clients.uploads(plan, found, column, text)
    assert [s.nbytes for s in together] == [s.nbytes for s in in_turn]
    assert [s.waited for s in together] == [s.waited for s in in_turn]
    for one, other in zip(together, in_turn, strict=True):
        assert all(torch.equal(one.seen.grads[name], g) for name, g in other.seen.grads.items())


def test_a_defense_that_runs_the_model_has_the_generator_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(model="lenet", data="digits", pictures=4, batch_size=1, round=0)
    found = subject(plan, defenses={"soteria": build(DEFENSES, "soteria", "defense")})
    held = []
    seal = clients.Veil.seal
    monkeypatch.setattr(clients, "_at_once", lambda device: 4)
    monkeypatch.setattr(clients.Veil, "seal", lambda *a, **k: held.append(clients._COMPUTING.locked()) or seal(*a, **k))
    clients.uploads(plan, found, clients.column_info("diagnostic", plan, found), "soteria")
    assert held == [True] * 4


def test_the_generator_of_the_process_belongs_to_one_client_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = []

    def slow(*args):
        busy.append(1)
        assert sum(busy) == 1
        time.sleep(0.01)
        found = gradient(*args)
        busy.append(-1)
        return found

    plan = Plan(model="lenet", data="digits", pictures=4, batch_size=1, round=0)
    found = subject(plan, defenses={"adgp": build(DEFENSES, "adgp", "defense")})
    monkeypatch.setattr(clients, "_at_once", lambda device: 4)
    monkeypatch.setattr(clients, "gradient", slow)
    clients.uploads(plan, found, clients.column_info("diagnostic", plan, found), "adgp")
    assert len(busy) == 4 * 2 * 2


@pytest.mark.parametrize(("attacks", "kept"), [({}, [1]), ({"chained": Chained()}, [0, 1])])
def test_any_attacker_may_look_up_the_clients_last_upload(attacks: dict[str, Attack], kept: list[int]) -> None:
    plan = Plan(model="lenet", data="digits", pictures=1, batch_size=1, round=2)
    found = replace(subject(plan, defenses={"dgp": build(DEFENSES, "dgp", "defense")}), attacks=attacks)
    (sent,) = clients.uploads(plan, found, clients.column_info("realistic", plan, found), "dgp")
    assert [one.round for one in sent.seen.earlier] == kept
    # What arrived then and now is this picture's gradient alone.
    exact = {n: (g != 0) & (sent.seen.earlier[-1].grads[n] != 0) for n, g in sent.seen.grads.items()}
    assert all(torch.allclose(sent.seen.grads[n][e], sent.grads[n][e], rtol=1e-4, atol=1e-6) for n, e in exact.items())
    assert any(e.any() for e in exact.values())
