"""The audit itself: every cell through the same path, failures as rows, within the budget, resumable."""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import Any, TypeVar

import torch

from ..attacks import missing
from ..attacks.progress import Progress, watch
from ..core import Attack, Reconstruction
from ..errors import GuardError, NeedError
from ..veil import derive_rng
from . import accuracy, clients, draft, scoring
from .clients import Sent
from .diagnose import diagnose
from .pace import Event, Pace
from .plan import Cell, Plan, Subject, cells, is_active, is_adaptive
from .report import COLUMNS, Column, FastScore, Finding, Report, Row
from .risk import fast_score
from .verdict import BASELINE, against_floor, judge

WATCH_EVERY = 10  # attack steps between two looks at the clock
SMALL = 1_000_000  # parameters below which threads cost more than they give
T = TypeVar("T")


class BudgetError(Exception):
    """Raised inside an attack when the budget is used up."""


class Audit:
    """One run over all cells. It may be interrupted anywhere: `report` holds what is done so far."""

    def __init__(
        self,
        plan: Plan,
        subject: Subject,
        *,
        tell: Callable[[Event], None] = lambda event: None,
        save: Callable[[Report], None] = lambda report: None,
        before: Report | None = None,
    ) -> None:
        self.plan, self.subject, self.tell, self.save = plan, subject, tell, save
        self.cells = cells(subject)
        self.scorer = scoring.Scorer(plan, subject)
        self.pace = Pace()
        self.columns = {column: clients.column_info(column, plan, subject) for column in COLUMNS}
        self.started = time.monotonic()
        self.report = draft.empty(plan, subject, list(self.columns.values()))
        if before is not None:
            self.report = draft.resumed(self.report, before)
        self._earlier_seconds = self.report.seconds
        self._unmeasured: list[str] = []
        self._uploads: tuple[tuple[Column, str], list[Sent]] | None = None

    def run(self) -> Report:
        """Do everything that is not done yet, and save after each part."""
        with _one_thread(self.subject):
            return self._run()

    def _run(self) -> Report:
        try:
            self._prepare()
            for cell in self.cells:
                if self._open(cell):
                    self._update(rows=[*self.report.rows, self._row(cell)])
            self._measure_accuracy()
        except KeyboardInterrupt:
            self._finish("the audit was interrupted")
            raise
        self._finish("")
        return self.report

    def _update(self, **changes: Any) -> None:
        seconds = self._earlier_seconds + time.monotonic() - self.started
        self.report = replace(self.report, seconds=seconds, **changes)
        self.report = replace(self.report, judgements=judge(self.report))
        self.save(self.report)

    def _prepare(self) -> None:
        self._say("sending uploads")
        if not self.report.floors:
            found = []
            for column in COLUMNS:
                batches = [s.batch for s in self._sent(column, BASELINE)]
                found += self.scorer.floors(column, batches)
            size, luck = scoring.chance(self.subject)
            self._update(floors=found, metrics=draft.metric_ends(found[0].scores), lineup=size, chance=luck)
        if self.report.fast is None:
            self._say("fast score")
            score, error = _attempt(lambda: fast_score(self._sent_or_nothing, self.subject, self.plan.seed))
            # A model may hold an operation without the derivatives this needs; the attacks may do without them.
            why = f"It cannot be computed for this model: {error}"
            self._update(fast=score or FastScore(0.0, 0, [], note=why))

    def _open(self, cell: Cell) -> bool:
        return self.report.find(cell.column, cell.defense, cell.attack, guarded=cell.guarded) is None

    def _sent(self, column: Column, defense: str) -> list[Sent]:
        """Return the uploads of a defense; those of the last defense are kept, since every passive attack sees them."""
        if self._uploads is None or self._uploads[0] != (column, defense):
            sent = clients.uploads(self.plan, self.subject, self.columns[column], defense)
            self._uploads = (column, defense), sent
            self._describe(column, defense, sent)
        return self._uploads[1]

    def _sent_or_nothing(self, defense: str) -> list[Sent]:
        """Return the diagnostic uploads; nothing where a defense cannot send: its rows will say why."""
        return _attempt(lambda: self._sent("diagnostic", defense))[0] or []

    def _describe(self, column: Column, defense: str, sent: Sequence[Sent]) -> None:
        known = next(d for d in self.report.defenses if d.name == defense)
        if any(upload.column == column for upload in known.uploads):
            return
        fuller = replace(known, uploads=[*known.uploads, scoring.describe_uploads(column, sent)])
        self._update(defenses=[fuller if d.name == defense else d for d in self.report.defenses])

    # One cell

    def _row(self, cell: Cell) -> Row:
        attack, row = self.subject.attacks[cell.attack], self._blank(cell)
        lacking = missing(attack, clients.threat(cell.column, self.subject))
        if lacking:
            return replace(row, status="skipped", note=f"the attacker is not granted {', '.join(lacking)}")
        short = self._too_long(cell)
        if short:
            return replace(row, status="skipped", note=short)
        started = time.monotonic()
        fields, error = _attempt(lambda: self._attack(cell, attack))
        seconds = time.monotonic() - started
        if fields is not None:
            self.pace.finished(cell, seconds)
            return replace(row, seconds=seconds, **fields)
        match error:
            case BudgetError():
                return replace(row, status="skipped", seconds=seconds, note=f"cut: {error}")
            case NeedError():
                return replace(row, status="skipped", seconds=seconds, note=str(error))
            case GuardError():
                return replace(row, status="refused", seconds=seconds, note=str(error), floor=self._floor(cell.column))
        trace = "".join(traceback.format_exception(error))
        return replace(row, status="failed", seconds=seconds, note=f"{type(error).__name__}: {error}", traceback=trace)

    def _blank(self, cell: Cell) -> Row:
        adaptive = is_adaptive(cell.attack, self.subject)
        return Row(cell.column, cell.defense, cell.attack, "ok", adaptive, cell.guarded)

    def _attack(self, cell: Cell, attack: Attack) -> dict[str, Any]:
        data = self.subject.victims
        attack = attack.fitted(self.subject.defenses[cell.defense], data.mean, data.std)
        if is_active(attack):
            column = self.columns[cell.column]
            sent = clients.uploads(self.plan, self.subject, column, cell.defense, attack, guarded=cell.guarded)
        else:
            sent = self._sent(cell.column, cell.defense)
        rngs = [derive_rng(self.plan.seed, f"{cell.attack} {i}", 0, "attack") for i in range(len(sent))]
        with watch(lambda p: self._watch(cell, p), every=WATCH_EVERY):
            self._say(_name(cell))
            found = attack.run_many([s.seen for s in sent], rngs)
        diverged = sum(not bool(f.inputs.isfinite().all()) for f in found)
        if diverged:  # an attack that broke down was not withstood
            return {"status": "failed", "note": f"the attack diverged (NaN) on {diverged} of {len(found)} uploads"}
        return self.scorer.row(sent, found, self._blind(cell, attack, sent))

    def _blind(self, cell: Cell, attack: Attack, sent: Sequence[Sent]) -> list[list[Reconstruction]]:
        """Return what the same attacker guesses without the gradient, several times."""
        blind = attack.blind()
        if blind is None:
            return []
        names = [[f"{cell.attack} {i} {draw}" for i in range(len(sent))] for draw in range(scoring.CONTROLS)]
        seen = [s.seen for s in sent]
        return [blind.run_many(seen, [derive_rng(self.plan.seed, n, 0, "blind") for n in draw]) for draw in names]

    def _floor(self, column: Column) -> list[float]:
        return max((f.scores["ssim"] for f in self.report.floors if f.column == column), key=fmean)

    # Time

    def _left(self) -> float | None:
        return 60 * self.plan.budget - (time.monotonic() - self.started) if self.plan.budget else None

    def _too_long(self, cell: Cell) -> str:
        left, cost = self._left(), self.pace.cost(cell)
        if left is None or left > (cost or 0.0):
            return ""
        return f"cut: about {cost or 0:.0f} s needed, {max(left, 0):.0f} s left of {self.plan.budget:g} minutes"

    def _watch(self, cell: Cell, progress: Progress) -> None:
        left = self._left()
        if left is not None and left <= 0:
            raise BudgetError(f"the budget of {self.plan.budget:g} minutes was used up")
        self._say(_name(cell), progress.step, progress.total)

    def _say(self, stage: str, step: int = 0, steps: int = 0) -> None:
        open_cells = [cell for cell in self.cells if self._open(cell)]
        left, own = self.pace.left(open_cells, step, steps)
        done = len(self.cells) - len(open_cells)
        self.tell(Event(stage, done, len(self.cells), step, steps, left, own))

    # What comes after

    def _measure_accuracy(self) -> None:
        rounds = self.plan.accuracy_rounds
        if not rounds:
            return
        like = self._sent("realistic", BASELINE)[0].grads
        for known in self.report.defenses:
            left = self._left()
            if known.accuracy is None and (left is None or left > 0):
                self._say(f"accuracy under {known.name}")
                defense = self.subject.defenses[known.name]
                value, error = _attempt(partial(accuracy.measure, defense, rounds, self.plan.seed, like))
                if error is not None:
                    self._unmeasured.append(f"Accuracy under {known.name} was not measured: {error}")
                fuller = replace(known, accuracy=value)
                self._update(defenses=[fuller if d.name == known.name else d for d in self.report.defenses])

    def _finish(self, why: str) -> None:
        rows = list(self.report.rows)
        rows += [
            replace(self._blank(cell), status="skipped", note=f"cut: {why}") for cell in self.cells if self._open(cell)
        ]
        cut = [f"{_name(row)}: {row.note.removeprefix('cut: ')}" for row in rows if row.note.startswith("cut: ")]
        self._update(rows=rows)
        notes = [*draft.notes(self.report, self.subject), *self._unmeasured]
        self._update(cut=cut, notes=notes, fast=draft.correlated(self.report))
        self._update(findings=self._explain())
        self._say("done")

    def _explain(self) -> list[Finding]:
        """Look for the cause wherever no attack at all beats blind guessing without a defense."""
        found: dict[str, Finding] = {}
        for column in COLUMNS:
            rows = [r for r in self.report.rows if r.column == column and r.defense == BASELINE and r.status == "ok"]
            tests = [against_floor(self.report, row) for row in rows]
            if rows and not any(test and test.beats for test in tests):
                for finding in diagnose(self._sent(column, BASELINE), rows, self.subject.victims):
                    found.setdefault(
                        finding.code, replace(finding, evidence=f"{column.capitalize()}: {finding.evidence}")
                    )
        return list(found.values())


@contextmanager
def _one_thread(subject: Subject) -> Iterator[None]:
    """Let a small model on a CPU run on one thread: two wait for each other in tiny double-backward graphs."""
    before = torch.get_num_threads()
    small = subject.device.type == "cpu" and sum(p.numel() for p in subject.model.parameters()) < SMALL
    try:
        torch.set_num_threads(1 if small else before)
        yield
    finally:
        torch.set_num_threads(before)


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Return what `work` returns, or how it broke. The one broad except: a failure is a result, not to be hidden."""
    try:
        return work(), None
    except Exception as error:
        return None, error


def _name(item: Cell | Row) -> str:
    return f"{item.column}, {item.defense}, {item.attack}{', guarded' if item.guarded else ''}"
