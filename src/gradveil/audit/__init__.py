"""The audit: what does a shared gradient give away, and what stops it?"""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..attacks import ATTACKS
from ..core import Attack, Defense, LossFn
from ..data import Dataset
from ..defenses import DEFENSES
from ..spec import build, to_text
from .assemble import subject
from .pace import Event
from .plan import Plan
from .render import to_html, to_markdown
from .report import Report
from .run import Audit


def audit(
    model: nn.Module | str = "lenet",
    data: Dataset | str = "photos",
    *,
    defenses: Sequence[Defense | str] | Mapping[str, Defense] = (),
    attacks: Sequence[Attack | str] | Mapping[str, Attack] = (),
    loss_fn: LossFn = nn.functional.cross_entropy,
    tell: Callable[[Event], None] = lambda event: None,
    **settings: Any,
) -> Report:
    """Attack what a client would send under each defense, and return what was found.

    Args:
        model: A module, a name such as `lenet`, or `package.module:factory`.
        data: Pictures with the model's normalisation, a name such as `photos`, or a folder.
        defenses: Defenses, or texts such as `dgp`; a mapping names them. The bare gradient is always added.
        attacks: Attacks, or texts such as `inverting_gradients(steps=300)`. Keep a naive one beside an adaptive one.
        loss_fn: The client's loss.
        tell: Called with an `Event` again and again, for a progress bar.
        settings: Any other field of `Plan`, such as `pictures`, `batch_size`, `budget` or `seed`.

    Guarantees: an attack sees only decoded bytes and what the threat model grants; a failed attack is a row with its
    traceback; same settings, same report on a CPU, but for times. `Report.save` writes the JSON, `to_html` the page.
    """
    known_defenses, known_attacks = _objects(DEFENSES, defenses, "defense"), _objects(ATTACKS, attacks, "attack")
    plan = Plan(
        model=model if isinstance(model, str) else type(model).__name__,
        data=data if isinstance(data, str) else data.name,
        defenses=tuple(known_defenses),
        attacks=tuple(known_attacks),
        **settings,
    )
    found = subject(
        plan,
        model=None if isinstance(model, str) else model,
        dataset=None if isinstance(data, str) else data,
        defenses=known_defenses,
        attacks=known_attacks,
        loss_fn=loss_fn,
    )
    return Audit(plan, found, tell=tell).run()


class _CallableModule(ModuleType):
    """Lets `gradveil.audit` be this package and the function of the same name."""

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return audit(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule


def _objects(table: Any, given: Sequence[Any] | Mapping[str, Any], kind: str) -> dict[str, Any]:
    if isinstance(given, Mapping):
        return dict(given)
    return {item if isinstance(item, str) else to_text(item): build(table, item, kind) for item in given}


def write(report: Report, folder: str | Path) -> Path:
    """Write `report.json`, `report.html` and `report.md` into a folder; return the page's path."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    report.save(folder / "report.json")
    (folder / "report.md").write_text(to_markdown(report), encoding="utf-8")
    page = folder / "report.html"
    page.write_text(to_html(report), encoding="utf-8")
    return page


__all__ = ["Audit", "Event", "Plan", "Report", "audit", "subject", "to_html", "to_markdown", "write"]
