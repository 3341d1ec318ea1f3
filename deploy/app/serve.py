"""`hemofed edge serve`: the page for the bedside, on this machine and for nobody else."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from deploy.app.app import app_for
from deploy.inference.runtime import Runtime
from pipeline.core.errors import BadService

GRACE = 30  # seconds that a picture may still take after Ctrl-C; a second one does not wait


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, over: threading.Event) -> None:
        super().__init__(config)
        self._over = over

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._over.set()  # of a file with many pictures only the one that is being read is finished
        await super().shutdown(sockets)


def serve(runtime: Runtime, host: str, port: int, ready: Callable[[str], None]) -> None:
    """Until Ctrl-C. `ready` is told the address as soon as connections are taken; port 0: any free one."""
    app = app_for(runtime)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _interrupted)  # a service manager's way to say Ctrl-C
    with contextlib.closing(_listen(host, port)) as listening:
        config = uvicorn.Config(
            app, log_config=None, log_level="error", access_log=False, server_header=False, proxy_headers=False,
            ws="none", timeout_graceful_shutdown=GRACE,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has stopped
            shown = f"[{host}]" if ":" in host else host
            ready(f"http://{shown}:{listening.getsockname()[1]}/")
            _Server(config, app.state.over).run(sockets=[listening])


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _listen(host: str, port: int) -> socket.socket:
    if not ipaddress.ip_address(host).is_loopback:
        raise BadService(f"{host} can be reached by others, and this page knows no passwords; use 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise BadService(
            f"port {port} cannot be opened ({error.strerror}); is the page served already? --port 0 takes a free one"
        ) from error
