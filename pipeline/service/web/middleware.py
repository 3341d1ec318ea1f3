"""What stands before every route: a limit on bodies, headers for browsers, and a brake on wrong tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.ops.body_limit import counted

MOST_BYTES = 2_000_000
TOO_LONG = f"a request may have {MOST_BYTES // 1_000_000} MB"
HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
PRIVATE = ("/api/", "/site/")
# a report has its style and pictures within it, and no script
REPORT = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"


@dataclass(frozen=True)
class Limits:
    """Bodies are counted as they come: a length that is not told, or a lie, helps nobody."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.app(scope, counted(scope, receive, MOST_BYTES, TOO_LONG), send)


@dataclass(frozen=True)
class Headers:
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def adorned(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith(PRIVATE):
                    headers["cache-control"] = "no-store"
            await send(message)

        await self.app(scope, receive, adorned)


@dataclass
class Failures:
    """Wrong tokens by address. Too many are not even written down any more, so that nobody fills the disk with them.

    A right token is always let in: behind the front, or a hospital's proxy, many share one address, and 256 random bits
    are not found by trying.
    """

    most: int = 10
    seconds: float = 300.0
    now: Callable[[], float] = time.monotonic
    _seen: dict[str, deque[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, address: str) -> bool:
        """Whether there were too many."""
        now = self.now()
        with self._lock:
            for other in [a for a, times in self._seen.items() if times[-1] < now - self.seconds]:
                del self._seen[other]
            times = self._seen.setdefault(address, deque(maxlen=self.most + 1))
            times.append(now)
            return len(times) > self.most and times[0] >= now - self.seconds
