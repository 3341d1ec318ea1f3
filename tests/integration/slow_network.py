"""A slow network connection between a site and its coordinator."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

CHUNK_BYTES = 4096


class SlowConnection:
    """Forwards TCP connections to a port of this machine.

    `rate`: bytes per second in each direction. `delay`: additional seconds for each chunk.
    """

    def __init__(self, target_port: int, rate: float, delay: float) -> None:
        self._target_port, self.rate, self.delay = target_port, rate, delay
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.num_bytes = 0
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.create_connection(("127.0.0.1", self._target_port))
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while chunk := source.recv(CHUNK_BYTES):
                time.sleep(self.delay + len(chunk) / self.rate)
                sink.sendall(chunk)
                self.num_bytes += len(chunk)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for open_socket in (self._listening, *self._sockets):
            with contextlib.suppress(OSError):
                open_socket.close()


@contextlib.contextmanager
def open_slow_connection(target_port: int, rate: float, delay: float) -> Iterator[SlowConnection]:
    connection = SlowConnection(target_port, rate, delay)
    try:
        yield connection
    finally:
        connection.close()
