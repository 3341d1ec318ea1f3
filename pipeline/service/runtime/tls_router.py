"""One public port for gRPC and HTTPS: routes TLS connections by the protocols (ALPN) that the ClientHello offers.

The router does not terminate TLS and holds no keys. A client that offers HTTP/2 only speaks gRPC and is connected to the
FLARE server, any other client to the web service. Both listen on loopback and see a loopback peer; `peer_address`
returns the real one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator

Address = tuple[str, int]
BUFFER_BYTES = 256 * 1024
HELLO_TIMEOUT_SECONDS = 5.0
CONNECT_TIMEOUT_SECONDS = 5.0
HTTP_METHODS = (
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"PUT ",
    b"DELETE ",
    b"OPTIONS ",
    b"PATCH ",
    b"CONNECT ",
    b"TRACE ",
    b"PRI ",
)
NOT_TLS_TEXT = b"this is a TLS port; use https://\n"
NOT_TLS_RESPONSE = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    % len(NOT_TLS_TEXT)
) + NOT_TLS_TEXT
log = logging.getLogger("hemofed.tls_router")


class TlsRouter:
    """Runs an event loop in its own thread, so that neither a busy service nor large models delay the other.

    `web`, `flare`: addresses to which connections are forwarded.
    """

    def __init__(
        self, host: str, port: int, web: Address, flare: Address, max_per_address: int = 64, max_connections: int = 1024
    ) -> None:
        self._targets = {"web": web, "flare": flare}
        self._max_per_address, self._max_connections = max_per_address, max_connections
        self._peer_by_port: dict[int, str] = {}  # local port of our connection to the web service -> client's address
        self._connections_by_address: Counter[str] = Counter()
        self._listener = _open_listener(host, port)
        self.port: int = self._listener.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._stop_event = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tls-router", daemon=True)

    def start(self) -> TlsRouter:
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop_event.set)
            self._thread.join()
        self._listener.close()
        self._loop.close()

    def peer_address(self, port: int) -> str | None:
        """The address of the client whose connection is forwarded to the web service from this local port."""
        return self._peer_by_port.get(port)

    @property
    def num_connections(self) -> int:
        return self._connections_by_address.total()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        open_tasks: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(self._accept(open_tasks))
        await self._stop_event.wait()
        for task in (accepting, *open_tasks):
            task.cancel()
        await asyncio.gather(accepting, *open_tasks, return_exceptions=True)

    async def _accept(self, open_tasks: set[asyncio.Task[None]]) -> None:
        while True:
            try:
                client, address = await self._loop.sock_accept(self._listener)
            except OSError as error:  # too many open files, or the client went away
                log.warning("cannot accept a connection: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            peer = str(address[0]).removeprefix("::ffff:")
            if (
                self._connections_by_address[peer] >= self._max_per_address
                or self.num_connections >= self._max_connections
            ):
                log.warning(
                    "%s: connection refused, %d from this address are open, %d in total",
                    peer,
                    self._connections_by_address[peer],
                    self.num_connections,
                )
                client.close()
                continue
            self._connections_by_address[peer] += 1
            task = asyncio.create_task(self._handle(client, peer))
            open_tasks.add(task)
            task.add_done_callback(open_tasks.discard)

    async def _handle(self, client: socket.socket, peer: str) -> None:
        try:
            with client:
                client.setblocking(False)
                _set_socket_options(client)
                await self._route_connection(client, peer)
        except (OSError, TimeoutError):  # either end closed the connection
            pass
        finally:
            self._connections_by_address[peer] -= 1
            self._connections_by_address += Counter()  # drops addresses whose count is zero

    async def _route_connection(self, client: socket.socket, peer: str) -> None:
        first_bytes = b""
        try:
            async with asyncio.timeout(HELLO_TIMEOUT_SECONDS):
                while (protocols := parse_alpn_protocols(first_bytes)) is None:
                    if not (chunk := await self._loop.sock_recv(client, MAX_HELLO_BYTES - len(first_bytes))):
                        return
                    first_bytes += chunk
        except NotTlsError as error:
            log.info("%s: not a TLS connection: %s", peer, error)
            if first_bytes.startswith(HTTP_METHODS):
                await self._reject_plain_http(client)
            return
        target = "flare" if "h2" in protocols and "http/1.1" not in protocols else "web"
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as upstream:
            upstream.setblocking(False)
            _set_socket_options(upstream)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_SECONDS):
                    await self._loop.sock_connect(upstream, self._targets[target])
            except (OSError, TimeoutError):
                log.warning("%s: the %s server at %s:%d cannot be reached", peer, target, *self._targets[target])
                return
            local_port = upstream.getsockname()[1]
            if target == "web":
                self._peer_by_port[local_port] = peer
            try:
                await self._loop.sock_sendall(upstream, first_bytes)
                await self._copy_both(client, upstream)
            finally:
                if target == "web":
                    self._peer_by_port.pop(local_port, None)

    async def _reject_plain_http(self, client: socket.socket) -> None:
        """Answers, then reads the rest of the request: closing with unread data would reset the connection."""
        await self._loop.sock_sendall(client, NOT_TLS_RESPONSE)
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(1.0):
            while await self._loop.sock_recv(client, BUFFER_BYTES):
                pass

    async def _copy_both(self, client: socket.socket, upstream: socket.socket) -> None:
        """Copies until both directions have ended; an error in one ends the other."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(client, upstream))
                group.create_task(self._copy(upstream, client))
        except* OSError:
            pass

    async def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        """Reads only after the sink took the last chunk (backpressure), and forwards the end of the stream."""
        buffer = memoryview(bytearray(BUFFER_BYTES))
        while count := await self._loop.sock_recv_into(source, buffer):
            await self._loop.sock_sendall(sink, buffer[:count])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _open_listener(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.create_server(address[:2], family=family, backlog=256, dualstack_ipv6=host == "::")
    listener.setblocking(False)
    return listener


def _set_socket_options(connection: socket.socket) -> None:
    """Sends small packets at once, and detects a dead peer within two minutes."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


# Parses a ClientHello (RFC 8446, 4.1.2) for the application protocols that it offers (ALPN, RFC 7301).

MAX_HELLO_BYTES = 16_384  # including record headers; real ones have 200 to 2000
HANDSHAKE_RECORD, CLIENT_HELLO_MESSAGE, ALPN_EXTENSION = 22, 1, 16


class NotTlsError(ValueError):
    """The bytes are not the start of a TLS connection."""


def parse_alpn_protocols(data: bytes) -> tuple[str, ...] | None:
    """The offered application protocols in order, () without ALPN; None as long as the ClientHello is incomplete."""
    hello = _client_hello(data)
    if hello is None:
        if len(data) >= MAX_HELLO_BYTES:
            raise NotTlsError("the ClientHello is too long")
        return None
    reader = _ByteReader(hello)
    reader.read_bytes(2 + 32)  # version, random
    reader.read_block(1)  # session
    reader.read_block(2)  # ciphers
    reader.read_block(1)  # compression
    if not reader.num_left:
        return ()
    extensions = _ByteReader(reader.read_block(2))
    while extensions.num_left:
        extension_type, content = extensions.read_int(2), extensions.read_block(2)
        if extension_type == ALPN_EXTENSION:
            return tuple(_protocol_names(_ByteReader(_ByteReader(content).read_block(2))))
    return ()


def _protocol_names(reader: _ByteReader) -> Iterator[str]:
    while reader.num_left:
        yield reader.read_block(1).decode("latin-1")


def _client_hello(data: bytes) -> bytes | None:
    """The body of the ClientHello, joined from its TLS records; bytes after it are ignored. None while it is incomplete."""
    message, offset = b"", 0
    while offset < len(data):
        header = data[offset : offset + 5]
        if header[0] != HANDSHAKE_RECORD or header[1:2] not in (b"", b"\x03"):
            raise NotTlsError("it does not begin with a handshake record")
        if len(header) < 5:
            return None
        size = int.from_bytes(header[3:5], "big")
        if not 0 < size <= MAX_HELLO_BYTES:
            raise NotTlsError("a record has an impossible length")
        message += data[offset + 5 : offset + 5 + size]
        offset += 5 + size
        end = 4 + int.from_bytes(message[1:4], "big")
        if message[:1] not in (b"", bytes([CLIENT_HELLO_MESSAGE])) or (len(message) >= 4 and end > MAX_HELLO_BYTES):
            raise NotTlsError("the handshake does not begin with a ClientHello")
        if len(message) >= 4 and end <= len(message):
            return message[4:end]
    return None


class _ByteReader:
    """Reads bytes in order; raises `NotTlsError` if too few are left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._offset = data, 0

    @property
    def num_left(self) -> int:
        return len(self._data) - self._offset

    def read_bytes(self, count: int) -> bytes:
        if count > self.num_left:
            raise NotTlsError("the ClientHello is truncated")
        self._offset += count
        return self._data[self._offset - count : self._offset]

    def read_int(self, size: int) -> int:
        return int.from_bytes(self.read_bytes(size), "big")

    def read_block(self, size: int) -> bytes:
        """A block that is preceded by its length in `size` bytes."""
        return self.read_bytes(self.read_int(size))
