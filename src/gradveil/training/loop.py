"""Collaborative training, Algorithm 2 of the DGP paper, written to be read: any defense, any model, any device.

Per round: every participant computes a gradient on its own batch (or, in FedAvg, takes local steps), its `Veil` adds
what was held back, prunes, and seals the rest into bytes; the server decodes the bytes, averages, and takes one
momentum step. `fast` does the same on a GPU and is tested against this file.
"""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..core import Batch, Grads, Masks, Payload, Tensors
from ..errors import StateError
from ..gradients import gradient, local_update, parameters, per_example_gradient
from ..shares import gradient_and_shares
from ..veil import Veil, derive_rng, unseal
from . import statistics
from .checkpoint import Checkpoint, load_checkpoint, require_same, save_checkpoint
from .job import Job, evaluate, kernels, own_randomness
from .rounds import Round
from .traffic import Traffic, entries_sent, paper_bytes


class Work(NamedTuple):
    """What one user computed in a round, before its defense."""

    grads: Grads
    batch: Batch
    loss: float
    buffers: Tensors
    largest: Tensors | None = None  # shares of the largest example, if the run weighs them


class Upload(NamedTuple):
    """What one user sent in a round."""

    user: int
    work: Work
    payload: Payload
    received: Grads  # as the server decodes it


