"""`hemofed edge serve`: the page for the bedside, on this machine and for nobody else."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable

import uvicorn

from deploy.app.app import create_app
from deploy.inference.runtime import BundleRuntime
from pipeline.core.errors import ServiceError

SHUTDOWN_GRACE_SECONDS = 30  # seconds that a picture may still take after Ctrl-C; a second one does not wait


class _EdgeServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, shutdown_event: threading.Event) -> None:
        super().__init__(config)
        self._shutdown_event = shutdown_event

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutdown_event.set()  # of a file with many pictures only the one that is being read is finished
        await super().shutdown(sockets)


def serve_edge_app(runtime: BundleRuntime, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Until Ctrl-C. `ready` is told the address as soon as connections are taken; port 0: any free one."""
    app = create_app(runtime)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_interrupt)  # a service manager's way to say Ctrl-C
    with contextlib.closing(_open_listener(host, port)) as listener:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            timeout_graceful_shutdown=SHUTDOWN_GRACE_SECONDS,
        )
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn raises it again once it has stopped
            url_host = f"[{host}]" if ":" in host else host
            on_ready(f"http://{url_host}:{listener.getsockname()[1]}/")
            _EdgeServer(config, app.state.over).run(sockets=[listener])


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _open_listener(host: str, port: int) -> socket.socket:
    if not ipaddress.ip_address(host).is_loopback:
        raise ServiceError(f"{host} can be reached by others, and this page knows no passwords; use 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServiceError(
            f"port {port} cannot be opened ({error.strerror}); is the page served already? --port 0 takes a free one"
        ) from error
