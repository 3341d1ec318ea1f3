"""What people may ask: runs, sites, approvals, users, the log. Which role each needs stands in app.py."""

from __future__ import annotations

import tomllib
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

from fastapi import HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pipeline.protocol.invitations import invitation
from pipeline.service.runtime.create_run import act, launch, plain_words
from pipeline.service.storage.accounts import SESSION, Role
from pipeline.service.web.auth import COOKIE, Who
from pipeline.service.web.context import Held, Parts
from pipeline.service.web.serializers import Shown, iso, user_view
from pipeline.study.offer import RUN_NAME, SITE_NAME, SiteName
from privacy.ledger import keys

RunId = Annotated[str, Path(pattern=RUN_NAME)]
SiteId = Annotated[str, Path(pattern=SITE_NAME)]
Token = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class Login(Body):
    token: Token


class NewRun(Body):
    study: str = Field(max_length=200_000)
    sites: list[SiteName] | None = None  # all that are enrolled
    fewest: int | None = Field(None, ge=1, le=100_000)


class Invite(Body):
    hours: float = Field(48, gt=0, le=24 * 90)


class NewUser(Body):
    name: SiteName
    role: Role


def login(body: Login, request: Request, response: Response, parts: Held) -> Shown:
    user = parts.store.accounts.user(body.token)
    if user is None:
        refuse(parts, request, "login refused", "somebody", HTTPException(401, "the token is wrong or was revoked"))
    response.set_cookie(
        COOKIE, parts.store.accounts.login(user), max_age=int(SESSION.total_seconds()), httponly=True, secure=True, samesite="strict"
    )  # fmt: skip
    parts.log.event("login", user=user.name, address=parts.address(request))
    return {"name": user.name, "role": user.role}


def logout(request: Request, response: Response, parts: Held) -> Shown:
    if cookie := request.cookies.get(COOKIE):
        parts.store.accounts.logout(cookie)
    response.delete_cookie(COOKIE, httponly=True, secure=True, samesite="strict")
    return {"ok": True}


def me(who: Who, parts: Held) -> Shown:
    own = {"name": parts.home.name, "fingerprint": keys.fingerprint(bytes.fromhex(parts.public))}
    return {"name": who.name, "role": who.role, "version": version("hemofed"), "coordinator": own}


def runs(parts: Held) -> list[Shown]:
    return parts.views.runs()


def run(id: RunId, parts: Held) -> Shown:
    study = parts.folders.text(id, "study.toml")
    more = {"study": study, "offer": parts.folders.json(id, "offer.json"), "about": plain_words(tomllib.loads(study))}
    return found_run(parts, id) | more


def new_run(body: NewRun, who: Who, parts: Held) -> Shown:
    made = launch(parts, body.study, body.sites, body.fewest, who.name)
    parts.log.event("run offered", user=who.name, run=made.id, sites=made.sites)
    return found_run(parts, made.id)


def begin(id: RunId, who: Who, parts: Held) -> Shown:
    return _act(parts, id, "begin", who.name)


def pause(id: RunId, who: Who, parts: Held) -> Shown:
    return _act(parts, id, "pause", who.name)


def resume(id: RunId, who: Who, parts: Held) -> Shown:
    return _act(parts, id, "resume", who.name)


def stop(id: RunId, who: Who, parts: Held) -> Shown:
    return _act(parts, id, "stop", who.name)


def rounds(id: RunId, parts: Held, after: Annotated[int, Query(ge=-1)] = -1) -> list[Shown]:
    found_run(parts, id)
    return [record for record in parts.folders.rounds(id) if record["round"] > after]


def results(id: RunId, parts: Held) -> Any:
    return _written(parts, id, "results.json")


def privacy(id: RunId, parts: Held) -> Any:
    return _written(parts, id, "privacy.json")


def sites(parts: Held) -> list[Shown]:
    return parts.views.sites()


def invite(name: SiteId, body: Invite, who: Who, parts: Held) -> Shown:
    token, until = parts.store.accounts.invite(name, body.hours, who.name)
    parts.log.event("invitation", user=who.name, site=name, expires=iso(until))
    return {"token": invitation(token, parts.authority.pem), "expires": iso(until)}


def remove(name: SiteId, who: Who, parts: Held) -> Shown:
    if not parts.store.leave(name, who.name, removed=True):
        raise HTTPException(404, f"no site {name!r} is enrolled")
    parts.log.event("site removed", user=who.name, site=name)
    return {"ok": True}


def approvals(parts: Held) -> list[Shown]:
    return parts.views.approvals()


def users(parts: Held) -> list[Shown]:
    return [user_view(user) for user in parts.store.accounts.users()]


def new_user(body: NewUser, who: Who, parts: Held) -> Shown:
    token = parts.store.accounts.add_user(body.name, body.role, who.name)
    if token is None:
        raise HTTPException(409, f"there is a user {body.name}; revoke it first, or choose another name")
    parts.log.event("user added", user=who.name, name=body.name, role=body.role)
    return {"name": body.name, "role": body.role, "token": token}


def revoke(name: SiteId, who: Who, parts: Held) -> Shown:
    done = parts.store.accounts.revoke_user(name, who.name)
    if done == "unknown":
        raise HTTPException(404, f"there is no user {name!r}")
    if done == "last lead":
        raise HTTPException(409, f"{name} is the only lead; add another one first")
    parts.log.event("user revoked", user=who.name, name=name)
    return {"ok": True}


def log(parts: Held, last: Annotated[int, Query(ge=1, le=5000)] = 200) -> list[Shown]:
    return parts.log.last(last)


def found_run(parts: Parts, id: str) -> Shown:
    shown = parts.views.run(id)
    if shown is None:
        raise HTTPException(404, f"there is no run {id!r}")
    return shown


def refuse(parts: Parts, request: Request, what: str, who: str, error: HTTPException) -> NoReturn:
    """Writes down who failed to get in, unless there were so many that writing would be the harm."""
    address = parts.address(request)
    if parts.failures.add(address):
        raise HTTPException(429, "too many wrong tokens; wait five minutes", {"Retry-After": "300"})
    parts.store.note(who, what, address=address)
    raise error


def _act(parts: Parts, id: str, action: str, by: str) -> Shown:
    found_run(parts, id)
    state = act(parts, id, action, by).state
    parts.log.event(f"run: {action}", user=by, run=id, state=state)
    return found_run(parts, id)


def _written(parts: Parts, id: str, name: str) -> Any:
    found_run(parts, id)
    if (found := parts.folders.json(id, name)) is None:
        raise HTTPException(404, f"{id} has no {name} yet")
    return found
