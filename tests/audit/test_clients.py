"""Clients that work at the same time send what they would have sent one after the other."""

import time

import pytest
import torch

from gradveil.audit import Plan, clients, subject
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
