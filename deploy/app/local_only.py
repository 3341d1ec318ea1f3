"""Admits only requests that this machine's browser sends from the edge app's own page.

Threat model: every page in the browser can reach a loopback port. The Host header reveals a foreign name that resolves
to this machine (DNS rebinding), the Origin header a request of a foreign page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.ops.body_limit import limit_body
from pipeline.ops.security_headers import COMMON_HEADERS, add_headers

LOOPBACK_NAMES = ("127.0.0.1", "localhost", "[::1]")
SECURITY_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    **COMMON_HEADERS,
}


@dataclass(frozen=True)
class LocalOnlyMiddleware:
    app: ASGIApp
    max_bytes: int  # bytes of a request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        send_with_headers = add_headers(send, SECURITY_HEADERS)
        reason = rejection_reason(scope)
        if reason is not None:
            await JSONResponse({"error": reason}, 403)(scope, receive, send_with_headers)
            return
        too_large_text = f"larger than {self.max_bytes / 1e6:g} MB; cut it into fields, or use `hemofed predict`"
        await self.app(scope, limit_body(scope, receive, self.max_bytes, too_large_text), send_with_headers)


def rejection_reason(scope: Scope) -> str | None:
    headers, port = Headers(scope=scope), (scope.get("server") or ("", None))[1]
    allowed_hosts = {f"{name}:{port}" for name in LOOPBACK_NAMES} | (set(LOOPBACK_NAMES) if port == 80 else set())
    host = headers.get("host", "")
    if host not in allowed_hosts or len(headers.getlist("host")) != 1:
        return f"this service only answers at {LOOPBACK_NAMES[0]}:{port}; open the address that `hemofed edge serve` printed"
    origins = headers.getlist("origin")
    if scope["method"] not in ("GET", "HEAD") and any(origin != f"http://{host}" for origin in origins):
        return "this request comes from another page; use the page of this service"
    return None
