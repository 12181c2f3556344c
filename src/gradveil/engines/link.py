"""A network link of limited speed on this machine: a TCP relay that counts what passes and holds it back."""

import socket
import threading
import time
from types import TracebackType
from typing import Self

CHUNK = 1 << 16
BURST = 0.02  # seconds a late sleeper may catch up; a real link's queue does the same


class _Pace:
    """Lets bytes pass no faster than the rate, for all connections of one direction together."""

    def __init__(self, bits_per_second: float | None) -> None:
        self.bytes = 0
        self._seconds = 0.0 if bits_per_second is None else 8 / bits_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def wait(self, count: int) -> None:
        with self._lock:
            self.bytes += count
            self._free_at = max(self._free_at, time.monotonic() - BURST) + count * self._seconds
            pause = self._free_at - time.monotonic()
        if pause > 0:
            time.sleep(pause)


class Relay:
    """Passes connections on to a port of this machine, at most `bits_per_second` each way.

    Guarantees: `up` and `down` are the bytes that passed, headers of HTTP and TLS included, those of TCP and IP not.
    """

    def __init__(self, port: int, bits_per_second: float | None = None) -> None:
        self._target = port
        self._up, self._down = _Pace(bits_per_second), _Pace(bits_per_second)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    @property
    def up(self) -> int:
        """Bytes from the client to the port."""
        return self._up.bytes

    @property
    def down(self) -> int:
        """Bytes from the port to the client."""
        return self._down.bytes

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._listener.close()
        for connection in self._open:
            connection.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:  # closed, or nobody listens there
                return
            self._open += [client, server]
            threading.Thread(target=_pump, args=(client, server, self._up), daemon=True).start()
            threading.Thread(target=_pump, args=(server, client, self._down), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, pace: _Pace) -> None:
    try:
        while piece := source.recv(CHUNK):
            pace.wait(len(piece))
            target.sendall(piece)
        target.shutdown(socket.SHUT_WR)
    except OSError:  # the other side has gone
        return


def transfer_seconds(parts: list[bytes], bits_per_second: float | None) -> float:
    """Return how long it takes to move these bytes over a link of this speed, from the first byte to the answer."""
    size = sum(len(part) for part in parts)
    with socket.create_server(("127.0.0.1", 0)) as sink:
        receiver = threading.Thread(target=_swallow, args=(sink, size), daemon=True)
        receiver.start()
        with (
            Relay(sink.getsockname()[1], bits_per_second) as relay,
            socket.create_connection(("127.0.0.1", relay.port)) as sender,
        ):
            began = time.monotonic()
            for part in parts:
                sender.sendall(part)
            sender.recv(1)
            seconds = time.monotonic() - began
        receiver.join()
    return seconds


def _swallow(sink: socket.socket, size: int) -> None:
    connection, _ = sink.accept()
    with connection:
        while size > 0:
            size -= len(connection.recv(CHUNK))
        connection.sendall(b"k")
