"""The one public port. It looks at the first bytes of a TLS connection, ends none itself, and passes them on.

A client that offers HTTP/2 and nothing older speaks gRPC: it goes to the FLARE server. All others go to the web service.
Both listen on loopback only, and both see the loopback as the other end: `peer` tells who it really is.
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
BUFFER = 256 * 1024
HELLO_SECONDS = 5.0
CONNECT_SECONDS = 5.0
METHODS = (b"GET ", b"HEAD ", b"POST ", b"PUT ", b"DELETE ", b"OPTIONS ", b"PATCH ", b"CONNECT ", b"TRACE ", b"PRI ")
TEXT = b"this is a TLS port; use https://\n"
REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    % len(TEXT)
) + TEXT
log = logging.getLogger("hemofed.front")


class Front:
    """Runs in a thread of its own, so that neither a busy service nor large models delay the other."""

    def __init__(
        self, host: str, port: int, web: Address, flare: Address, per_address: int = 64, in_all: int = 1024
    ) -> None:
        self._targets = {"web": web, "flare": flare}
        self._per_address, self._in_all = per_address, in_all
        self._peers: dict[int, str] = {}  # our port towards the web service -> who is there
        self._from: Counter[str] = Counter()
        self._listening = _listen(host, port)
        self.port: int = self._listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="front", daemon=True)

    def start(self) -> Front:
        self._thread.start()
        return self

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._over.set)
            self._thread.join()
        self._listening.close()
        self._loop.close()

    def peer(self, port: int) -> str | None:
        """The real address behind the connection that reached the web service from this port of ours."""
        return self._peers.get(port)

    @property
    def connections(self) -> int:
        return self._from.total()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        open_ones: set[asyncio.Task[None]] = set()
        accepting = asyncio.create_task(self._accept(open_ones))
        await self._over.wait()
        for task in (accepting, *open_ones):
            task.cancel()
        await asyncio.gather(accepting, *open_ones, return_exceptions=True)

    async def _accept(self, open_ones: set[asyncio.Task[None]]) -> None:
        while True:
            try:
                client, address = await self._loop.sock_accept(self._listening)
            except OSError as error:  # too many open files, or the client went away
                log.warning("cannot accept: %s", error.strerror)
                await asyncio.sleep(0.1)
                continue
            who = str(address[0]).removeprefix("::ffff:")
            if self._from[who] >= self._per_address or self.connections >= self._in_all:
                log.warning(
                    "%s: refused, %d connections of it are open, %d in all", who, self._from[who], self.connections
                )
                client.close()
                continue
            self._from[who] += 1
            task = asyncio.create_task(self._handle(client, who))
            open_ones.add(task)
            task.add_done_callback(open_ones.discard)

    async def _handle(self, client: socket.socket, who: str) -> None:
        try:
            with client:
                client.setblocking(False)
                _tune(client)
                await self._pass_on(client, who)
        except (OSError, TimeoutError):  # either end went away
            pass
        finally:
            self._from[who] -= 1
            self._from += Counter()  # forgets who has none left

    async def _pass_on(self, client: socket.socket, who: str) -> None:
        first = b""
        try:
            async with asyncio.timeout(HELLO_SECONDS):
                while (names := offered(first)) is None:
                    if not (more := await self._loop.sock_recv(client, MOST - len(first))):
                        return
                    first += more
        except NotTls as error:
            log.info("%s: no TLS: %s", who, error)
            if first.startswith(METHODS):
                await self._refuse(client)
            return
        name = "flare" if "h2" in names and "http/1.1" not in names else "web"
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.setblocking(False)
            _tune(server)
            try:
                async with asyncio.timeout(CONNECT_SECONDS):
                    await self._loop.sock_connect(server, self._targets[name])
            except (OSError, TimeoutError):
                log.warning("%s: nobody listens for %s at %s:%d", who, name, *self._targets[name])
                return
            own = server.getsockname()[1]
            if name == "web":
                self._peers[own] = who
            try:
                await self._loop.sock_sendall(server, first)
                await self._copy_both(client, server)
            finally:
                if name == "web":
                    self._peers.pop(own, None)

    async def _refuse(self, client: socket.socket) -> None:
        """What the client still sends is read: closing over it would take the answer back."""
        await self._loop.sock_sendall(client, REFUSAL)
        client.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(1.0):
            while await self._loop.sock_recv(client, BUFFER):
                pass

    async def _copy_both(self, client: socket.socket, server: socket.socket) -> None:
        """Until both directions have ended; a broken one ends the other."""
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(self._copy(client, server))
                both.create_task(self._copy(server, client))
        except* OSError:
            pass

    async def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        """Reads no more than was taken at the other end, and passes on that one side has finished speaking."""
        buffer = memoryview(bytearray(BUFFER))
        while count := await self._loop.sock_recv_into(source, buffer):
            await self._loop.sock_sendall(sink, buffer[:count])
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


def _listen(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listening = socket.create_server(address[:2], family=family, backlog=256, dualstack_ipv6=host == "::")
    listening.setblocking(False)
    return listening


def _tune(one: socket.socket) -> None:
    """No waiting for more to send; a far end that vanished is noticed within two minutes."""
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15)
    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


# The first message of a TLS connection (RFC 8446, 4.1.2), read for one thing: which protocols it offers (RFC 7301).

MOST = 16_384  # bytes of a ClientHello, record headers included; real ones have 200 to 2000
HANDSHAKE, CLIENT_HELLO, ALPN = 22, 1, 16


class NotTls(ValueError):
    """These bytes do not begin a TLS connection."""


def offered(data: bytes) -> tuple[str, ...] | None:
    """The application protocols in order, none if it names none; None as long as the hello is not whole."""
    hello = _hello(data)
    if hello is None:
        if len(data) >= MOST:
            raise NotTls("the hello is too long")
        return None
    body = _Bytes(hello)
    body.take(2 + 32)  # version, random
    body.block(1)  # session
    body.block(2)  # ciphers
    body.block(1)  # compression
    if not body.left:
        return ()
    extensions = _Bytes(body.block(2))
    while extensions.left:
        kind, content = extensions.number(2), extensions.block(2)
        if kind == ALPN:
            return tuple(_names(_Bytes(_Bytes(content).block(2))))
    return ()


def _names(listed: _Bytes) -> Iterator[str]:
    while listed.left:
        yield listed.block(1).decode("latin-1")


def _hello(data: bytes) -> bytes | None:
    """The handshake message, put together from its records. What comes after it is not looked at."""
    message, at = b"", 0
    while at < len(data):
        header = data[at : at + 5]
        if header[0] != HANDSHAKE or header[1:2] not in (b"", b"\x03"):
            raise NotTls("it is no handshake")
        if len(header) < 5:
            return None
        size = int.from_bytes(header[3:5], "big")
        if not 0 < size <= MOST:
            raise NotTls("a record has an impossible length")
        message += data[at + 5 : at + 5 + size]
        at += 5 + size
        end = 4 + int.from_bytes(message[1:4], "big")
        if message[:1] not in (b"", bytes([CLIENT_HELLO])) or (len(message) >= 4 and end > MOST):
            raise NotTls("it is no ClientHello")
        if len(message) >= 4 and end <= len(message):
            return message[4:end]
    return None


class _Bytes:
    """Reads from the front; what is cut short is no TLS."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise NotTls("the hello is cut short")
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def block(self, size: int) -> bytes:
        """Its length in `size` bytes, then itself."""
        return self.take(self.number(size))
