"""Serves a web application with uvicorn in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI


@contextmanager
def serve_app(app: FastAPI, **tls: Any) -> Iterator[str]:
    """Yields the URL, on a free port. `tls`: uvicorn's `ssl_certfile` and `ssl_keyfile`."""
    config = uvicorn.Config(
        app, port=0, log_level="error", log_config=None, ws="none", timeout_graceful_shutdown=20, **tls
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
