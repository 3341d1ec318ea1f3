"""Routes of the dashboard and of `hemofed coordinator`: runs, sites, approvals, users, log. app.py has the required roles."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, NoReturn

from fastapi import HTTPException, Path, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from pipeline.protocol.invitations import format_invitation
from pipeline.records.base import FileRecord
from pipeline.records.privacy_record import PrivacyRecord
from pipeline.records.run_results import RunResults
from pipeline.service.runtime.create_run import apply_run_action, create_run
from pipeline.service.storage.accounts import SESSION_LIFETIME, UserRole
from pipeline.service.web.auth import SESSION_COOKIE, CurrentCaller
from pipeline.service.web.context import ContextDep, ServiceContext
from pipeline.service.web.describe_study import describe_study_file
from pipeline.service.web.serializers import ResponseJson, format_time, serialize_user
from pipeline.study.offer import RUN_NAME_PATTERN, SITE_NAME_PATTERN, SiteName
from privacy.ledger import keys

RunIdPath = Annotated[str, Path(pattern=RUN_NAME_PATTERN)]
SiteNamePath = Annotated[str, Path(pattern=SITE_NAME_PATTERN)]
TokenText = Annotated[str, StringConstraints(min_length=1, max_length=200)]


class RequestBody(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, hide_input_in_errors=True)


class LoginRequest(RequestBody):
    token: TokenText


class OfferRunRequest(RequestBody):
    study: str = Field(max_length=200_000)
    sites: list[SiteName] | None = None  # None: all enrolled sites
    min_sites: int | None = Field(None, ge=1, le=100_000)


class InvitationRequest(RequestBody):
    hours: float = Field(48, gt=0, le=24 * 90)


class AddUserRequest(RequestBody):
    name: SiteName
    role: UserRole


def login(body: LoginRequest, request: Request, response: Response, context: ContextDep) -> ResponseJson:
    user = context.store.accounts.find_user(body.token)
    if user is None:
        error = HTTPException(401, "the token is wrong or was revoked; ask the study lead for a new one")
        reject_credentials(context, request, "login refused", "unknown", error)
    response.set_cookie(
        SESSION_COOKIE,
        context.store.accounts.create_login(user),
        max_age=int(SESSION_LIFETIME.total_seconds()),
        httponly=True,
        secure=True,
        samesite="strict",
    )
    context.log.write_event("login", user=user.name, address=context.client_address(request))
    return {"name": user.name, "role": user.role}


def logout(request: Request, response: Response, context: ContextDep) -> ResponseJson:
    if cookie := request.cookies.get(SESSION_COOKIE):
        context.store.accounts.delete_login(cookie)
    response.delete_cookie(SESSION_COOKIE, httponly=True, secure=True, samesite="strict")
    return {"ok": True}


def get_current_user(caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    coordinator = {"name": context.home.name, "fingerprint": keys.fingerprint(bytes.fromhex(context.public_key))}
    return {"name": caller.name, "role": caller.role, "version": version("hemofed"), "coordinator": coordinator}


def list_runs(context: ContextDep) -> list[ResponseJson]:
    return context.serializers.list_runs()


def get_run(id: RunIdPath, context: ContextDep) -> ResponseJson:
    study = context.run_files.read_text(id, "study.toml")
    details = {"study": study, "offer": context.run_files.load_offer(id)}
    return require_run(context, id) | details | describe_study_file(study)


def offer_run(body: OfferRunRequest, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    run = create_run(context, body.study, body.sites, body.min_sites, caller.name)
    context.log.write_event("run offered", user=caller.name, run=run.id, sites=run.sites)
    return require_run(context, run.id)


def begin_run(id: RunIdPath, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    return _change_run_state(context, id, "begin", caller.name)


def pause_run(id: RunIdPath, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    return _change_run_state(context, id, "pause", caller.name)


def resume_run(id: RunIdPath, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    return _change_run_state(context, id, "resume", caller.name)


def stop_run(id: RunIdPath, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    return _change_run_state(context, id, "stop", caller.name)


def list_rounds(id: RunIdPath, context: ContextDep, after: Annotated[int, Query(ge=-1)] = -1) -> list[ResponseJson]:
    require_run(context, id)
    return [record.to_dict() for record in context.run_files.load_rounds(id) if record.round > after]


def get_results(id: RunIdPath, context: ContextDep) -> ResponseJson:
    return _serialize_file(context, id, RunResults)


def get_privacy(id: RunIdPath, context: ContextDep) -> ResponseJson:
    return _serialize_file(context, id, PrivacyRecord)


def list_sites(context: ContextDep) -> list[ResponseJson]:
    return context.serializers.list_sites()


def invite_site(
    name: SiteNamePath, body: InvitationRequest, caller: CurrentCaller, context: ContextDep
) -> ResponseJson:
    token, expires = context.store.accounts.create_invitation(name, body.hours, caller.name)
    context.log.write_event("invitation", user=caller.name, site=name, expires=format_time(expires))
    return {"token": format_invitation(token, context.authority.pem), "expires": format_time(expires)}


def remove_site(name: SiteNamePath, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    if not context.store.record_departure(name, caller.name, removed=True):
        raise HTTPException(404, f"no site {name!r} is enrolled")
    context.log.write_event("site removed", user=caller.name, site=name)
    return {"ok": True}


def list_approvals(context: ContextDep) -> list[ResponseJson]:
    return context.serializers.list_approvals()


def list_users(context: ContextDep) -> list[ResponseJson]:
    return [serialize_user(user) for user in context.store.accounts.list_users()]


def add_user(body: AddUserRequest, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    token = context.store.accounts.add_user(body.name, body.role, caller.name)
    if token is None:
        raise HTTPException(409, f"the user {body.name} exists; revoke it first, or choose another name")
    context.log.write_event("user added", user=caller.name, name=body.name, role=body.role)
    return {"name": body.name, "role": body.role, "token": token}


def revoke_user(name: SiteNamePath, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    outcome = context.store.accounts.revoke_user(name, caller.name)
    if outcome == "unknown":
        raise HTTPException(404, f"there is no user {name!r}")
    if outcome == "last lead":
        raise HTTPException(409, f"{name} is the only lead; add another one first")
    context.log.write_event("user revoked", user=caller.name, name=name)
    return {"ok": True}


def list_log_entries(context: ContextDep, last: Annotated[int, Query(ge=1, le=5000)] = 200) -> list[ResponseJson]:
    return context.log.read_last(last)


def require_run(context: ServiceContext, id: str) -> ResponseJson:
    run_view = context.serializers.find_run(id)
    if run_view is None:
        raise HTTPException(404, f"there is no run {id!r}")
    return run_view


def reject_credentials(
    context: ServiceContext, request: Request, action: str, actor: str, error: HTTPException
) -> NoReturn:
    """Records the failure and raises `error`, or 429 without a record after too many failures from one address."""
    address = context.client_address(request)
    if context.auth_failures.record_failure(address):
        raise HTTPException(429, "too many wrong tokens; wait five minutes", {"Retry-After": "300"})
    context.store.record_event(actor, action, address=address)
    raise error


def _change_run_state(context: ServiceContext, id: str, action: str, actor: str) -> ResponseJson:
    require_run(context, id)
    state = apply_run_action(context, id, action, actor).state
    context.log.write_event(f"run: {action}", user=actor, run=id, state=state)
    return require_run(context, id)


def _serialize_file(context: ServiceContext, id: str, record_type: type[FileRecord]) -> ResponseJson:
    require_run(context, id)
    if (record := context.run_files.load_record(id, record_type)) is None:
        raise HTTPException(404, f"{id} has no {record_type.FILE_NAME} yet")
    return record.to_dict()