class Trainer:
    """Runs a job round by round: iterate over it, or call `advance`.

    Guarantees: on a CPU the result depends on the settings alone, and a run continued from `save` gives the same bits
    as one that was never stopped. The global random state is neither used nor changed.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.round = 0
        self.model = job.model
        params = parameters(self.model)
        self.momentum = tree.zeros_like(params)
        users, seed = job.settings.users, job.settings.seed
        self.veils = [Veil(job.defense, params, seed=seed, client=str(user)) for user in range(users)]
        keep_local = job.settings.batchnorm == "local"
        self._local = [statistics.snapshot(self.model) for _ in range(users)] if keep_local else []

    def __iter__(self) -> Iterator[Round]:
        while self.round < self.job.rounds:
            yield from self.advance()

    def advance(self) -> list[Round]:
        """Run one round; return its report in a list, empty when the run is over."""
        if self.round >= self.job.rounds:
            return []
        started = time.perf_counter()
        people, lr = self.job.participants(self.round), self.job.rate(self.round)
        with kernels(self.job.settings, self.job.device):
            mask, done = self._agree(lr)
            uploads = [self._upload(user, done.get(user) or self._work(user, lr), mask) for user in people]
        mean = tree.weighted_mean([u.received for u in uploads], [u.payload.num_examples for u in uploads])
        traffic = self._traffic(uploads, mean, mask)
        self._step(mean)
        self._merge_buffers(uploads)
        self.round += 1
        return [self._report(uploads, traffic, time.perf_counter() - started)]

    def batches(self, user: int) -> list[Batch]:
        """Return what this user trains on in the round to come, one batch for each local step."""
        steps = self.job.settings.local_steps
        return [self.job.feed.batch(user, self.veils[user].round * steps + i) for i in range(steps)]

    def evaluate(self) -> float | None:
        """Return the accuracy on the test split, if there is one."""
        return None if self.job.test is None else evaluate(self.model, self.job.test, self.job)

    def save(self, path: str | Path) -> None:
        """Write a checkpoint, atomically."""
        saved = Checkpoint(
            round=self.round,
            settings=self.job.settings,
            model=dict(self.model.state_dict()),
            momentum=self.momentum,
            users=[veil.state_dict() for veil in self.veils],
            local=self._local,
            digests=self.job.digests,
        )
        save_checkpoint(path, saved)

    def load(self, path: str | Path) -> None:
        """Continue from a checkpoint written under the same settings."""
        saved = load_checkpoint(path)
        require_same(saved, self.job.settings, self.job.digests)
        if saved.momentum.keys() != self.momentum.keys() or len(saved.users) != len(self.veils):
            raise StateError(f"the checkpoint {path} belongs to another model")
        self.model.load_state_dict(saved.model)
        self.momentum = {name: saved.momentum[name].to(self.job.device) for name in self.momentum}
        for veil, state in zip(self.veils, saved.users, strict=True):
            veil.load_state_dict(state)
        self._local = [tree.tmap(lambda t: t.to(self.job.device), part) for part in saved.local]
        self.round = saved.round

    def _agree(self, lr: float) -> tuple[Masks | None, dict[int, Work]]:
        """Let a random participant propose the common mask of an aligned round; every defense validates it."""
        if "mask" not in self.job.defense.needs:
            return None, {}
        user = self.job.proposer(self.round)
        work = self._work(user, lr)
        return self.veils[user].propose(work.grads), {user: work}

    def _work(self, user: int, lr: float) -> Work:
        common = statistics.snapshot(self.model)
        if self._local:
            statistics.restore(self.model, self._local[user])
        batches = self.batches(user)
        whole = self.veils[user].prepare(self.model, Batch(*map(torch.cat, zip(*batches, strict=True))))
        seed = derive_rng(self.job.settings.seed, str(user), self.round, "layers").initial_seed()
        with own_randomness(seed, self.job.device):
            grads, largest, loss = self._compute(whole, [len(batch.labels) for batch in batches], lr)
        buffers = statistics.snapshot(self.model)
        statistics.restore(self.model, common)
        return Work(grads, whole, loss, buffers, largest)

    def _compute(self, whole: Batch, sizes: Sequence[int], lr: float) -> tuple[Grads, Tensors | None, float]:
        losses: list[Tensor] = []
        largest = None

        def loss_fn(outputs: Tensor, labels: Tensor) -> Tensor:
            loss = self.job.loss_fn(outputs, labels)
            losses.append(loss.detach())
            return loss

        if "per_example" in self.job.defense.needs:
            grads = per_example_gradient(self.model, self.job.loss_fn, whole)
            with torch.no_grad():
                loss_fn(self.model(whole.inputs), whole.labels)
        elif self.job.settings.algorithm == "fedavg":
            parts = zip(whole.inputs.split(list(sizes)), whole.labels.split(list(sizes)), strict=True)
            grads = local_update(self.model, loss_fn, [Batch(*part) for part in parts], lr)
        elif self.job.settings.weigh_examples:
            grads, largest = gradient_and_shares(self.model, loss_fn, whole)
            losses = losses[:1]  # single examples follow where a model is looked at one by one
        else:
            grads = gradient(self.model, loss_fn, whole)
        return grads, largest, float(torch.stack(losses).mean())

    def _upload(self, user: int, work: Work, mask: Masks | None) -> Upload:
        veil, common = self.veils[user], statistics.snapshot(self.model)
        count, batch, largest = len(work.batch.labels), work.batch, work.largest
        payload = veil.seal(work.grads, count, model=self.model, batch=batch, mask=mask, largest=largest)
        statistics.restore(self.model, common)  # a defense that runs the model must not move its statistics
        veil.acknowledge(payload)
        return Upload(user, work, payload, unseal(payload, like=parameters(self.model), within=mask))

    @torch.no_grad()
    def _step(self, mean: Grads) -> None:
        settings, scale = self.job.settings, self.job.server_rate(self.round)
        for name, p in self.model.named_parameters():
            if name in mean:
                g = mean[name].add(p, alpha=settings.weight_decay) if settings.weight_decay else mean[name]
                self.momentum[name].mul_(settings.momentum).add_(g)
                p.sub_(self.momentum[name], alpha=scale)

    def _merge_buffers(self, uploads: Sequence[Upload]) -> None:
        parts = [upload.work.buffers for upload in uploads]
        if self._local:
            for upload in uploads:
                self._local[upload.user] = upload.work.buffers
            parts = self._local
        statistics.restore(self.model, statistics.merge(parts, self.job.settings.batchnorm))

    def _traffic(self, uploads: Sequence[Upload], mean: Grads, mask: Masks | None) -> Traffic:
        before = set(self.job.participants(self.round - 1)) if self.round else {u.user for u in uploads}
        return Traffic(
            payloads=[upload.payload for upload in uploads],
            mean=mean,
            mask=mask,
            statistics={} if self._local else statistics.floating(uploads[0].work.buffers),
            model={**parameters(self.model), **statistics.floating(statistics.snapshot(self.model))},
            newcomers=sum(upload.user not in before for upload in uploads),
            participants=len(uploads),
        )

    def _report(self, uploads: Sequence[Upload], traffic: Traffic, seconds: float) -> Round:
        index, n = self.round - 1, len(uploads)
        total = sum(g.numel() for g in traffic.mean.values())
        room = None if traffic.mask is None else sum(int(m.sum()) for m in traffic.mask.values())
        health = [(self.veils[u.user].health, tree.global_norm(u.work.grads)) for u in uploads]
        counts = [(_nonzero(u.work.grads), _nonzero(u.received)) for u in uploads]
        sent = sum(entries_sent(raw, received, total) for raw, received in counts) / n
        up, down = traffic.per_user()
        paper_up, paper_down = paper_bytes(sent, total, room)
        return Round(
            index=index,
            epoch=index // self.job.rounds_per_epoch,
            lr=self.job.rate(index),
            loss=sum(u.work.loss for u in uploads) / n,
            participants=n,
            accuracy=self.evaluate() if self.job.evaluate_after(index) else None,
            bytes_up=up,
            bytes_down=down,
            paper_up=paper_up,
            paper_down=paper_down,
            users_measured=n,
            density=sum(received for _, received in counts) / (n * total),
            residual_ratio=sum(h.residual_norm / norm for h, norm in health if h and norm) / n,
            gamma=sum(h.gamma for h, _ in health if h) / n,
            defense_seconds=sum(self.veils[u.user].seconds[0] for u in uploads) / n,
            encode_seconds=sum(self.veils[u.user].seconds[1] for u in uploads) / n,
            seconds=seconds,
        )


def _nonzero(grads: Grads) -> int:
    return sum(int(torch.count_nonzero(g)) for g in grads.values())
