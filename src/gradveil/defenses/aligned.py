"""ADGP: all clients send inside one common set of positions, so the download is sparse too."""

from dataclasses import dataclass

import torch

from .. import check, select
from ..core import Defense, Grads, Masks, Need, State, Step
from ..errors import NeedError


@dataclass(frozen=True)
class AlignedDualPrune(Defense):
    """Send the `keep` share with the largest magnitudes inside the round's mask, leaving out the client's own `top`.

    One random client proposes the mask (`propose`): the `2 * keep` largest positions of each of its tensors. Every
    client removes its own `top` share from it and sends the `keep` largest of the rest. A mask with the wrong keys,
    shapes, type or population is refused. The paper leaves this variant's privacy open; the audit measures it.
    """

    keep: float = 0.2
    top: float = 0.05

    def __post_init__(self) -> None:
        check.fraction(keep=self.keep, top=self.top, twice_keep=2 * self.keep)
        check.positive(keep=self.keep)
        if self.top >= self.keep:
            raise ValueError(f"top must be below keep, got {self.top} and {self.keep}")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"mask"})

    def mask_count(self, n: int) -> int:
        """Return how many positions the mask of a tensor of `n` entries holds."""
        return select.band(n, 0.0, 1.0 - 2 * self.keep)[1]

    def propose(self, grads: Grads, state: State, step: Step) -> Masks:
        counts = [self.mask_count(g.numel()) for g in grads.values()]
        largest = select.prune(list(grads.values()), [(0, count) for count in counts])
        masks = {}
        for (name, g), kept, count in zip(grads.items(), largest, counts, strict=True):
            mask = kept != 0
            # Zeros among the largest cannot be told from what was removed: only the plain rule places them.
            masks[name] = mask if int(mask.sum()) == count else select.band_mask(g, 0, count)
        return masks

    def apply(self, grads: Grads, state: State, step: Step) -> tuple[Grads, State]:
        mask = step.require_mask(self.key())
        self.validate(mask, grads)
        sizes = [g.numel() for g in grads.values()]
        tops = [min(select.band(n, self.top, 0.0)[0], max(n - 1, 0)) for n in sizes]
        without_top = select.prune(list(grads.values()), [(top, n - top) for top, n in zip(tops, sizes, strict=True)])
        # What is not allowed becomes zero, so it adds nothing where it fills a band that is short of entries.
        allowed = [torch.where(mask[n], g, torch.zeros_like(g)) for n, g in zip(grads, without_top, strict=True)]
        sent = select.prune(allowed, [(0, select.band(n, 0.0, 1.0 - self.keep)[1]) for n in sizes])
        return dict(zip(grads, sent, strict=True)), state

    def validate(self, mask: Masks, params: Grads) -> None:
        """Raise `NeedError` unless `mask` could have come from an honest `propose` on these parameters."""
        if mask.keys() != params.keys():
            odd = sorted(mask.keys() ^ params.keys())[0]
            raise NeedError(f"the common mask and the parameters differ in {odd!r}: the round is refused")
        for name, g in params.items():
            m = mask[name]
            if m.dtype != torch.bool or m.shape != g.shape:
                raise NeedError(f"the common mask of {name} is {m.dtype} {tuple(m.shape)}, not bool {tuple(g.shape)}")
            if int(m.sum()) != self.mask_count(g.numel()):
                raise NeedError(
                    f"the common mask of {name} has {int(m.sum())} positions instead of "
                    f"{self.mask_count(g.numel())}: the round is refused"
                )
