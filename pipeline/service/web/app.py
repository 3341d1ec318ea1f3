"""The FastAPI application: the table of routes with their roles, and error responses."""

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
from pipeline.ops.certificates import CertificateAuthority
from pipeline.ops.json_log import JsonLog, open_log
from pipeline.service.runtime.run_files import RunFiles
from pipeline.service.runtime.run_states import InvalidStateError
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.service.web import routes_dashboard, routes_downloads, routes_site
from pipeline.service.web.auth import SECURITY_SCHEMES, RequiredRole, require_role
from pipeline.service.web.context import AddressResolver, RegisteredSites, ServiceContext, StudyCheck
from pipeline.service.web.middleware import AuthFailureLimiter, BodyLimitMiddleware, SecurityHeadersMiddleware
from pipeline.service.web.serializers import ApiSerializers
from pipeline.service.web.server_sent_events import EventStream
from privacy.ledger import keys

WEB_FOLDER = Path(__file__).parent / "static"


def health() -> dict[str, bool]:
    return {"ok": True}


def dashboard_page() -> FileResponse:
    if not (WEB_FOLDER / "index.html").is_file():
        raise HTTPException(404, "this installation has no dashboard; use the API, see /api/openapi.json")
    return FileResponse(WEB_FOLDER / "index.html", headers={"cache-control": "no-cache"})


def ca_certificate(request: Request) -> PlainTextResponse:
    """The federation's CA certificate. A new site verifies it by the fingerprint in its invitation."""
    return PlainTextResponse(request.app.state.context.authority.pem)


def openapi_schema(request: Request) -> dict[str, Any]:
    schema: dict[str, Any] = request.app.openapi()
    return schema


# method, path, required role, endpoint: the complete list of routes
ROUTES: tuple[tuple[str, str, RequiredRole, Callable[..., Any]], ...] = (
    ("GET", "/", "anyone", dashboard_page),
    ("GET", "/health", "anyone", health),
    ("GET", "/ca.pem", "anyone", ca_certificate),
    ("GET", "/api/openapi.json", "anyone", openapi_schema),
    ("POST", "/api/login", "anyone", routes_dashboard.login),
    ("POST", "/api/logout", "anyone", routes_dashboard.logout),
    ("GET", "/api/me", "viewer", routes_dashboard.get_current_user),
    ("GET", "/api/events", "viewer", routes_downloads.stream_events),
    ("GET", "/api/runs", "viewer", routes_dashboard.list_runs),
    ("POST", "/api/runs", "lead", routes_dashboard.offer_run),
    ("GET", "/api/runs/{id}", "viewer", routes_dashboard.get_run),
    ("GET", "/api/runs/{id}/rounds", "viewer", routes_dashboard.list_rounds),
    ("GET", "/api/runs/{id}/results", "viewer", routes_dashboard.get_results),
    ("GET", "/api/runs/{id}/privacy", "viewer", routes_dashboard.get_privacy),
    ("GET", "/api/runs/{id}/events", "viewer", routes_downloads.stream_run_events),
    ("GET", "/api/runs/{id}/files", "viewer", routes_downloads.list_files),
    ("GET", "/api/runs/{id}/files/{path:path}", "viewer", routes_downloads.download_file),
    ("POST", "/api/runs/{id}/begin", "lead", routes_dashboard.begin_run),
    ("POST", "/api/runs/{id}/pause", "lead", routes_dashboard.pause_run),
    ("POST", "/api/runs/{id}/resume", "lead", routes_dashboard.resume_run),
    ("POST", "/api/runs/{id}/stop", "lead", routes_dashboard.stop_run),
    ("GET", "/api/sites", "viewer", routes_dashboard.list_sites),
    ("POST", "/api/sites/{name}/invite", "lead", routes_dashboard.invite_site),
    ("POST", "/api/sites/{name}/remove", "lead", routes_dashboard.remove_site),
    ("GET", "/api/approvals", "viewer", routes_dashboard.list_approvals),
    ("GET", "/api/users", "lead", routes_dashboard.list_users),
    ("POST", "/api/users", "lead", routes_dashboard.add_user),
    ("POST", "/api/users/{name}/revoke", "lead", routes_dashboard.revoke_user),
    ("GET", "/api/log", "officer", routes_dashboard.list_log_entries),
    ("POST", "/site/enrol", "anyone", routes_site.enrol_site),
    ("POST", "/site/heartbeat", "site", routes_site.handle_heartbeat),
    ("GET", "/site/runs/{id}/models/{name:path}", "site", routes_site.download_model),
    ("POST", "/site/leave", "site", routes_site.leave_federation),
)


