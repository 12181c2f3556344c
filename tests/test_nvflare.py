"""The NVFlare filters: against its interface (a stand-in where it is not installed), and in its simulator if it is."""

import importlib
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gradveil import Veil, dgp
from gradveil.errors import GradientError, NeedError, WireError


def stand_in() -> dict[str, types.ModuleType]:
    """What gradveil uses of nvflare 2.9.0, with the behaviour read from its source."""

    class DataKind:
        WEIGHTS, WEIGHT_DIFF, APP_DEFINED = "WEIGHTS", "WEIGHT_DIFF", "APP_DEFINED"

    class DXO:
        def __init__(self, data_kind: str, data: dict[str, Any], meta: dict[str, Any] | None = None) -> None:
            self.data_kind, self.data, self.meta = data_kind, data, meta or {}

        def get_meta_prop(self, key: str, default: Any = None) -> Any:
            return self.meta.get(key, default)

        def to_shareable(self) -> "Shareable":
            return self.update_shareable(Shareable())

        def update_shareable(self, shareable: "Shareable") -> "Shareable":
            shareable["DXO"] = self
            return shareable

    class Shareable(dict[str, Any]):
        def get_return_code(self) -> str:
            return "OK"

    class DXOFilter:
        def __init__(self, supported: list[str], kinds: list[str]) -> None:
            self.kinds = kinds

        def process(self, shareable: Shareable, fl_ctx: Any) -> Shareable:
            dxo = shareable["DXO"]
            if dxo.data_kind not in self.kinds:
                return shareable
            return (self.process_dxo(dxo, shareable, fl_ctx) or dxo).update_shareable(shareable)

        def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: Any) -> DXO | None:
            raise NotImplementedError

    contents: dict[str, dict[str, Any]] = {
        "nvflare": {},
        "nvflare.apis": {},
        "nvflare.apis.dxo": {
            "DXO": DXO,
            "DataKind": DataKind,
            "MetaKey": types.SimpleNamespace(NUM_STEPS_CURRENT_ROUND="NUM_STEPS_CURRENT_ROUND"),
            "from_shareable": lambda s: s["DXO"],
        },
        "nvflare.apis.dxo_filter": {"DXOFilter": DXOFilter},
        "nvflare.apis.fl_constant": {
            "FLContextKey": types.SimpleNamespace(APP_ROOT="__app_root__"),
            "ReturnCode": types.SimpleNamespace(OK="OK"),
        },
        "nvflare.apis.fl_context": {"FLContext": object},
        "nvflare.apis.shareable": {"Shareable": Shareable},
    }
    modules = {name: types.ModuleType(name) for name in contents}
    for name, values in contents.items():
        vars(modules[name]).update(values)
    return modules


@pytest.fixture
def nvflare(monkeypatch: pytest.MonkeyPatch) -> Any:
    if importlib.util.find_spec("nvflare") is None:
        for name, module in stand_in().items():
            monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "gradveil.engines.nvflare", raising=False)
    yield importlib.import_module("gradveil.engines.nvflare")
    sys.modules.pop("gradveil.engines.nvflare", None)


class Where:
    """The part of NVFlare's context the filters use."""

    def __init__(self, root: Path, site: str = "site-1") -> None:
        self.root, self.site = root, site

    def get_prop(self, key: str, default: Any = None) -> str:
        return str(self.root)

    def get_job_id(self) -> str:
        return "job"

    def get_identity_name(self) -> str:
        return self.site

    def __getattr__(self, name: str) -> Any:  # logging and audit calls of the real filter base
        return lambda *_, **__: None


def update(seed: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"w": np.random.default_rng(seed).normal(size=(20, 30)).astype("f4"), "b": np.ones(20, "f4") * seed}


