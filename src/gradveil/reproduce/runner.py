"""Doing a table cell by cell: what is recorded is skipped, what does not fit the time is left for the next command."""

import hashlib
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from .. import cost as costs
from .. import paper, record
from ..attacks.keep import keep
from ..attacks.progress import Progress, watch
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

Status = Literal["done", "recorded", "untrained", "failed", "no time", "no data", "impossible"]
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
    status: Status
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
        attacker = key(cell).partition("_")[0]
        if key(cell) not in ahead:
            ahead |= _next(cell, cells[done:], session, took.get(attacker, 0.0), alone)
        outcome = ahead.pop(key(cell))
        if outcome.status == "done":
            took[attacker] = outcome.seconds
        outcomes.append(outcome)
        tell(outcome, done, len(cells))
    return outcomes


def _next(cell: Cell, later: Sequence[Cell], session: Session, wait: float, alone: set[str]) -> dict[str, Outcome]:
    """Return what became of a cell, and of the later ones that were attacked along with it.

    What breaks among several is tried again alone, and reported then. `wait` is what the last one like it took.
    """
    settled = _settled(cell, session)[1]
    if settled is not None:
        return {key(cell): settled}
    if session.left <= wait:
        return {key(cell): Outcome(cell, "no time")}
    if isinstance(cell, AttackCell):
        try:
            pictures.load_split(cell.data, "test", session.root)
        except ConfigError as error:
            return {key(cell): Outcome(cell, "no data", note=str(error))}
    cells = [cell, *_joining(cell, later, session, wait, alone)]
    found = _do(cells, session)
    alone |= {key(c) for c in cells} - found.keys()
    return found if key(cell) in found else found | _do([cell], session)


def _joining(cell: Cell, later: Sequence[Cell], session: Session, wait: float, alone: set[str]) -> Iterable[Cell]:
    """Return later cells to be attacked with this one, on a GPU, which a single one does not fill.

    Where time is short the first cell of an attacker goes alone and tells how many fit.
    """
    if not isinstance(cell, AttackCell) or key(cell) in alone:
        return ()
    room = TOGETHER.get(session.place.device.type, 0) // cell.pictures
    if session.minutes is not None:
        room = min(room, int(session.left / wait)) if wait else 0
    joining = (c for c in later if isinstance(c, AttackCell) and key(c) not in alone and attacked.joins(cell, c))
    return islice((c for c in joining if _settled(c, session)[1] is None), max(room - 1, 0))


def _do(cells: Sequence[Cell], session: Session) -> dict[str, Outcome]:
    """Do a cell, or attacks that join, and return what became of each; what breaks among several is left out."""
    done: dict[str, Outcome] = {}
    status: Status
    started = time.monotonic()
    try:
        for cell, seconds, found in _perform(cells, session):
            store.write(_settled(cell, session)[0], {**_head(cell, session, seconds), **found})
            done[key(cell)] = Outcome(cell, "done", seconds)
        return done
    except (OutOfTimeError, TimeoutError) as reason:
        status, note = "no time", str(reason)
    except NeedError as error:
        status, note = "impossible", str(error)
    except Exception as error:  # whatever it is, the others go on
        status, note = "failed", f"{type(error).__name__}: {error}"
    if len(cells) > 1 and status != "no time":
        log.warning("%d cells cannot be attacked together: %s", len(cells), note)
        return done
    spent = (time.monotonic() - started) / len(cells)
    return {key(c): Outcome(c, status, spent, note) for c in cells} | done


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


def _perform(cells: Sequence[Cell], session: Session) -> Iterator[tuple[Cell, float, dict[str, Any]]]:
    """Yield cells, the seconds each took and its result."""
    place, started = session.place, time.monotonic()
    match cells:
        case [TrainingCell() as cell]:
            result = trained.perform(cell, root=session.root, device=session.device, minutes=place.minutes)
            yield cell, time.monotonic() - started, result
        case [CostCell() as cell]:
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
            result = {**asdict(found), **sizes, "rounds_per_epoch": paper.ROUNDS_PER_EPOCH}
            yield cell, time.monotonic() - started, result
        case _:
            yield from _attack([cell for cell in cells if isinstance(cell, AttackCell)], session)


def _attack(cells: Sequence[AttackCell], session: Session) -> Iterator[tuple[Cell, float, dict[str, Any]]]:
    """Attack cells all at once, from where an earlier sitting was stopped; of several those that can be prepared."""
    cases: list[attacked.Case] = []
    with watch(lambda progress: _check(session, progress), every=WATCH_EVERY):
        for cell in cells:
            if cases:
                _check(session)
            with suppress(Exception) if len(cells) > 1 else nullcontext():
                cases.append(attacked.prepare(cell, session.place))
        if not cases:
            return
        kept, started = _searches(cases, session), time.monotonic()
        beside: dict[str, Any] = {"cells_together": len(cases)} if len(cells) > 1 else {}
        beside |= {"resumed": True} if kept.exists() else {}  # `seconds` are of the last sitting then
        with keep(kept):
            found = attacked.guess(cases, session.place)
        each = (time.monotonic() - started) / len(cases)
    for case, guesses in zip(cases, found, strict=True):
        strip, started = _settled(case.cell, session)[0].with_suffix(".webp"), time.monotonic()
        result = scored.report(case, guesses, session.place, strip)
        yield case.cell, case.seconds + each + time.monotonic() - started, result | beside
    shutil.rmtree(kept, ignore_errors=True)


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
