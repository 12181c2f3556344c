"""Doing a table cell by cell: what is recorded is skipped, what does not fit the time is left for the next command."""

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .. import cost as costs
from .. import paper, record
from ..attacks.keep import keep
from ..attacks.progress import Progress, watch
from ..core import Reconstruction
from ..data import is_original
from ..data.cifar import LAYOUTS, find_folder
from ..errors import ConfigError, NeedError
from ..training.job import pick_device
from . import attacked, pictures, scored, store, trained
from .cells import AttackCell, Cell, CostCell, TrainingCell, definition, key
from .figures import is_of
from .scales import Scale
from .tables import TABLES, entries, worklist
from .weights import RUNS

WATCH_EVERY = 50  # attack steps between two looks at the clock
# Pictures of several cells attacked at once. On an H200 four cells of ResNet18 together take nine tenths of the time of
# four alone; more gain no more, and a stop loses them all. A CPU gains nothing.
TOGETHER = {"cuda": 80}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """One sitting: how, where, and for how long."""

    scale: Scale
    folder: Path = Path("results")
    root: str | None = None
    device: str = "auto"
    minutes: float | None = None
    train: bool = False  # whether missing training runs are run; at quick scale they always are
    since: datetime | None = None  # attacks and costs recorded before are run again
    command: str = ""
    started: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return float("inf") if self.minutes is None else 60 * self.minutes - (time.monotonic() - self.started)

    @property
    def place(self) -> attacked.Place:
        """Where attacks run, and the minutes that remain."""
        minutes = None if self.minutes is None else max(self.left, 0.0) / 60
        return attacked.Place(self.scale, self.root, pick_device(self.device), minutes)


class Outcome(NamedTuple):
    """What became of a cell. `impossible`: the attack lacks something this defense or model does not give it."""

    cell: Cell
    status: Literal["done", "recorded", "untrained", "failed", "no time", "no data", "impossible"]
    seconds: float = 0.0
    note: str = ""


class OutOfTimeError(Exception):
    """Raised inside a cell when the sitting's time is used up."""


def run(
    name: str,
    session: Session,
    *,
    seeds: Sequence[int] = (0,),
    pattern: str = "*",
    tell: Callable[[Outcome, int, int], None] = lambda outcome, done, total: None,
) -> list[Outcome]:
    """Do the cells of a table that match `pattern` (several by commas) and are not recorded yet.

    Guarantees: a result file is whole or absent; the same command run again goes on where this one stopped. A cell
    that breaks is reported as failed and leaves no file, and the others go on.
    """
    patterns = pattern.split(",")
    cells = [c for c in worklist(name, session.scale, tuple(seeds)) if any(fnmatch(key(c), p) for p in patterns)]
    took: dict[str, float] = {}  # what the last cell of each attacker took
    outcomes = []
    ahead: dict[str, Outcome] = {}  # of cells that were attacked along with an earlier one
    alone: set[str] = set()  # cells that could not be
    for done, cell in enumerate(cells, start=1):
        if key(cell) not in ahead:
            ahead |= _along_with(cell, cells[done:], session, took, alone)
        outcome = ahead.pop(key(cell), None) or _one(cell, session, took)
        if outcome.status == "done":
            took[key(cell).partition("_")[0]] = outcome.seconds
        outcomes.append(outcome)
        tell(outcome, done, len(cells))
    return outcomes


def _along_with(
    cell: Cell, later: Sequence[Cell], session: Session, took: dict[str, float], alone: set[str]
) -> dict[str, Outcome]:
    """On a GPU, which a single cell does not fill: attack it together with later ones that join.

    What breaks is left out: it is tried again alone, and reported then. Where time is short the first cell of an
    attacker goes alone and tells how many fit.
    """
    wait = took.get(key(cell).partition("_")[0], 0.0)
    unknown = session.minutes is not None and not wait
    if not isinstance(cell, AttackCell) or unknown or key(cell) in alone or _settled(cell, session)[1] is not None:
        return {}
    place = session.place
    room = TOGETHER.get(place.device.type, 0) // cell.pictures
    room = min(room, int(session.left / wait)) if session.minutes is not None else room
    joining = [c for c in later if isinstance(c, AttackCell) and key(c) not in alone and attacked.joins(cell, c)]
    wanted = [cell, *(c for c in joining if _settled(c, session)[1] is None)][: max(room, 0)]
    if len(wanted) < 2:
        return {}
    outcomes: dict[str, Outcome] = {}
    cases: list[attacked.Case] = []
    started = time.monotonic()
    try:
        with watch(lambda progress: _check(session, progress), every=WATCH_EVERY):
            for one in wanted:
                with suppress(Exception):
                    cases.append(attacked.prepare(one, session.place))
                _check(session)
            started = time.monotonic()
            found = _guess(cases, session) if cases else []
            each = (time.monotonic() - started) / max(len(cases), 1)
        for case, guesses in zip(cases, found, strict=True):
            path, started = _settled(case.cell, session)[0], time.monotonic()
            result = scored.report(case, guesses, place, path.with_suffix(".webp"))
            seconds = case.seconds + each + time.monotonic() - started
            store.write(path, {**_head(case.cell, session, seconds), "cells_together": len(cases), **result})
            outcomes[key(case.cell)] = Outcome(case.cell, "done", seconds)
        shutil.rmtree(_searches(cases, session), ignore_errors=True)
    except OutOfTimeError as reason:
        spent = (time.monotonic() - started) / len(wanted)
        return outcomes | {key(c): Outcome(c, "no time", spent, str(reason)) for c in wanted if key(c) not in outcomes}
    except Exception as error:  # whatever it is, they are tried alone
        log.warning("%d cells cannot be attacked together: %s", len(wanted), error)
    alone |= {key(c) for c in wanted} - outcomes.keys()
    return outcomes


