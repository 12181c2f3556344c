"""A Flower federation inside this process: the real ClientApp, mods and strategy, without Ray and without sockets.

    grid = LocalGrid(app, clients=4)
    strategy.start(grid, initial_arrays, num_rounds=3)

For tests and measurements. It sets Flower's private notion of the running task, because Flower builds no message
without one, and therefore goes with the one version of Flower gradveil is pinned to.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity


class LocalGrid(Grid):  # type: ignore[misc]
    """Hands every message to the app at once, one node after the other."""

    def __init__(self, app: ClientApp, clients: int, run_config: Mapping[str, Any] | None = None) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.app = app
        self.contexts = {
            node_id(i): Context(
                run_id=1,
                node_id=node_id(i),
                node_config={"partition-id": i, "num-partitions": clients},
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i in range(clients)
        }

    @property
    def run(self) -> Any:
        """There is no run."""
        return None

    def set_run(self, run: Any) -> None:
        """Nothing to set."""

    def get_node_ids(self) -> Iterable[int]:
        """Return all nodes."""
        return list(self.contexts)

    def create_message(self, *args: Any, **more: Any) -> Message:
        """Messages are made by `Message(...)`."""
        raise NotImplementedError("build a Message instead")

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Messages are answered at once."""
        raise NotImplementedError("use send_and_receive")

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Messages are answered at once."""
        raise NotImplementedError("use send_and_receive")

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Return the answers, in the order of the messages."""
        return [self.deliver(message) for message in messages]

    def deliver(self, message: Message) -> Message:
        """Return one answer; what the app raises becomes an error, as in Flower."""
        node = message.metadata.dst_node_id
        own = Message(RecordDict(dict(message.content)), node, message.metadata.message_type)
        try:
            return self.app(own, self.contexts[node])
        except Exception as error:  # the app is anybody's code, and Flower itself catches everything here
            return Message(Error(2, repr(error)), reply_to=own)


def node_id(client: int) -> int:
    """Return the number of a client's node; as large as Flower's own, which do not fit into 63 bits."""
    return 2**63 + 100 + client


def wire_bytes(message: Message) -> list[bytes]:
    """Return the objects Flower sends for a message, as it sends them, without the few HTTP headers around each."""
    return [one.deflate() for one in get_all_nested_objects(message).values()]