def test_the_filters_protect_and_restore(nvflare: Any, tmp_path: Path) -> None:
    where, sent_total = Where(tmp_path), {"w": np.zeros((20, 30)), "b": np.zeros(20)}
    veil = Veil(dgp(), {n: torch.from_numpy(v) for n, v in update(1).items()})
    for round_ in (1, 2, 3):
        hide, show = nvflare.VeilFilter("dgp"), nvflare.UnveilFilter()  # new objects, as in a new process
        plain = nvflare.DXO(nvflare.DataKind.WEIGHT_DIFF, update(round_), {"NUM_STEPS_CURRENT_ROUND": 7})
        hidden = hide.process(plain.to_shareable(), where)
        dxo = nvflare.from_shareable(hidden)
        assert list(dxo.data) == ["gradveil.v1"]
        want = veil.seal({n: torch.from_numpy(v) for n, v in update(round_).items()}, 1)
        assert dxo.data["gradveil.v1"].tobytes() == want.body  # the bytes of any other engine
        shown = nvflare.from_shareable(show.process(hidden, where))
        assert shown.data_kind == nvflare.DataKind.WEIGHT_DIFF
        assert shown.meta["NUM_STEPS_CURRENT_ROUND"] == 7
        sent_total = {n: sent_total[n] + shown.data[n] for n in sent_total}
    residual = veil.residual
    assert residual is not None
    for name in sent_total:
        computed = sum(update(round_)[name] for round_ in (1, 2, 3))
        np.testing.assert_allclose(sent_total[name] + residual[name].numpy(), computed, atol=1e-5)


def test_nothing_rides_beside_the_difference(nvflare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, hide = Where(tmp_path), nvflare.VeilFilter("dgp")
    result = nvflare.DXO(nvflare.DataKind.WEIGHT_DIFF, update(1)).to_shareable()
    with pytest.raises(NeedError, match="'extra'"):
        hide.process(type(result)({**result, "extra": update(1)}), where)
    monkeypatch.setattr(type(result), "get_return_code", lambda *_: "EXECUTION_EXCEPTION")
    with pytest.raises(NeedError, match="'DXO'"):  # NVFlare's own filter lets a failed result pass with all it holds
        hide.process(result, where)
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_protected_never_passes(nvflare: Any, tmp_path: Path) -> None:
    where, hide = Where(tmp_path), nvflare.VeilFilter("dgp")
    with pytest.raises(NeedError, match="only weight differences"):
        hide.process(nvflare.DXO(nvflare.DataKind.WEIGHTS, update(1)).to_shareable(), where)
    counts = {"n": np.arange(3)}
    with pytest.raises(GradientError, match="int64"):
        hide.process(nvflare.DXO(nvflare.DataKind.WEIGHT_DIFF, counts).to_shareable(), where)
    with pytest.raises(NeedError, match="mask"):
        nvflare.VeilFilter("adgp")
    garbage = nvflare.DXO(nvflare.DataKind.APP_DEFINED, {"gradveil.v1": np.zeros(9, np.uint8)}).to_shareable()
    with pytest.raises(WireError):
        nvflare.UnveilFilter().process(garbage, where)
    assert not list(tmp_path.glob("*.safetensors"))


TRAIN = """
import numpy as np, nvflare.client as flare
flare.init()
while flare.is_running():
    model = flare.receive()
    step = np.arange(100, dtype=np.float32).reshape(5, 20) / 100
    new = {name: np.asarray(value, dtype=np.float32) + step for name, value in model.params.items()}
    flare.send(flare.FLModel(params=new, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""

JOB = """
import sys
from nvflare.apis.dxo import DataKind
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv
from gradveil.engines.nvflare import UnveilFilter, VeilFilter

if __name__ == "__main__":
    recipe = NumpyFedAvgRecipe(name="veiled", model=[[0.0] * 20] * 5, min_clients=2, num_rounds=2,
        train_script="train.py", params_transfer_type=TransferType.DIFF, aggregator_data_kind=DataKind.WEIGHT_DIFF)
    recipe.add_client_output_filter(VeilFilter("dgp", folder=sys.argv[1] + "/state"), tasks=["train"])
    recipe.add_server_input_filter(UnveilFilter(), tasks=["train"])
    # One thread for two clients: a new process per client and round, so only a file keeps the residual.
    recipe.execute(SimEnv(num_clients=2, num_threads=1, workspace_root=sys.argv[1] + "/work"))
"""


@pytest.mark.engine
@pytest.mark.slow
def test_in_nvflares_simulator(tmp_path: Path) -> None:
    pytest.importorskip("nvflare", reason="nvflare is not installed")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "job.py").write_text(JOB)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "job.py", str(tmp_path)], cwd=tmp_path, env=env, check=True, timeout=240)
    from safetensors.numpy import load_file

    model = np.load(tmp_path / "work/veiled/server/simulate_job/models/server.npy")
    states = [load_file(tmp_path / f"state/simulate_job-site-{i}.safetensors") for i in (1, 2)]
    held = sum(state["veil.state.residual.numpy_key"] for state in states) / 2
    np.testing.assert_allclose(model + held, 2 * np.arange(100).reshape(5, 20) / 100, atol=1e-5)
