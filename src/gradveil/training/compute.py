"""The forward and backward passes of all users, from the same weights, into one row each: a gradient, or what several
local steps changed.

On a GPU the users' passes are parallel branches of one CUDA graph: a batch of 32 does not fill the machine, ten do.
On a CPU small pictures go through a plain network in one vectorised pass, because starting ten costs more than they do.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..core import Batch, Tensors
from ..gradients import auxiliary_loss, parameters
from ..veil import derive_rng
from . import statistics
from .flat import Layout, Rows
from .job import Job

LANES = 10  # branches of the graph that may run at once
SMALL_PICTURE = 512  # entries; on pictures of CIFAR's size a loop over the users is the faster one
WARM_UPS = 3  # runs before the capture: kernels are chosen and libraries set up then


class Compute:
    """Gradients, losses and BatchNorm statistics of all users.

    `weights` is one row; the model's parameters are views of it. `statistics` has one row per user.
    """

    def __init__(self, job: Job, lanes: int = LANES) -> None:
        self._job = job
        params, device = parameters(job.model), job.device
        users = job.settings.users
        self.layout = Layout(params, channels_last=device.type == "cuda")
        self.weights = self.layout.rows(1, device)[0]
        self.layout.write(self.weights, params)
        self.rows = Rows(self.layout.rows(users, device), self.layout)
        self.losses = torch.zeros(users, device=device)
        self._lr = torch.zeros((), device=device)  # of local steps, in this round
        buffers = statistics.floating(statistics.snapshot(job.model))
        self.buffer_layout = Layout(buffers)
        self.statistics = self.buffer_layout.rows(users, device)
        self._net = _without_counters(job.model)
        for name, p in job.model.named_parameters():
            if name in params:
                p.data = self.layout.views(self.weights)[name]
        # Autocast would cast these weights once per user; here it happens once per round, with the same result.
        half = self.layout.rows(1, device, torch.bfloat16)[0] if job.settings.precision == "bf16" else None
        self._half = half
        self._sources = self._readable()
        self._targets = [list(self.layout.views(row).values()) for row in self.rows.grads]
        self._buffers = [self.buffer_layout.views(row) for row in self.statistics]
        self._batches: list[Batch] = []  # what the graph reads
        self._graph: torch.cuda.CUDAGraph | None = None
        self._lanes = [torch.cuda.Stream(device) for _ in range(min(lanes, users))] if device.type == "cuda" else []
        self._vectorised = device.type == "cpu" and half is None and _is_plain(job)
        self.load_buffers([buffers] * users)

    def load_buffers(self, buffers: Sequence[Tensors]) -> None:
        """Set every user's statistics."""
        for row, part in zip(self.statistics, buffers, strict=True):
            self.buffer_layout.write(row, part)

    def merge_statistics(self) -> None:
        """End a round as the settings say: everybody gets the mean, or the first user's, or keeps its own."""
        how = self._job.settings.batchnorm
        if how != "local" and self.buffer_layout.total:
            common = self.statistics.mean(0) if how == "average" else self.statistics[0].clone()
            self.statistics.copy_(common.expand_as(self.statistics))

    def run(self, batches: Sequence[Batch], round_: int) -> None:
        """Fill gradients or updates, losses and statistics."""
        self._lr.fill_(self._job.rate(round_))
        if self._job.device.type != "cuda":
            self._refresh()
            if self._vectorised:
                self._all_at_once(batches)
                return
            for user, batch in enumerate(batches):
                torch.default_generator.manual_seed(self._seed(str(user), round_))
                self._one_user(user, batch)
            return
        graph = self._graph or self._capture(batches)
        torch._foreach_copy_([b.inputs for b in self._batches], [b.inputs for b in batches])
        torch._foreach_copy_([b.labels for b in self._batches], [b.labels for b in batches])
        torch.cuda.manual_seed(self._seed("all", round_))
        graph.replay()

    def _seed(self, who: str, round_: int) -> int:
        return derive_rng(self._job.settings.seed, who, round_, "layers").initial_seed()

    def _capture(self, batches: Sequence[Batch]) -> torch.cuda.CUDAGraph:
        self._batches = [Batch(b.inputs.clone(), b.labels.clone()) for b in batches]
        before = self.statistics.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._all_users()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._all_users()
        self.statistics.copy_(before)
        self._graph = graph
        return graph

    def _all_users(self) -> None:
        self._refresh()
        main = torch.cuda.current_stream()
        for lane in self._lanes:
            lane.wait_stream(main)
        for user, batch in enumerate(self._batches):
            with torch.cuda.stream(self._lanes[user % len(self._lanes)]):
                self._one_user(user, batch)
        for lane in self._lanes:
            main.wait_stream(lane)

    def _refresh(self) -> None:
        if self._half is not None:
            self._half.copy_(self.weights)

    def _one_user(self, user: int, batch: Batch) -> None:
        fedavg = self._job.settings.algorithm == "fedavg"
        loss, found = self._local_update(user, batch) if fedavg else self._gradient(user, self._sources, batch)
        self.losses[user].copy_(loss)
        pairs = list(zip(self._targets[user], found, strict=True))
        with torch.no_grad():
            for dtype in {g.dtype for _, g in pairs}:  # one kernel needs one type
                alike = [(t, g) for t, g in pairs if g.dtype == dtype]
                torch._foreach_copy_([t for t, _ in alike], [g for _, g in alike])

    def _gradient(self, user: int, weights: Tensors, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        # Leaves of its own: autograd then keeps the users apart, though all read the same memory.
        leaves = {name: w.detach().requires_grad_() for name, w in weights.items()}
        outputs = functional_call(self._net, {**leaves, **self._buffers[user]}, (batch.inputs,))
        loss = self._job.loss_fn(outputs, batch.labels)
        whole = loss + auxiliary_loss(self._net)
        found = torch.autograd.grad(whole, list(leaves.values()), allow_unused=True, materialize_grads=True)
        return loss.detach(), found

    def _local_update(self, user: int, batch: Batch) -> tuple[Tensor, Sequence[Tensor]]:
        begin = self.layout.views(self.weights)
        now, losses, steps = begin, [], self._job.settings.local_steps
        for inputs, labels in zip(batch.inputs.chunk(steps), batch.labels.chunk(steps), strict=True):
            loss, slopes = self._gradient(user, now, Batch(inputs, labels))
            losses.append(loss)
            now = {name: w - self._lr * g for (name, w), g in zip(now.items(), slopes, strict=True)}
        return torch.stack(losses).mean(), [w - now[name] for name, w in begin.items()]

    def _all_at_once(self, batches: Sequence[Batch]) -> None:
        def loss_of(weights: Tensors, inputs: Tensor, labels: Tensor) -> Tensor:
            return self._job.loss_fn(functional_call(self._net, weights, (inputs,)), labels)

        inputs, labels = (torch.stack(parts) for parts in zip(*batches, strict=True))
        per_user = vmap(grad_and_value(loss_of), in_dims=(None, 0, 0))
        grads, losses = per_user(self.layout.views(self.weights), inputs, labels)
        columns = torch.split(self.rows.grads[:, : self.layout.total], self.layout.sizes, dim=1)
        for column, grad in zip(columns, grads.values(), strict=True):
            column.copy_(grad.reshape(column.shape))
        self.losses.copy_(losses)

    def _readable(self) -> Tensors:
        """Return the weights as the network reads them: in bf16 where autocast would cast them."""
        views = self.layout.views(self.weights)
        if self._half is not None:
            cast = {
                f"{path}.{name}".removeprefix(".")
                for path, module in self._net.named_modules()
                if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
                for name in ("weight", "bias")
            }
            views |= {name: view for name, view in self.layout.views(self._half).items() if name in cast}
        return views


def _is_plain(job: Job) -> bool:
    """Say whether one vectorised pass is right (nothing random, nothing shared in a batch) and faster than a loop."""
    modules = list(job.model.modules())
    known = all(type(m).__module__.startswith("torch.nn.modules") for m in modules)
    odd = (nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
    small = job.feed.picture_entries <= SMALL_PICTURE and len(set(job.feed.sizes)) == 1
    once = job.settings.algorithm == "fedsgd"
    return known and small and once and not any(isinstance(m, odd) for m in modules)


def _without_counters(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorm layers do not count batches: twenty kernels per user that change nothing."""
    net = copy.deepcopy(model)
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.momentum is not None:
            module.num_batches_tracked = None
    return net
