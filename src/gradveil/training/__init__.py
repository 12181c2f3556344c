"""Collaborative training that measures what a defense costs in accuracy, bytes and time."""

from .checkpoint import Checkpoint, load_checkpoint
from .fast import FastTrainer
from .job import Job, assemble
from .loop import Trainer
from .rounds import Round
from .settings import Settings

__all__ = ["Checkpoint", "FastTrainer", "Job", "Round", "Settings", "Trainer", "assemble", "load_checkpoint"]
