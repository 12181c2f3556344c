"""A web server for one person on this machine.

Guarantees: it binds to 127.0.0.1 only; a request is answered only if its path begins with the random token, its Host
is this server, and its Origin, where the browser sends one, is this server too. Pictures stay in memory and nothing is
written. Runs take turns, so several tabs share the processor without disturbing each other.
"""

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..audit.render import asset as report_asset
from ..audit.render import environment, policy
from ..audit.scoring import to_png
from ..config import finite
from ..errors import GradveilError
from .experiment import CHOICES, Order, StoppedError, Studio, perform, read_order

MAX_BODY = 12_000_000
MAX_RUNS = 16  # asked for and not finished
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


@dataclass(eq=False)
class Run:
    """One experiment, from its request to its last event."""

    order: Order
    stop: threading.Event = field(default_factory=threading.Event)
    taken: bool = False  # its events are being read, or were


class Desk:
    """The runs of one server. Each is started when its events are first read, and stopped when the reader leaves."""

    def __init__(self) -> None:
        self.studio = Studio()
        self.runs: dict[str, Run] = {}
        self._turn = asyncio.Lock()

    def add(self, order: Order) -> str | None:
        """Keep an order until its events are read; return its name, None if the desk is full.

        Where there is no room, the oldest order that nobody follows makes it: its page was closed, or never read.
        """
        if len(self.runs) >= MAX_RUNS:
            forgotten = next((name for name, run in self.runs.items() if not run.taken), None)
            if forgotten is None:
                return None
            del self.runs[forgotten]
        name = secrets.token_urlsafe(8)
        self.runs[name] = Run(order)
        return name

    def stop(self) -> None:
        """Stop every run, those that wait for their turn too."""
        for run in self.runs.values():
            run.stop.set()

    async def events(self, name: str) -> AsyncIterator[dict[str, Any]]:
        """Run the experiment and yield what happens, in order."""
        run = self.runs[name]
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

        def emit(event: dict[str, Any] | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, event)

        def work() -> None:
            try:
                perform(run.order, self.studio, emit, run.stop)
            except StoppedError:
                emit({"kind": "stopped"})
            except (GradveilError, ValueError) as error:
                emit({"kind": "error", "message": str(error)})
            finally:
                emit(None)

        try:
            if self._turn.locked():
                yield {"kind": "waiting"}
            async with self._turn:
                thread = asyncio.create_task(run_in_threadpool(work))
                try:
                    while (event := await queue.get()) is not None:
                        yield event
                    await thread
                finally:
                    run.stop.set()
                    await asyncio.wait([thread])
        finally:
            self.runs.pop(name, None)


class Server(uvicorn.Server):
    """Stops the runs when it is told to end, so that their readers leave and it ends at once."""

    def __init__(self, config: uvicorn.Config, desk: Desk) -> None:
        super().__init__(config)
        self.desk = desk

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End every run, then the connections."""
        self.desk.stop()
        await super().shutdown(sockets)


def make_server(token: str, port: int) -> Server:
    """Return a server to be run on a socket bound to this port of 127.0.0.1: `run(sockets=[socket])`."""
    desk = Desk()
    app = make_app(token, (f"127.0.0.1:{port}", f"localhost:{port}"), desk)
    options: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_level": "warning", "timeout_graceful_shutdown": 9}
    return Server(uvicorn.Config(app, **options), desk)


def make_app(token: str, hosts: tuple[str, ...], desk: Desk) -> Starlette:
    """Return the application; `hosts` are the values of Host it answers to, such as `127.0.0.1:8123`."""

    async def page(request: Request) -> Response:
        script, style = asset("ui.js"), report_asset("report.css") + asset("ui.css")
        photos = await run_in_threadpool(lambda: desk.studio.photos)
        pictures = [
            {"index": i, "label": photos.classes[int(photos.labels[i])], "png": to_png(photos.pixels([i])[0])}
            for i in range(len(photos))
        ]
        rules = policy(script) + "; connect-src 'self'; frame-ancestors 'none'"
        template = environment().from_string(asset("ui.html.j2"))
        text = template.render(script=script, style=style, pictures=pictures, choices=CHOICES, order=Order())
        return HTMLResponse(text, headers={"Content-Security-Policy": rules})

    async def start(request: Request) -> Response:
        body = await _body(request)
        if body is None:
            return JSONResponse({"message": f"the request is larger than {MAX_BODY} bytes"}, status_code=413)
        try:
            values = json.loads(body)
            order = read_order(values if isinstance(values, dict) else {"order": values})
            order.protection()
            await run_in_threadpool(desk.studio.victim, order)
        except (ValueError, GradveilError) as error:
            return JSONResponse({"message": str(error)}, status_code=400)
        name = desk.add(order)
        if name is None:
            return JSONResponse({"message": "too many runs are waiting: stop some first"}, status_code=429)
        return JSONResponse({"run": name})

    async def follow(request: Request) -> Response:
        run = desk.runs.get(request.path_params["run"])
        if run is None or run.taken:
            return Response(status_code=204)  # tells the browser not to reconnect
        run.taken = True
        return StreamingResponse(_stream(desk, request.path_params["run"]), media_type="text/event-stream")

    async def stop(request: Request) -> Response:
        run = desk.runs.get(request.path_params["run"])
        if run is not None:
            run.stop.set()
        return Response(status_code=204)

    routes = [
        Route(f"/{token}/", page),
        Route(f"/{token}/runs", start, methods=["POST"]),
        Route(f"/{token}/runs/{{run}}", follow),
        Route(f"/{token}/runs/{{run}}/stop", stop, methods=["POST"]),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Door, token=token, hosts=hosts)])


class Door:
    """Lets in only who knows the token and speaks from this server's own page; adds the safe headers to all answers."""

    def __init__(self, app: ASGIApp, token: str, hosts: tuple[str, ...]) -> None:
        self.app, self.token, self.hosts = app, token, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer 403."""
        if scope["type"] != "http":
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        given = scope["path"].split("/")[1] if "/" in scope["path"] else ""
        ours = headers.get("host") in self.hosts and (origin is None or origin.removeprefix("http://") in self.hosts)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        known = secrets.compare_digest(given.encode(), self.token.encode())
        app = self.app if ours and known else PlainTextResponse("not here", status_code=403)
        await app(scope, receive, answer)


async def _body(request: Request) -> bytes | None:
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


async def _stream(desk: Desk, name: str) -> AsyncIterator[str]:
    async for event in desk.events(name):
        yield f"data: {json.dumps(finite(event))}\n\n"


def asset(name: str) -> str:
    """Return a file of this package's `templates` folder."""
    from importlib.resources import files

    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")
