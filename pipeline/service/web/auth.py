"""Authentication and authorization of requests. Every route requires a role (app.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, HTTPException, Request
from fastapi.security import APIKeyCookie, HTTPBearer

from pipeline.service.storage.accounts import USER_ROLES, AccountStore
from pipeline.service.web.context import ServiceContext

SESSION_COOKIE = "hemofed"
CSRF_HEADER = "x-hemofed"  # pages of other origins cannot send it
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RequiredRole = Literal["anyone", "viewer", "officer", "lead", "site"]


@dataclass(frozen=True)
class AuthenticatedCaller:
    name: str
    role: RequiredRole


# for the OpenAPI schema only: `_authenticate` reads the headers itself
SITE_SCHEME = Depends(HTTPBearer(auto_error=False, scheme_name="credential of a site"))
USER_SCHEMES = (
    Depends(HTTPBearer(auto_error=False, scheme_name="token")),
    Depends(APIKeyCookie(name=SESSION_COOKIE, auto_error=False, scheme_name="session")),
)
SECURITY_SCHEMES = {
    "anyone": (),
    "site": (SITE_SCHEME,),
    "viewer": USER_SCHEMES,
    "officer": USER_SCHEMES,
    "lead": USER_SCHEMES,
}


def require_role(role: RequiredRole) -> Callable[[Request], None]:
    """A dependency that rejects callers without the role. Endpoints get the caller as `CurrentCaller`."""

    def authorize(request: Request) -> None:
        context: ServiceContext = request.app.state.context
        if role != "anyone":
            request.state.caller = _authenticate(request, role, context.store.accounts)
        elif request.method not in SAFE_METHODS and request.url.path.startswith("/api/"):
            _check_origin(request)

    return authorize


def get_caller(request: Request) -> AuthenticatedCaller:
    caller: AuthenticatedCaller = request.state.caller
    return caller


CurrentCaller = Annotated[AuthenticatedCaller, Depends(get_caller)]


def is_still_authorized(request: Request) -> bool:
    """Whether the caller of an open stream may still read it: tokens are revoked and sessions expire."""
    try:
        _authenticate(request, "viewer", request.app.state.context.store.accounts)
    except HTTPException:
        return False
    return True


def _authenticate(request: Request, role: RequiredRole, accounts: AccountStore) -> AuthenticatedCaller:
    token, cookie = _bearer_token(request), request.cookies.get(SESSION_COOKIE)
    if role == "site":
        site = accounts.find_site(token) if token else None
        if site is None:
            raise _unauthorized("this needs a site's credential; enrol with `hemofed site join` and an invitation")
        return AuthenticatedCaller(site.name, "site")
    user = accounts.find_user(token) if token else accounts.find_login_user(cookie) if cookie else None
    if user is None:
        raise _unauthorized("this needs a token or a login; ask the lead for one (`hemofed coordinator users`)")
    if not token and request.method not in SAFE_METHODS:
        _check_origin(request)
    request.state.caller = AuthenticatedCaller(user.name, user.role)  # type: ignore[arg-type]
    if _role_rank(user.role) < _role_rank(role):
        raise HTTPException(403, f"{user.name} has the role {user.role}, but this needs {role}; ask the study lead")
    caller: AuthenticatedCaller = request.state.caller
    return caller


def _check_origin(request: Request) -> None:
    """CSRF protection: pages of other origins can make a browser send its cookie, but neither this header nor JSON."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get(CSRF_HEADER) != "1" and content_type != "application/json":
        raise HTTPException(403, "a request with a session cookie needs the header `X-Hemofed: 1` or a JSON body")


def _bearer_token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _role_rank(role: str) -> int:
    return USER_ROLES.index(role)


def _unauthorized(text: str) -> HTTPException:
    return HTTPException(401, text, {"WWW-Authenticate": "Bearer"})
