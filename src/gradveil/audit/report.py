"""The report as plain data: one JSON file is the truth, every page and table is a pure function of it.

Lists of scores hold one value per attacked picture, in the order of `ColumnInfo.pictures`: NaN if an attack diverged.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .. import record
from ..config import finite, from_mapping
from ..errors import ConfigError

SCHEMA = 2
Column = Literal["diagnostic", "realistic"]
COLUMNS: tuple[Column, ...] = ("diagnostic", "realistic")
Status = Literal["ok", "refused", "skipped", "failed"]
Verdict = Literal["leaks", "holds", "incomplete"]


@dataclass(frozen=True)
class Original:
    """A private picture of the audit, for the reader to compare with."""

    index: int
    label: str
    png: str  # base64


@dataclass(frozen=True)
class ColumnInfo:
    """One of the two settings in which everything was attacked."""

    name: Column
    mode: Literal["eval", "train"]
    batch_size: int
    rounds: int  # uploads the client made before the attacked one
    pictures: list[int]  # positions in `Report.originals`
    grants: dict[str, bool]  # the threat model


@dataclass(frozen=True)
class Floor:
    """What a guess scores that never looked at the gradient."""

    column: Column
    guess: str
    scores: dict[str, list[float]]


@dataclass(frozen=True)
class Row:
    """One attack on one defense in one column.

    `ok`: it ran. `refused`: the client's guard would not compute a gradient, so nothing was sent. `skipped` and
    `failed`: there is no result, and `note` says why. An active attack has two rows: `guarded` says whether the client
    looked at the model first.
    """

    column: Column
    defense: str
    attack: str
    status: Status
    adaptive: bool = False
    guarded: bool = False
    note: str = ""
    traceback: str = ""
    scores: dict[str, list[float]] = field(default_factory=dict)
    floor: list[float] = field(default_factory=list)  # SSIM of the best blind guess that may guess as often
    identified: list[bool] = field(default_factory=list)  # was this picture the nearest of the line-up?
    mistaken: float = 0.0  # share of guesses made for other uploads that were nearest to this one's picture
    contrast: list[float] = field(default_factory=list)  # SSIM with its original minus that of other uploads' guesses
    labels_right: float | None = None  # share of labels the attacker found (1.0 if it was told)
    loss: float | None = None  # the attacker's own objective, mean over uploads
    seconds: float = 0.0
    pictures: list[str] = field(default_factory=list)  # base64 PNG, paired with the originals


@dataclass(frozen=True)
class Layer:
    """What one tensor lost on the way out, as a mean over the attacked uploads."""

    name: str
    entries: int
    sent: float  # share of entries that left
    energy: float  # share of the gradient's squared norm at the positions that left
    largest: float  # share of the 5 % largest gradient entries that left


@dataclass(frozen=True)
class Upload:
    """What left the client under one defense in one column, as a mean over the attacked uploads."""

    column: Column
    bytes_sent: int
    bytes_dense: int
    values_bytes: int  # of those sent; the rest is the header
    positions_bytes: int
    paper_bytes: int  # 32 bits for a sent entry, 1 for a pruned one
    distance: float  # ||sent - gradient|| / ||gradient||
    cosine: float
    residual_ratio: float | None  # ||residual|| / ||gradient|| before the upload; None: the defense keeps none
    seconds: float
    waited: float  # uploads without content that went before, until the defense let something go
    layers: list[Layer]


@dataclass(frozen=True)
class DefenseInfo:
    """One defense of the audit and what it costs."""

    name: str  # what the user wrote; rows refer to it
    text: str  # the full text that rebuilds it
    spec: dict[str, Any]
    uploads: list[Upload]
    accuracy: float | None = None

    @property
    def everyday(self) -> Upload | None:
        """What it sends in the realistic column, or in the other where that has no result."""
        return next((u for u in self.uploads if u.column == "realistic"), next(iter(self.uploads), None))


@dataclass(frozen=True)
class AttackInfo:
    """One attack of the audit."""

    name: str
    text: str
    spec: dict[str, Any]
    adaptive: bool
    active: bool = False  # changes the model it sends, which a guard may see


@dataclass(frozen=True)
class Finding:
    """Why an attack recovered nothing where it should have, and what to do about it."""

    code: str
    title: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Risk:
    """The fast first-order score of one defense: the first pictures of the diagnostic column, as time allowed."""

    defense: str
    readable: list[float]  # 0..1: share of the coarse picture a first-order attacker reads
    bound: list[float]  # pixel RMS error that no first-order attacker beats (Proposition 1)


@dataclass(frozen=True)
class FastScore:
    """All fast scores, and how well they rank the attacks that followed."""

    seconds: float
    directions: int
    risks: list[Risk]
    correlation: float | None = None  # Spearman, over every (defense, picture) with a result
    pairs: int = 0
    within: float | None = None  # the same among the pictures of one defense, mean over the defenses
    note: str = ""  # why there is no score, if there is none


@dataclass(frozen=True)
class Judgement:
    """The verdict on one defense in one column, or overall (`column` is None)."""

    defense: str
    column: Column | None
    verdict: Verdict
    reasons: list[str]
    worst_attack: str | None = None
    worst: float | None = None  # mean SSIM of the strongest attack
    worst_picture: float | None = None  # SSIM of the best recovered picture over all attacks
    floor: float | None = None  # mean SSIM of the best blind guess
    detectable: float | None = None  # smallest mean contrast the test could have seen


@dataclass(frozen=True)
class Report:
    """Everything the audit found. `to_json` and `from_json` are inverse."""

    title: str
    created: str
    seconds: float
    settings: dict[str, Any]
    environment: dict[str, Any]
    seed: int
    metrics: dict[str, Literal["high", "low"]]  # which end means that more was recovered
    lineup: int  # pictures in the identification line-up
    chance: float  # how often blind luck is the nearest, at most
    originals: list[Original]
    columns: list[ColumnInfo]
    floors: list[Floor]
    attacks: list[AttackInfo]
    defenses: list[DefenseInfo]
    rows: list[Row]
    judgements: list[Judgement] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    fast: FastScore | None = None
    cut: list[str] = field(default_factory=list)  # what was left out, and why
    notes: list[str] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)  # of the weights and the pictures, which paths do not settle
    schema: int = SCHEMA

    def column(self, name: Column) -> ColumnInfo:
        """Return the description of a column."""
        return next(c for c in self.columns if c.name == name)

    def find(self, column: Column, defense: str, attack: str, *, guarded: bool = False) -> Row | None:
        """Return the row of one attack on one defense."""
        wanted = (column, defense, attack, guarded)
        return next((r for r in self.rows if (r.column, r.defense, r.attack, r.guarded) == wanted), None)

    def judgement(self, defense: str, column: Column | None = None) -> Judgement:
        """Return the verdict on a defense, overall or in one column."""
        return next(j for j in self.judgements if j.defense == defense and j.column == column)

    def to_json(self) -> str:
        """Return the report as JSON text without NaN or infinity."""
        return json.dumps(finite(asdict(self)), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Write the JSON, atomically: a kill leaves the old file or the new one."""
        record.write_text(path, self.to_json())

    @staticmethod
    def from_json(text: str) -> "Report":
        """Return the report in `text`; raises `ConfigError` naming the first thing that is not as it should be."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"this is not a report: {error}") from error
        found = data.get("schema") if isinstance(data, dict) else None
        if found != SCHEMA:
            raise ConfigError(f"this is not a report of schema {SCHEMA} (found {found!r}): run the audit again")
        return from_mapping(data, Report, "report")

    @staticmethod
    def load(path: str | Path) -> "Report":
        """Return the report in a file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the report {path}: {error}") from error
        return Report.from_json(text)