def create_app(
    home: CoordinatorHome,
    store: CoordinatorStore,
    registered_sites: RegisteredSites = lambda: None,
    check_study: StudyCheck = lambda study: None,
    log: JsonLog | None = None,
    resolve_address: AddressResolver = lambda host, port: host,
) -> FastAPI:
    """Call `app.state.context.event_stream.close()` before the server shuts down: it ends open event streams.

    The callbacks are described in context.py.
    """
    app = FastAPI(
        title="hemofed coordinator", version=version("hemofed"), openapi_url=None, docs_url=None, redoc_url=None
    )
    run_files = RunFiles(home.runs_folder)
    app.state.context = ServiceContext(
        home=home,
        store=store,
        log=log or open_log(home.log_path),
        authority=CertificateAuthority.open(home.path),
        public_key=keys.public_hex(home.signing_key),
        run_files=run_files,
        serializers=ApiSerializers(store, run_files),
        event_stream=EventStream(),
        auth_failures=AuthFailureLimiter(),
        registered_sites=registered_sites,
        check_study=check_study,
        resolve_address=resolve_address,
    )
    for method, path, role, endpoint in ROUTES:
        app.add_api_route(
            path,
            endpoint,
            methods=[method],
            response_model=None,
            dependencies=[Depends(require_role(role)), *SECURITY_SCHEMES[role]],
            tags=[path.split("/")[1] or "pages"],
            openapi_extra={"x-role": role},
        )
    app.mount("/static", StaticFiles(directory=WEB_FOLDER, check_dir=False))
    app.add_exception_handler(StarletteError, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)
    app.add_exception_handler(HemofedError, _handle_hemofed_error)
    app.add_exception_handler(Exception, _handle_unexpected_error)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(SecurityHeadersMiddleware)
    return app


def _handle_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, StarletteError)
    return _error_response(request, error.status_code, str(error.detail), dict(error.headers or {}))


def _handle_validation_error(request: Request, error: Exception) -> Response:
    """Names the invalid fields but not their values, which may be tokens."""
    assert isinstance(error, RequestValidationError)
    problems = [f"{'.'.join(str(part) for part in e['loc'][1:]) or 'the body'}: {e['msg']}" for e in error.errors()]
    return _error_response(request, 422, "; ".join(problems))


def _handle_hemofed_error(request: Request, error: Exception) -> Response:
    return _error_response(request, 409 if isinstance(error, InvalidStateError) else 422, str(error))


def _handle_unexpected_error(request: Request, error: Exception) -> Response:
    frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)[-6:]]
    return _error_response(
        request, 500, f"the service failed ({type(error).__name__}); see its log", why=repr(error), where=frames
    )


def _error_response(
    request: Request, status: int, text: str, headers: dict[str, str] | None = None, **log_fields: Any
) -> Response:
    """Logs the error with the caller and answers {"error": text}."""
    context: ServiceContext = request.app.state.context
    caller = getattr(request.state, "caller", None)
    context.log.write_event(
        "failed" if status >= 500 else "refused",
        "error" if status >= 500 else "warning",
        status=status,
        method=request.method,
        path=request.url.path,
        who=caller.name if caller else None,
        address=context.client_address(request),
        **({"why": text} | log_fields),
    )
    return JSONResponse({"error": text}, status, headers)
