"""A slow line between a site and its coordinator."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

PIECE = 4096


class Line:
    """Passes TCP on at `rate` bytes a second each way, each piece after `delay` seconds."""

    def __init__(self, port: int, rate: float, delay: float) -> None:
        self._to, self.rate, self.delay = port, rate, delay
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.passed = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(("127.0.0.1", self._to))
                self._open += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(PIECE):
                time.sleep(self.delay + len(piece) / self.rate)
                sink.sendall(piece)
                self.passed += len(piece)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.close()


@contextlib.contextmanager
def slow_line(port: int, rate: float, delay: float) -> Iterator[Line]:
    line = Line(port, rate, delay)
    try:
        yield line
    finally:
        line.close()
