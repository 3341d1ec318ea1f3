"""Request bodies are counted as they come: a length that is not told, or a lie, helps nobody."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope


def counted(scope: Scope, receive: Receive, most: int, why: str) -> Receive:
    """`receive`, until more than `most` bytes have come."""
    told = Headers(scope=scope).get("content-length", "0")
    got = int(told) if told.isdigit() and int(told) > most else 0

    async def counting() -> Message:
        nonlocal got
        message = await receive() if got <= most else {}
        got += len(message.get("body", b""))
        if got > most:
            raise HTTPException(413, why)
        return message

    return counting
