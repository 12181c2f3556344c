"""The same protocol as `loop`, for all users at once: what makes 100 epochs a matter of minutes on a GPU.

Gradients, residuals, weights and momentum are flat rows; the passes run as one CUDA graph and the selection as one
set of kernels over all users. Nothing waits for the GPU within a chunk of rounds. Encoding every payload would take
longer than training, so real bytes, norms and defense seconds are measured on sample rounds, for one user in turn;
`Round.users_measured` says so.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from .. import tree
from ..core import Batch
from ..errors import ConfigError, GradientError, StateError
from . import statistics
from .checkpoint import Checkpoint, load_checkpoint, require_same, save_checkpoint
from .compute import LANES, Compute
from .job import Job, evaluate, kernels, own_randomness
from .probe import Probe
from .protectors import protector_for
from .rounds import Round

CHUNK = {"cuda": 1000, "cpu": 10}  # rounds at most between two looks at the losses; a GPU must not be kept waiting


def unsupported(job: Job) -> str | None:
    """Return why the fast engine cannot run this job, or None."""
    settings = job.settings
    if any(isinstance(m, _BatchNorm) and m.momentum is None for m in job.model.modules()):
        return "BatchNorm without momentum counts its batches"
    if settings.invited != settings.users:
        return "all users must take part (participants 0)"
    if settings.weigh_examples:
        return "weigh_examples takes per-example gradients"
    if "per_example" in job.defense.needs:
        return f"{job.defense.key()} takes per-example gradients"
    return None


class FastTrainer:
    """Runs a job in chunks of rounds: iterate over it, or call `advance`.

    Guarantees: the same rounds as `Trainer` up to rounding; checkpoints fit both. On a CPU, and on a GPU with
    `deterministic`, a continued run gives the same bits as one that was never stopped.
    """

    def __init__(self, job: Job, lanes: int = LANES) -> None:
        reason = unsupported(job)
        if reason:
            raise ConfigError(f"the fast engine cannot run this: {reason}; set engine to reference")
        self.job = job
        self.round = 0
        self.model = job.model
        self._compute = Compute(job, lanes)
        self._protector = protector_for(job.defense, self._compute.rows, job)
        self._momentum = torch.zeros_like(self._compute.weights)
        sizes = torch.tensor(job.feed.sizes, device=job.device, dtype=torch.float32)
        self._shares = None if (sizes == sizes[0]).all() else (sizes / sizes.sum())[:, None]
        self._wire_every = job.settings.wire_every or job.rounds_per_epoch
        self._encoder = ThreadPoolExecutor(1)
        # How many batches BatchNorm had seen before the run: the fast passes do not count them.
        counters = ((name, b) for name, b in job.model.named_buffers() if name.endswith("num_batches_tracked"))
        self._counted = {name: int(counter) for name, counter in counters}

    def __iter__(self) -> Iterator[Round]:
        while self.round < self.job.rounds:
            yield from self.advance()

    def advance(self) -> list[Round]:
        """Run up to the next place where a checkpoint or an evaluation may be due; return the reports."""
        job, first, stop = self.job, self.round, self._next_stop()
        if first == stop:
            return []
        started = time.perf_counter()
        draws = self._draws(first, stop)
        losses = torch.zeros(stop - first, job.settings.users, device=job.device)
        measured: dict[int, Future[dict[str, Any]]] = {}
        with kernels(job.settings, job.device), own_randomness(job.settings.seed, job.device):
            for index in range(first, stop):
                measuring = self._one_round(index, draws[index - first])
                if measuring is not None:
                    measured[index] = measuring
                losses[index - first].copy_(self._compute.losses)
        self.round = stop
        mean_losses = losses.mean(1).tolist()  # waits for the GPU
        bytes_and_norms = {index: measuring.result() for index, measuring in measured.items()}
        seconds = (time.perf_counter() - started) / (stop - first)
        require_finite_losses(losses, first)
        self._protector.require_finite()
        # The last round's gradient shows in no loss yet, and must not get into a checkpoint.
        if not bool(torch.isfinite(self._compute.weights).all()):
            raise GradientError(f"training diverged: the weights after round {stop - 1} are not finite")
        accuracy = self.evaluate() if job.evaluate_after(stop - 1) else None
        return [
            Round(
                index=index,
                epoch=index // job.rounds_per_epoch,
                lr=job.rate(index),
                loss=mean_losses[index - first],
                participants=job.settings.users,
                accuracy=accuracy if index == stop - 1 else None,
                seconds=seconds,
                **bytes_and_norms.get(index, {}),
            )
            for index in range(first, stop)
        ]

    def evaluate(self) -> float | None:
        """Return the accuracy on the test split, if there is one."""
        self._publish()
        return None if self.job.test is None else evaluate(self.model, self.job.test, self.job)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, atomically."""
        self._publish()
        compute, done = self._compute, torch.tensor(self.round)
        local = [compute.buffer_layout.views(row) for row in compute.statistics]
        counters = {n: b for n, b in statistics.snapshot(self.model).items() if not b.is_floating_point()}
        saved = Checkpoint(
            round=self.round,
            settings=self.job.settings,
            digests=self.job.digests,
            model=dict(self.model.state_dict()),
            momentum=compute.layout.views(self._momentum),
            users=[{**tree.under("state", state), "round": done} for state in self._protector.states()],
            local=[{**part, **counters} for part in local] if self.job.settings.batchnorm == "local" else [],
        )
        save_checkpoint(path, saved)

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint written under the same settings."""
        saved = load_checkpoint(path)
        require_same(saved, self.job.settings, self.job.digests)
        if saved.momentum.keys() != self._compute.layout.shapes.keys():
            raise StateError(f"the checkpoint {path} belongs to another model")
        self.model.load_state_dict(saved.model)  # writes through to the flat weights
        self._compute.layout.write(self._momentum, saved.momentum)
        self._compute.load_buffers(saved.local or [saved.model] * self.job.settings.users)
        self._protector.load([tree.only("state", user) for user in saved.users])
        self.round = saved.round

    def _next_stop(self) -> int:
        every = self.job.settings.checkpoint_every or self.job.rounds
        places = [self.job.rounds_per_epoch, every, CHUNK[self.job.device.type]]
        return min(self.job.rounds, *((self.round // place + 1) * place for place in places))

    def _draws(self, first: int, stop: int) -> Tensor:
        feed, rounds = self.job.feed, stop - first
        steps = self.job.settings.local_steps
        parts = [feed.draw(user, first * steps, rounds * steps).view(rounds, -1, 4) for user in range(len(feed.sizes))]
        return torch.cat(parts, dim=1).to(self.job.device)

    def _one_round(self, index: int, draw: Tensor) -> "Future[dict[str, Any]] | None":
        """Run one round; on a sample round return what is being measured."""
        job, compute = self.job, self._compute
        whole = job.feed.gather(draw)
        parts = zip(whole.inputs.split(job.examples), whole.labels.split(job.examples), strict=True)
        batches = self._protector.prepare(index, [Batch(*part) for part in parts])
        compute.run(batches, index)
        probe = None if index % self._wire_every else self._probe(index)
        if probe is None:
            mean, found = self._protector.average(index, batches, self._shares), None
        else:
            sent = probe.timed_step(index, batches)
            mean = sent.mean(0) if self._shares is None else (sent * self._shares).sum(0)
            # Encoding takes a CPU thread a second at most, while the GPU goes on.
            found = self._encoder.submit(probe.measure(sent, mean))
        if job.settings.weight_decay:
            mean.add_(compute.weights, alpha=job.settings.weight_decay)
        self._momentum.mul_(job.settings.momentum).add_(mean)
        compute.weights.sub_(self._momentum, alpha=job.server_rate(index))
        compute.merge_statistics()
        return found

    def _publish(self) -> None:
        """Bring the model's buffers up to date; its parameters are views of the flat weights."""
        compute = self._compute
        # Rows that are equal already must not be averaged: rounding would make a continued run another one.
        alone = self.job.settings.batchnorm != "local"
        common = compute.buffer_layout.views(compute.statistics[0] if alone else compute.statistics.mean(0))
        for name, buffer in self.model.named_buffers():
            if name in common:
                buffer.copy_(common[name])
            elif name in self._counted:
                buffer.fill_(self._counted[name] + self.round * self.job.settings.local_steps)

    def _probe(self, index: int) -> Probe:
        sends_statistics = self.job.settings.batchnorm != "local"
        return Probe(self._compute, self._protector, index // self._wire_every, sends_statistics)


def require_finite_losses(losses: Tensor, first_round: int) -> None:
    """Raise `GradientError` naming the round in which training diverged."""
    bad = (~torch.isfinite(losses).all(dim=1)).nonzero()
    if len(bad):
        raise GradientError(f"training diverged: the loss of round {first_round + int(bad[0])} is not finite")
