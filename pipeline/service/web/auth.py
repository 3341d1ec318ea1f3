"""Who asks, and whether they may. Every route names its role (app.py); nothing is served to whom it does not name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import Depends, HTTPException, Request
from fastapi.security import APIKeyCookie, HTTPBearer

from pipeline.service.storage.accounts import ROLES, Accounts
from pipeline.service.web.context import Parts

COOKIE = "hemofed"
HEADER = "x-hemofed"
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
Need = Literal["anyone", "viewer", "officer", "lead", "site"]


@dataclass(frozen=True)
class Caller:
    name: str
    role: Need


# for the OpenAPI page only: `gate` reads the headers itself
CREDENTIAL = Depends(HTTPBearer(auto_error=False, scheme_name="credential of a site"))
PERSONAL = (
    Depends(HTTPBearer(auto_error=False, scheme_name="token")),
    Depends(APIKeyCookie(name=COOKIE, auto_error=False, scheme_name="session")),
)
DECLARED = {"anyone": (), "site": (CREDENTIAL,), "viewer": PERSONAL, "officer": PERSONAL, "lead": PERSONAL}


def gate(need: Need) -> Callable[[Request], None]:
    """A dependency that lets through whoever the route is for; endpoints read who it is with `Who`."""

    def enter(request: Request) -> None:
        parts: Parts = request.app.state.parts
        if need != "anyone":
            request.state.caller = _let_in(request, need, parts.store.accounts)
        elif request.method not in SAFE and request.url.path.startswith("/api/"):
            _check_origin(request)

    return enter


def caller(request: Request) -> Caller:
    found: Caller = request.state.caller
    return found


Who = Annotated[Caller, Depends(caller)]


def still(request: Request) -> bool:
    """Whether who opened a stream may go on reading it: tokens are revoked, sessions end."""
    try:
        _let_in(request, "viewer", request.app.state.parts.store.accounts)
    except HTTPException:
        return False
    return True


def _let_in(request: Request, need: Need, accounts: Accounts) -> Caller:
    bearer, cookie = _bearer(request), request.cookies.get(COOKIE)
    if need == "site":
        site = accounts.site(bearer) if bearer else None
        if site is None:
            raise _nobody("this needs a site's credential; enrol with an invitation: `hemofed site join`")
        return Caller(site.name, "site")
    user = accounts.user(bearer) if bearer else accounts.session(cookie) if cookie else None
    if user is None:
        raise _nobody("this needs a token or a login; the lead hands out tokens: `hemofed coordinator users`")
    if not bearer and request.method not in SAFE:
        _check_origin(request)
    request.state.caller = Caller(user.name, user.role)  # type: ignore[arg-type]
    if _rank(user.role) < _rank(need):
        raise HTTPException(403, f"{user.name} is {user.role}, and this is for {need}; ask the study lead")
    found: Caller = request.state.caller
    return found


def _check_origin(request: Request) -> None:
    """Another site's page can make a browser send its cookie, but neither this header nor JSON without our leave."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if request.headers.get(HEADER) != "1" and kind != "application/json":
        raise HTTPException(403, "a browser's request needs the header `X-Hemofed: 1` or a JSON body")


def _bearer(request: Request) -> str:
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else ""


def _rank(role: str) -> int:
    return ROLES.index(role)


def _nobody(text: str) -> HTTPException:
    return HTTPException(401, text, {"WWW-Authenticate": "Bearer"})
