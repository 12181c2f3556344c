"""`gradveil ui`: the live page, for this machine only."""

import secrets
import socket
import webbrowser
from typing import Annotated

import typer

from ..errors import ConfigError
from . import app, out


@app.command()
def ui(
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = False,
) -> None:
    """Serve a page where you watch a picture being rebuilt from a gradient. Nobody else can reach it."""
    try:
        from ..ui.server import make_server
    except ModuleNotFoundError as error:
        raise ConfigError(f"the live page needs {error.name}: pip install 'gradveil[ui]'") from error
    import torch

    torch.set_num_threads(1)  # tiny graphs run slower on two
    token = secrets.token_urlsafe(16)
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(f"port {port} cannot be used: {error}") from error
        port = listening.getsockname()[1]
        address = f"http://127.0.0.1:{port}/{token}/"
        out.print(f"The live page: {address}\nCtrl-C stops it.", highlight=False, soft_wrap=True)
        if browser:
            webbrowser.open(address)
        make_server(token, port).run(sockets=[listening])
