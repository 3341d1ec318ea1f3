"""Limits request bodies by counting the bytes received: a missing or false content-length does not help a client."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope


def limit_body(scope: Scope, receive: Receive, max_bytes: int, error_text: str) -> Receive:
    """Wraps `receive`: raises 413 with `error_text` after more than `max_bytes`."""
    content_length = Headers(scope=scope).get("content-length", "0")
    num_bytes = int(content_length) if content_length.isdigit() and int(content_length) > max_bytes else 0

    async def receive_limited() -> Message:
        nonlocal num_bytes
        message = await receive() if num_bytes <= max_bytes else {}
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, error_text)
        return message

    return receive_limited
