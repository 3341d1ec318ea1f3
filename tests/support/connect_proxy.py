"""A small HTTP proxy that knows CONNECT only, as hospitals have them."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """`asked`: the request lines; `sent`: the headers of the last one."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sent: list[str] = []
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                self._open.append(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                head += client.recv(4096)
            first, *headers = head.decode().split("\r\n")
            self.asked.append(first)
            self.sent = headers
            host, _, port = first.split()[1].rpartition(":")
            server = socket.create_connection((host, int(port)))
            self._open.append(server)
            client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
            threading.Thread(target=_copy, args=(server, client), daemon=True).start()
            _copy(client, server)


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
