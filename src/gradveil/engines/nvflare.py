"""NVFlare: a filter on the client that lets only the protected update out, and one on the server that reads it.

    recipe.add_client_output_filter(VeilFilter("dgp"), tasks=["train"])
    recipe.add_server_input_filter(UnveilFilter(), tasks=["train"])

The clients must send differences (`params_transfer_type=TransferType.DIFF`). NVFlare does not tell a client whether its
update was used, so unlike in Flower an update that gets lost is lost for good. Aligned rounds need a mask from the
server, which a filter cannot ask for.
"""

from pathlib import Path

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable

from .. import tree, wire
from ..core import Defense
from ..defenses import DEFENSES
from ..errors import GradientError, NeedError, WireError
from ..spec import build
from ..veil import Veil
from .fit import refuse_unfit
from .store import FileStore

BODY = "gradveil.v1"


class VeilFilter(DXOFilter):  # type: ignore[misc]
    """Protects the weight difference a client sends, and keeps the residual in a file of the site.

    Guarantees: a result that is not exactly one weight difference of floating-point arrays raises, and NVFlare then
    sends an error instead; `DXOFilter` alone would let it pass unfiltered. The residual is on disk before the result
    leaves, because the simulator may start a new process for every round.

    Args:
        defense: a text such as `dgp` or `error_feedback(dual_prune(top=0.1))`: job configurations hold plain data.
        folder: where the residual lives; by default the job's folder on the site.
    """

    def __init__(self, defense: str = "dgp", folder: str | None = None) -> None:
        super().__init__([DataKind.WEIGHT_DIFF], [DataKind.WEIGHT_DIFF])
        self.defense, self.folder = defense, folder
        built: Defense = build(DEFENSES, defense, "defense")
        refuse_unfit(built, "an NVFlare filter", prepared=False)
        if "mask" in built.needs:
            raise NeedError(f"{defense} needs a common mask, which an NVFlare filter cannot ask for")

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """Refuse everything that would pass the filter unprotected."""
        done = shareable.get_return_code() == ReturnCode.OK
        # A shareable is a dict: what lies in it beside the difference would travel as it is, and so would all of a
        # result that is marked as failed. NVFlare's own entries, such as the headers, begin with two underscores.
        odd = [key for key in shareable if not key.startswith("__") and not (done and key == "DXO")]
        if odd:
            raise NeedError(f"the result holds {odd[0]!r}, which cannot be protected: send one weight difference only")
        if done and from_shareable(shareable).data_kind != DataKind.WEIGHT_DIFF:
            raise NeedError("only weight differences can be protected: set params_transfer_type=TransferType.DIFF")
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO:
        """Return the sealed difference."""
        update = {name: torch.from_numpy(np.array(value)) for name, value in dxo.data.items()}
        odd = [name for name, t in update.items() if not t.is_floating_point()]
        if odd:
            raise GradientError(f"{odd[0]} has type {update[odd[0]].dtype}, which no defense can protect")
        update = {name: t if t.dtype == torch.float64 else t.float() for name, t in update.items()}
        store = FileStore(self._path(fl_ctx))
        with store.claimed():
            veil = Veil(build(DEFENSES, self.defense, "defense"), update, client=fl_ctx.get_identity_name())
            memory = tree.only("veil", store.load())
            if memory:
                veil.load_state_dict(memory)
            # A step takes at least one example; a defense that counts them then rather waits too long.
            body = veil.seal(update, int(dxo.get_meta_prop(MetaKey.NUM_STEPS_CURRENT_ROUND, 1))).body
            store.save(tree.under("veil", veil.state_dict()))
        return DXO(DataKind.APP_DEFINED, {BODY: np.frombuffer(body, dtype=np.uint8).copy()}, dxo.meta)

    def _path(self, fl_ctx: FLContext) -> Path:
        folder = self.folder or fl_ctx.get_prop(FLContextKey.APP_ROOT)
        if not folder:
            raise NeedError("there is no folder for the residual: pass folder=... to VeilFilter")
        return Path(folder) / f"{fl_ctx.get_job_id()}-{fl_ctx.get_identity_name()}.safetensors"


class UnveilFilter(DXOFilter):  # type: ignore[misc]
    """Turns a sealed difference back into arrays, for any aggregator; bytes that are not one raise `WireError`."""

    def __init__(self) -> None:
        super().__init__([DataKind.APP_DEFINED], [DataKind.APP_DEFINED])

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        """Return the difference; data that is not ours is left alone."""
        if BODY not in dxo.data:
            return None
        body = dxo.data[BODY]
        if not isinstance(body, np.ndarray) or body.dtype != np.uint8:
            raise WireError("a sealed update must be an array of bytes")
        update = wire.decode(body.tobytes())
        tree.require_finite(update)
        return DXO(DataKind.WEIGHT_DIFF, {name: t.numpy() for name, t in update.items()}, dxo.meta)