def _settled(cell: Cell, session: Session) -> tuple[Path, Outcome | None]:
    """Return where the result of a cell lies, and its outcome if there is nothing to do."""
    at_hand = copy_at_hand(_data_of(cell), session.root)
    original = at_hand is None or is_original(_data_of(cell), {"test": at_hand})
    place = session.scale.name if original else store.OTHER_COPY
    path = store.path_of(session.folder, place, cell)
    if isinstance(cell, TrainingCell):
        known = [r for r in trained.recorded(session.folder, cell, place) if r["settings"]["seed"] == cell.seed]
    else:  # a result of another definition is run again
        found = [store.load(path)] if path.exists() else []
        known = [r for r in found if is_of(r, cell) and not _outdated(r, session)]
    if any(store.on_original(r) if original else r.get("digests", {}).get("test") == at_hand for r in known):
        return path, Outcome(cell, "recorded")
    if isinstance(cell, TrainingCell) and not session.train and session.scale.name != "quick":
        file = session.folder / "training" / path.name if original else path
        return path, Outcome(cell, "untrained", note=trained.command(cell, file, session.root, session.device))
    return path, None


def _outdated(result: dict[str, Any], session: Session) -> bool:
    return session.since is not None and datetime.fromisoformat(result["environment"]["time"]) < session.since


def _one(cell: Cell, session: Session, took: dict[str, float]) -> Outcome:
    path, settled = _settled(cell, session)
    if settled is not None:
        return settled
    if session.left <= took.get(key(cell).partition("_")[0], 0.0):
        return Outcome(cell, "no time")
    if isinstance(cell, AttackCell):
        try:
            pictures.load_split(cell.data, "test", session.root)
        except ConfigError as error:
            return Outcome(cell, "no data", note=str(error))
    started = time.monotonic()
    try:
        found = _perform(cell, session, path)
    except (OutOfTimeError, TimeoutError) as reason:
        return Outcome(cell, "no time", time.monotonic() - started, str(reason))
    except NeedError as error:
        return Outcome(cell, "impossible", time.monotonic() - started, str(error))
    except Exception as error:  # whatever it is, the others go on
        return Outcome(cell, "failed", time.monotonic() - started, f"{type(error).__name__}: {error}")
    seconds = time.monotonic() - started
    store.write(path, {**_head(cell, session, seconds), **found})
    return Outcome(cell, "done", seconds)


def _data_of(cell: Cell) -> str:
    match cell:
        case AttackCell():
            return cell.data
        case TrainingCell():
            return cell.settings.data
    return ""


@lru_cache(maxsize=8)
def copy_at_hand(name: str, root: str | None) -> str | None:
    """Return the digest of the test pictures of a dataset that has copies; None if it has none, or is not here yet."""
    layout = LAYOUTS.get(name)
    if layout is None or find_folder(layout, root) is None:
        return None
    return pictures.load_split(name, "test", root).digest


def _perform(cell: Cell, session: Session, path: Path) -> dict[str, Any]:
    place = session.place
    match cell:
        case AttackCell():
            with watch(lambda progress: _check(session, progress), every=WATCH_EVERY):
                case = attacked.prepare(cell, place)
                kept = _searches([case], session)
                resumed = {"resumed": True} if kept.exists() else {}  # `seconds` are of the last sitting then
                result = scored.report(case, _guess([case], session)[0], place, path.with_suffix(".webp"))
            shutil.rmtree(kept, ignore_errors=True)
            return result | resumed
        case TrainingCell():
            return trained.perform(cell, root=session.root, device=session.device, minutes=place.minutes)
        case CostCell():
            found = costs.measure(
                cell.model,
                cell.defense,
                users=cell.users,
                batch_size=cell.batch_size,
                rounds=cell.rounds,
                device=str(place.device),
                side=cell.side,
                seed=cell.seed,
            )
            sizes = {"mib": found.mib, "paper_mib": found.paper_mib}
            return {**asdict(found), **sizes, "rounds_per_epoch": paper.ROUNDS_PER_EPOCH}


def _guess(cases: Sequence[attacked.Case], session: Session) -> list[list[Reconstruction]]:
    """Attack what was sent in cells that join, from where an earlier sitting was stopped."""
    with keep(_searches(cases, session)):
        return attacked.guess(cases, session.place)


def _searches(cases: Sequence[attacked.Case], session: Session) -> Path:
    """Return where the searches of cells are kept: by all that they depend on, the code included."""
    about = [(vars(case.cell), definition(case.cell), case.data.digest) for case in cases]
    digest = hashlib.sha256(repr((about, session.scale.name, record.commit())).encode()).hexdigest()
    return RUNS / "searches" / f"{key(cases[0].cell)}_{digest[:12]}"


def _check(session: Session, progress: Progress | None = None) -> None:
    if session.left <= 0:
        raise OutOfTimeError(f"at step {progress.step} of {progress.total}" if progress else "before the attack began")


def _head(cell: Cell, session: Session, seconds: float) -> dict[str, Any]:
    """Return what every result file begins with."""
    kind = {AttackCell: "attack", TrainingCell: "training", CostCell: "cost"}[type(cell)]
    beside = {
        f"{name}: {entry.part}: {entry.label}": entry.paper
        for name in TABLES
        for entry in entries(name, session.scale, cell.seed)
        if entry.cell == cell and entry.paper
    }
    return {
        "kind": kind,
        "scale": session.scale.name,
        "note": session.scale.note,
        "cell": asdict(cell),
        "paper": beside,
        "command": session.command,
        "environment": record.environment(),
        "device": str(pick_device(session.device)),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "seconds": seconds,
        "seed": cell.seed,
    }
