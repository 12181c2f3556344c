"""Collaborative training that measures what a defense costs in accuracy, bytes and time.

`loop` is the protocol, to be read. `fast` is the same for all users at once: `compute` their gradients, `protectors`
their defenses, `flat` the memory both work in, `probe` the measurements. Both start from a `job` made of `settings`,
take pictures from `feed`, and report `rounds`; `run` keeps a whole run in a folder.
"""

from .checkpoint import Checkpoint, load_checkpoint
from .fast import FastTrainer
from .job import Job, assemble
from .loop import Trainer
from .rounds import Round
from .settings import Settings

__all__ = ["Checkpoint", "FastTrainer", "Job", "Round", "Settings", "Trainer", "assemble", "load_checkpoint"]
