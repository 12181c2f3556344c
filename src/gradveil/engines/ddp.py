"""PyTorch DDP: every rank protects its own gradient before anything is exchanged.

    model = DistributedDataParallel(model)
    veil = attach(model, dgp())

`backward()` then runs the defense on this rank's gradient and leaves the mean of what all ranks sent in `.grad`.
Nothing else of the training loop changes.
"""

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ..core import Defense
from ..errors import EngineError
from .ddp_veil import RankVeil
from .fit import refuse_idle, refuse_unfit


def attach(
    model: DistributedDataParallel,
    defense: Defense,
    *,
    num_examples: int | None = None,
    seed: int | None = None,
    scaler: Any = None,
    prepared: bool = False,
    follow: bool = False,
) -> RankVeil:
    """Make `model` exchange protected gradients only, and return what holds this rank's state.

    All ranks call this together, before the first backward, with the same defense.

    Args:
        model: the wrapped model.
        defense: what protects each rank's gradient.
        num_examples: examples behind one gradient of a rank, accumulated ones included; some defenses count them.
        seed: fixes random numbers; for experiments only.
        scaler: the loop's `torch.amp.GradScaler`, if there is one: residuals are then kept in unscaled units, and a
            skipped step shows as infinity, so that the scaler lowers its scale.
        prepared: the script applies the defense's `prepare_model` and `prepare_batch` itself.
        follow: follow single examples through every pass, so that the noise of `hardened` covers the largest of them
            as in `Veil.protect`. A step in which that cannot be done is refused.

    Raises:
        EngineError: `model` is not a DistributedDataParallel model, or something in it would send raw gradients itself,
            or the ranks come with different defenses.
        NeedError: the defense needs what a hook never sees.
    """
    if not isinstance(model, DistributedDataParallel):
        raise EngineError(_not_ddp(model))
    refuse_unfit(defense, "a DDP hook", prepared)
    refuse_idle(defense, follow)
    _refuse_side_doors(model)
    veil = RankVeil(model, defense, num_examples=num_examples, seed=seed, scaler=scaler, follow=follow)
    veil.rehearse()
    model.register_comm_hook(None, veil.hook)
    model.register_forward_pre_hook(veil.refuse_if_broken)  # DDP would blame unused parameters
    return veil


def _refuse_side_doors(model: DistributedDataParallel) -> None:
    """Refuse what exchanges gradients without asking the hook, or lets it wait for buckets that never come."""
    if model._delay_all_reduce_params:
        raise EngineError("delay_all_reduce_named_params sends raw gradients past the hook: wrap the model without it")
    if getattr(model, "skip_all_reduce_unused_params", False):  # not in every torch
        raise EngineError("with skip_all_reduce_unused_params a step may never end: wrap the model without it")
    for name, module in model.module.named_modules():
        if isinstance(module, DistributedDataParallel):
            raise EngineError(
                f"the model holds another DistributedDataParallel ({name or 'the module itself'}), which would send "
                "its raw gradients by itself: wrap the model once"
            )
        if isinstance(module, nn.SyncBatchNorm):
            raise EngineError(
                f"{name or 'the model'} is a SyncBatchNorm, which sends raw statistics in forward and raw gradients in "
                "backward: use BatchNorm"
            )


def _not_ddp(model: nn.Module) -> str:
    kind = type(model).__name__
    if kind.startswith(("FSDP", "FullySharded")):
        return (
            f"{kind} reduces gradients in shards before a hook could see this rank's own gradient, so nothing could "
            "be protected: use DistributedDataParallel"
        )
    return f"attach needs a model wrapped in DistributedDataParallel, got {kind}"
