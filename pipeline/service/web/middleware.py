"""What stands before every route: a limit on bodies, headers for browsers, and a brake on wrong tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.ops.body_limit import limit_body

MAX_BODY_BYTES = 2_000_000
BODY_TOO_LARGE_TEXT = f"a request may have {MAX_BODY_BYTES // 1_000_000} MB"
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
UNCACHED_PREFIXES = ("/api/", "/site/")
# a report has its style and pictures within it, and no script
REPORT_CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"


@dataclass(frozen=True)
class BodyLimitMiddleware:
    """Bodies are counted as they come: a length that is not told, or a lie, helps nobody."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.app(scope, limit_body(scope, receive, MAX_BODY_BYTES, BODY_TOO_LARGE_TEXT), send)


@dataclass(frozen=True)
class SecurityHeadersMiddleware:
    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                if scope["path"].startswith(UNCACHED_PREFIXES):
                    headers["cache-control"] = "no-store"
            await send(message)

        await self.app(scope, receive, send_with_headers)


@dataclass
class AuthFailureLimiter:
    """Wrong tokens by address. Too many are not even written down any more, so that nobody fills the disk with them.

    A right token is always let in: behind the front, or a hospital's proxy, many share one address, and 256 random bits
    are not found by trying.
    """

    max_failures: int = 10
    window_seconds: float = 300.0
    clock: Callable[[], float] = time.monotonic
    _times_by_address: dict[str, deque[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_failure(self, address: str) -> bool:
        """Whether there were too many."""
        now = self.clock()
        with self._lock:
            for stale_address in [
                a for a, times in self._times_by_address.items() if times[-1] < now - self.window_seconds
            ]:
                del self._times_by_address[stale_address]
            times = self._times_by_address.setdefault(address, deque(maxlen=self.max_failures + 1))
            times.append(now)
            return len(times) > self.max_failures and times[0] >= now - self.window_seconds
