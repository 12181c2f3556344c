"""The DGP paper table by table: what to run, running it, and the pages made from what came out."""

from .runner import Outcome, Session, run
from .scales import SCALES
from .tables import NAMES, entries

__all__ = ["NAMES", "SCALES", "Outcome", "Session", "entries", "run"]
