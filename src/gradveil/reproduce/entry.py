"""One line of a table, and the names that the tables share."""

from dataclasses import dataclass, field

from .cells import Cell

Values = dict[str, float]  # metric -> what the paper prints
RIVALS = ("none", "ats", "soteria", "precode", "dp", "topk", "outpost", "dgp")
MODELS = ("cnn6", "lenet", "resnet18", "vgg11")
TITLES = {"ig": "IG", "gi": "GI", "rob": "Rob", "rgap": "R-GAP"}


@dataclass(frozen=True)
class Entry:
    """One line of a table: a cell under a heading, and what the paper prints for it."""

    part: str
    label: str
    cell: Cell
    paper: Values = field(default_factory=dict)
    transformed: bool = False  # compare with the pictures as the defense changed them (ATS-R)
