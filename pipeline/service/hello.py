"""The first message of a TLS connection (RFC 8446, 4.1.2), read for one thing: which protocols it offers (RFC 7301)."""

from __future__ import annotations

from collections.abc import Iterator

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
