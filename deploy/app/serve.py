"""`hemofed edge serve`: serves the edge app on this machine's loopback interface only."""

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

SHUTDOWN_GRACE_SECONDS = 30  # for the current image after Ctrl-C; a second Ctrl-C stops at once


class _EdgeServer(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, shutdown_event: threading.Event) -> None:
        super().__init__(config)
        self._shutdown_event = shutdown_event

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._shutdown_event.set()  # the handler stops after the current frame of a file
        await super().shutdown(sockets)


def serve_edge_app(runtime: BundleRuntime, host: str, port: int, on_ready: Callable[[str], None]) -> None:
    """Serves until Ctrl-C. Calls `on_ready` with the URL once the port is open; port 0 takes any free port."""
    app = create_app(runtime)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_interrupt)  # service managers send SIGTERM instead of Ctrl-C
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
        with contextlib.suppress(KeyboardInterrupt):  # uvicorn re-raises it after it has stopped
            url_host = f"[{host}]" if ":" in host else host
            on_ready(f"http://{url_host}:{listener.getsockname()[1]}/")
            _EdgeServer(config, app.state.shutdown_event).run(sockets=[listener])


def _raise_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _open_listener(host: str, port: int) -> socket.socket:
    if not ipaddress.ip_address(host).is_loopback:
        raise ServiceError(f"other machines can reach {host}, and this page has no login; use 127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise ServiceError(
            f"cannot open port {port} ({error.strerror}); if the page is already being served, --port 0 takes a free port"
        ) from error
