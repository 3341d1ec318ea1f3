"""The service as a whole: which route is for whom, and how errors are told."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException as StarletteError

from pipeline.core.errors import HemofedError
from pipeline.ops.certificates import Authority
from pipeline.ops.json_log import Log, open_log
from pipeline.service.runtime.run_files import Folders
from pipeline.service.runtime.run_states import NotNow
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import Store
from pipeline.service.web import routes_dashboard, routes_downloads, routes_site
from pipeline.service.web.auth import DECLARED, Need, gate
from pipeline.service.web.context import Check, Origin, Parts, Registered
from pipeline.service.web.middleware import Failures, Headers, Limits
from pipeline.service.web.serializers import Views
from pipeline.service.web.server_sent_events import Streams
from privacy.ledger import keys

WEB = Path(__file__).parent / "static"


def health() -> dict[str, bool]:
    return {"ok": True}


def page() -> FileResponse:
    if not (WEB / "index.html").is_file():
        raise HTTPException(404, "this installation has no dashboard; the API is described at /api/openapi.json")
    return FileResponse(WEB / "index.html", headers={"cache-control": "no-cache"})


def authority(request: Request) -> PlainTextResponse:
    """Known by the fingerprint that an invitation carries; everything else is then checked with it."""
    return PlainTextResponse(request.app.state.parts.authority.pem)


def openapi(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = request.app.openapi()
    return found


# method, path, who may, what answers: there is no other way in
ROUTES: tuple[tuple[str, str, Need, Callable[..., Any]], ...] = (
    ("GET", "/", "anyone", page),
    ("GET", "/health", "anyone", health),
    ("GET", "/ca.pem", "anyone", authority),
    ("GET", "/api/openapi.json", "anyone", openapi),
    ("POST", "/api/login", "anyone", routes_dashboard.login),
    ("POST", "/api/logout", "anyone", routes_dashboard.logout),
    ("GET", "/api/me", "viewer", routes_dashboard.me),
    ("GET", "/api/events", "viewer", routes_downloads.events),
    ("GET", "/api/runs", "viewer", routes_dashboard.runs),
    ("POST", "/api/runs", "lead", routes_dashboard.new_run),
    ("GET", "/api/runs/{id}", "viewer", routes_dashboard.run),
    ("GET", "/api/runs/{id}/rounds", "viewer", routes_dashboard.rounds),
    ("GET", "/api/runs/{id}/results", "viewer", routes_dashboard.results),
    ("GET", "/api/runs/{id}/privacy", "viewer", routes_dashboard.privacy),
    ("GET", "/api/runs/{id}/events", "viewer", routes_downloads.run_events),
    ("GET", "/api/runs/{id}/files", "viewer", routes_downloads.files),
    ("GET", "/api/runs/{id}/files/{path:path}", "viewer", routes_downloads.file),
    ("POST", "/api/runs/{id}/begin", "lead", routes_dashboard.begin),
    ("POST", "/api/runs/{id}/pause", "lead", routes_dashboard.pause),
    ("POST", "/api/runs/{id}/resume", "lead", routes_dashboard.resume),
    ("POST", "/api/runs/{id}/stop", "lead", routes_dashboard.stop),
    ("GET", "/api/sites", "viewer", routes_dashboard.sites),
    ("POST", "/api/sites/{name}/invite", "lead", routes_dashboard.invite),
    ("POST", "/api/sites/{name}/remove", "lead", routes_dashboard.remove),
    ("GET", "/api/approvals", "viewer", routes_dashboard.approvals),
    ("GET", "/api/users", "lead", routes_dashboard.users),
    ("POST", "/api/users", "lead", routes_dashboard.new_user),
    ("POST", "/api/users/{name}/revoke", "lead", routes_dashboard.revoke),
    ("GET", "/api/log", "officer", routes_dashboard.log),
    ("POST", "/site/enrol", "anyone", routes_site.enrol),
    ("POST", "/site/beat", "site", routes_site.beat),
    ("GET", "/site/runs/{id}/models/{name:path}", "site", routes_site.model),
    ("POST", "/site/leave", "site", routes_site.leave),
)


def make_app(
    home: CoordinatorHome,
    store: Store,
    registered: Registered = lambda: None,
    check: Check = lambda study: None,
    log: Log | None = None,
    origin: Origin = lambda host, port: host,
) -> FastAPI:
    """`app.state.parts.streams.close()` lets go of listeners before the server shuts down."""
    app = FastAPI(
        title="hemofed coordinator", version=version("hemofed"), openapi_url=None, docs_url=None, redoc_url=None
    )
    folders = Folders(home.runs)
    app.state.parts = Parts(
        home, store, log or open_log(home.log), Authority.open(home.path), keys.public_hex(home.key), folders,
        Views(store, folders), Streams(), Failures(), registered, check, origin,
    )  # fmt: skip
    for method, path, need, answer in ROUTES:
        app.add_api_route(
            path, answer, methods=[method], response_model=None, dependencies=[Depends(gate(need)), *DECLARED[need]],
            tags=[path.split("/")[1] or "pages"], openapi_extra={"x-role": need},
        )  # fmt: skip
    app.mount("/static", StaticFiles(directory=WEB, check_dir=False))
    app.add_exception_handler(StarletteError, _refused)
    app.add_exception_handler(RequestValidationError, _misread)
    app.add_exception_handler(HemofedError, _unfit)
    app.add_exception_handler(Exception, _broken)
    app.add_middleware(Limits)
    app.add_middleware(Headers)
    return app


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteError)
    return _told(request, error.status_code, str(error.detail), dict(error.headers or {}))


def _misread(request: Request, error: Exception) -> Response:
    """Names the fields, never what stood in them: that may be a token."""
    assert isinstance(error, RequestValidationError)
    wrong = [f"{'.'.join(str(part) for part in e['loc'][1:]) or 'the body'}: {e['msg']}" for e in error.errors()]
    return _told(request, 422, "; ".join(wrong))


def _unfit(request: Request, error: Exception) -> Response:
    return _told(request, 409 if isinstance(error, NotNow) else 422, str(error))


def _broken(request: Request, error: Exception) -> Response:
    where = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)[-6:]]
    return _told(
        request, 500, f"the service failed ({type(error).__name__}); its log says more", why=repr(error), where=where
    )


def _told(request: Request, status: int, text: str, headers: dict[str, str] | None = None, **more: Any) -> Response:
    parts: Parts = request.app.state.parts
    who = getattr(request.state, "caller", None)
    parts.log.event(
        "failed" if status >= 500 else "refused",
        "error" if status >= 500 else "warning",
        status=status,
        method=request.method,
        path=request.url.path,
        who=who.name if who else None,
        address=parts.address(request),
        **({"why": text} | more),
    )
    return JSONResponse({"error": text}, status, headers)
