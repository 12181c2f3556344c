"""What one round reports."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Round:
    """One finished round. Bytes and seconds are means per user; None where a round was not measured."""

    index: int  # counted from 0
    epoch: int  # counted from 0
    lr: float
    loss: float  # mean over the participants, before the step
    participants: int
    accuracy: float | None = None  # on the test split, after the step
    bytes_up: float | None = None  # what a user really sent, BatchNorm statistics and a proposed mask included
    bytes_down: float | None = None  # what a user really received
    paper_up: float | None = None  # by the paper's count
    paper_down: float | None = None
    users_measured: int = 0  # over how many users the real bytes and what follows were measured
    density: float | None = None  # share of entries sent
    residual_ratio: float | None = None  # norm of the residual over the norm of the gradient
    gamma: float | None = None  # share of the energy of gradient + residual that was held back
    defense_seconds: float | None = None
    encode_seconds: float | None = None
    seconds: float = 0.0  # of the whole round, without evaluation
