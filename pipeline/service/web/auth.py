"""Who asks, and whether they may. Every route names its role (app.py); nothing is served to whom it does not name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, HTTPException, Request
from fastapi.security import APIKeyCookie, HTTPBearer

from pipeline.service.storage.accounts import USER_ROLES, AccountStore
from pipeline.service.web.context import ServiceContext

SESSION_COOKIE = "hemofed"
CSRF_HEADER = "x-hemofed"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RequiredRole = Literal["anyone", "viewer", "officer", "lead", "site"]


@dataclass(frozen=True)
class AuthenticatedCaller:
    name: str
    role: RequiredRole


# for the OpenAPI page only: `gate` reads the headers itself
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
    """A dependency that lets through whoever the route is for; endpoints read who it is with `Who`."""

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
    """Whether who opened a stream may go on reading it: tokens are revoked, sessions end."""
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
            raise _unauthorized("this needs a site's credential; enrol with an invitation: `hemofed site join`")
        return AuthenticatedCaller(site.name, "site")
    user = accounts.find_user(token) if token else accounts.find_login_user(cookie) if cookie else None
    if user is None:
        raise _unauthorized("this needs a token or a login; the lead hands out tokens: `hemofed coordinator users`")
    if not token and request.method not in SAFE_METHODS:
        _check_origin(request)
    request.state.caller = AuthenticatedCaller(user.name, user.role)  # type: ignore[arg-type]
    if _role_rank(user.role) < _role_rank(role):
        raise HTTPException(403, f"{user.name} is {user.role}, and this is for {role}; ask the study lead")
    caller: AuthenticatedCaller = request.state.caller
    return caller


def _check_origin(request: Request) -> None:
    """Another site's page can make a browser send its cookie, but neither this header nor JSON without our leave."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get(CSRF_HEADER) != "1" and content_type != "application/json":
        raise HTTPException(403, "a browser's request needs the header `X-Hemofed: 1` or a JSON body")


def _bearer_token(request: Request) -> str:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _role_rank(role: str) -> int:
    return USER_ROLES.index(role)


def _unauthorized(text: str) -> HTTPException:
    return HTTPException(401, text, {"WWW-Authenticate": "Bearer"})
