"""Plain FedSGD as a Flower app, as small as it can be: the other half of `gradveil bench train`."""

import json
import time
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from safetensors.torch import save_file

from .. import tree
from ..gradients import gradient, parameters
from ..training import Job, Settings, assemble

client_app = ClientApp()
server_app = ServerApp()


@lru_cache(maxsize=1)  # one load of data and model per worker process, not per message
def _job(folder: Path) -> Job:
    torch.set_num_threads(1)
    return assemble(Settings(**json.loads((folder / "settings.json").read_text(encoding="utf-8"))))


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Answer with the gradient of this user's batch of the round."""
    job = _job(Path(str(context.run_config["folder"])))
    job.model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    user, round_ = int(context.node_config["partition-id"]), int(message.content["config"]["round"])
    batch = job.feed.batch(user, round_)
    grads = gradient(job.model, job.loss_fn, batch)
    content = {"arrays": ArrayRecord(grads), "metrics": MetricRecord({"num-examples": len(batch.labels)})}
    return Message(RecordDict(content), reply_to=message)


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds; write when each one ended, and the weights at the end."""
    folder = Path(str(context.run_config["folder"]))
    job = _job(folder)
    settings, momentum, ends = job.settings, tree.zeros_like(parameters(job.model)), [time.time()]
    nodes = _wait_for(grid, settings.users)
    for round_ in range(job.rounds):
        content = {"arrays": ArrayRecord(dict(job.model.state_dict())), "config": ConfigRecord({"round": round_})}
        replies = list(grid.send_and_receive([Message(RecordDict(content), node, "train") for node in nodes]))
        grads = [reply.content["arrays"].to_torch_state_dict() for reply in replies]
        mean = tree.weighted_mean(grads, [int(reply.content["metrics"]["num-examples"]) for reply in replies])
        for name, p in job.model.named_parameters():
            momentum[name].mul_(settings.momentum).add_(mean[name])
            p.data.sub_(momentum[name], alpha=job.rate(round_))
        ends.append(time.time())
    save_file(dict(job.model.state_dict()), folder / "flower.safetensors")
    (folder / "flower.json").write_text(json.dumps(ends), encoding="utf-8")


def _wait_for(grid: Grid, users: int) -> list[Any]:
    nodes: list[Any] = []
    while len(nodes) < users:
        nodes = list(grid.get_node_ids())
        time.sleep(0.05)
    return nodes
