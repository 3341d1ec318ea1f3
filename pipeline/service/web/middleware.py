"""Middleware of all routes: limits the size of bodies and sets security headers; and a limiter of wrong tokens."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.ops.body_limit import limit_body
from pipeline.ops.security_headers import COMMON_HEADERS, add_headers

MAX_BODY_BYTES = 2_000_000
BODY_TOO_LARGE_TEXT = f"the request is too large; at most {MAX_BODY_BYTES // 1_000_000} MB are allowed"
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    **COMMON_HEADERS,
}
UNCACHED_PREFIXES = ("/api/", "/site/")
# reports contain their styles and images, and no scripts
REPORT_CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox; frame-ancestors 'none'"


@dataclass(frozen=True)
class BodyLimitMiddleware:
    """Rejects bodies over `MAX_BODY_BYTES` while they arrive, whatever Content-Length says."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        await self.app(scope, limit_body(scope, receive, MAX_BODY_BYTES, BODY_TOO_LARGE_TEXT), send)


@dataclass(frozen=True)
class SecurityHeadersMiddleware:
    """Adds `SECURITY_HEADERS`, and forbids caching of API responses."""

    app: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        no_store = {"cache-control": "no-store"} if scope["path"].startswith(UNCACHED_PREFIXES) else {}
        await self.app(scope, receive, add_headers(send, {**SECURITY_HEADERS, **no_store}))


@dataclass
class AuthFailureLimiter:
    """Counts wrong tokens by address. Excess failures are not recorded, so that they cannot fill the disk.

    A valid token is always accepted: behind a hospital's proxy many clients share one address, and 256 random bits cannot
    be guessed.
    """

    max_failures: int = 10
    window_seconds: float = 300.0
    clock: Callable[[], float] = time.monotonic
    _times_by_address: dict[str, deque[float]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def record_failure(self, address: str) -> bool:
        """True if the address has had too many failures within the window."""
        now = self.clock()
        with self._lock:
            for stale_address in [
                a for a, times in self._times_by_address.items() if times[-1] < now - self.window_seconds
            ]:
                del self._times_by_address[stale_address]
            times = self._times_by_address.setdefault(address, deque(maxlen=self.max_failures + 1))
            times.append(now)
            return len(times) > self.max_failures and times[0] >= now - self.window_seconds
