"""Published attacks as settings of the one loop; every field of `GradientMatching` can be given to change them."""

from dataclasses import replace
from typing import Any

from .matching import GradientMatching


def inverting_gradients(**changes: Any) -> GradientMatching:
    """IG: cosine distance, signed Adam, total variation, three drops of the rate.

    Reference: Geiping et al., "Inverting Gradients - How easy is it to break privacy in federated learning?".
    """
    return replace(GradientMatching(), **changes)


def eased_matching(**changes: Any) -> GradientMatching:
    """IG by a schedule of our own: plain Adam, large steps that fall as a cosine, smoothing that eases off.

    The settings were chosen on LeNet, fresh and trained, where they find more than IG's in as many steps; on a fresh
    CNN6 they find a little less, and more smoothing at first finds much less. Run both.
    """
    ours = GradientMatching(signed=False, lr=0.4, decay="cosine", tv_first=3.0, tv_share=True)
    return replace(ours, **changes)


def gi_paper(**changes: Any) -> GradientMatching:
    """GI as the dual-pruning paper ran it: the loop of IG with the plain squared distance."""
    return replace(GradientMatching(objective="l2", normalise=False), **changes)


def see_through_gradients(**changes: Any) -> GradientMatching:
    """GI in full: squared distance, BatchNorm statistics, image priors, several seeds drawn to their mean.

    The original registers the seeds before it averages them; here they are averaged pixel by pixel.

    Reference: Yin et al., "See through Gradients: Image Batch Recovery via GradInversion".
    """
    full = GradientMatching(
        objective="l2",
        signed=False,
        decay="cosine",
        tv=1e-3,
        restarts=4,
        bn=1.0,
        l2=1e-5,
        group=0.01,
        langevin=0.01,
    )
    return replace(full, **changes)


def deep_leakage(**changes: Any) -> GradientMatching:
    """DLG: squared distance, L-BFGS, labels searched along with the pictures; for smooth activations.

    Reference: Zhu et al., "Deep Leakage from Gradients".
    """
    dlg = GradientMatching(
        objective="l2",
        normalise=False,
        optimizer="lbfgs",
        signed=False,
        lr=1.0,
        steps=6000,  # 300 times 20 inner iterations
        decay="none",
        tv=0.0,
        restarts=5,
        box=False,
        labels="joint",
        stop=1e-5,  # float32 goes no lower than a few 1e-6 on some pictures
    )
    return replace(dlg, **changes)


def improved_deep_leakage(**changes: Any) -> GradientMatching:
    """DLG with the labels read off the classifier first. Zhao et al., "iDLG: Improved Deep Leakage from Gradients"."""
    return replace(deep_leakage(), **{"labels": "infer", **changes})
