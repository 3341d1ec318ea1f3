"""Routes of the sites' agents: enrolment, heartbeat, models of finished runs, leaving."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from fastapi import HTTPException, Request
from fastapi.responses import FileResponse
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, field_validator

from pipeline.core.errors import KeyFileError
from pipeline.service.runtime.run_states import TERMINAL_STATES
from pipeline.service.storage.accounts import INVALID_INVITATION_TEXT, EnrolmentRefusal, EnrolmentRequest
from pipeline.service.web.auth import CurrentCaller
from pipeline.service.web.context import ContextDep, ServiceContext
from pipeline.service.web.routes_dashboard import RunIdPath, TokenText, reject_credentials
from pipeline.service.web.routes_downloads import BINARY_TYPE
from pipeline.service.web.serializers import ResponseJson, format_time
from pipeline.study.offer import HexDigest32, RunName, SiteName
from privacy.ledger import keys

MAX_STATUS_BYTES = 64_000  # as JSON
VersionText = Annotated[str, StringConstraints(max_length=40)]


class AgentPayload(BaseModel):
    """Unknown fields, which an agent of a later version may send, are ignored."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class EnrolmentPayload(AgentPayload):
    token: TokenText
    site: SiteName
    key: HexDigest32
    officer: HexDigest32
    csr: str = Field(max_length=20_000)
    version: VersionText
    proof: str = Field(pattern=r"^[0-9a-f]{128}$")  # signature of `signed_statement`

    def signed_statement(self) -> dict[str, str]:
        """What the agent signs to prove that it holds its key, bound to this name, invitation and CSR."""
        return {"site": self.site, "token_sha256": _sha256_hex(self.token), "csr_sha256": _sha256_hex(self.csr)}


class ApprovalNotice(AgentPayload):
    run: RunName
    offer: HexDigest32
    at: AwareDatetime
    expires: AwareDatetime | None = None
    officer: str = Field("", max_length=80)


class RevocationNotice(AgentPayload):
    run: RunName
    offer: HexDigest32
    at: AwareDatetime


class HeartbeatPayload(AgentPayload):
    version: VersionText
    status: dict[str, Any] = {}
    approvals: list[ApprovalNotice] = Field([], max_length=1000)
    revoked: list[RevocationNotice] = Field([], max_length=1000)
    held_offers: list[HexDigest32] = Field([], max_length=10_000)  # digests of offers that need not be sent again

    @field_validator("status")
    @classmethod
    def _check_status_size(cls, status: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(status)) > MAX_STATUS_BYTES:
            raise ValueError(f"the status is too large; at most {MAX_STATUS_BYTES} bytes are allowed")
        return status


def enrol_site(body: EnrolmentPayload, request: Request, context: ContextDep) -> ResponseJson:
    """Does everything that can fail before it uses the invitation up."""
    accounts, refusal_action = context.store.accounts, "enrolment refused"
    if not accounts.is_invited(body.token, body.site):
        error = HTTPException(403, INVALID_INVITATION_TEXT)
        reject_credentials(context, request, refusal_action, body.site, error)
    if not keys.is_valid_signature(body.key, "possession", body.signed_statement(), body.proof):
        text = "the proof is not signed with the agent's key; enrol with `hemofed site join`"
        reject_credentials(context, request, refusal_action, body.site, HTTPException(403, text))
    try:
        certificate = context.authority.sign_request(body.csr, body.site)
    except KeyFileError as error:
        reject_credentials(context, request, refusal_action, body.site, HTTPException(403, str(error)))
    credential = accounts.enrol_site(body.token, EnrolmentRequest(body.site, body.key, body.officer, body.version))
    if isinstance(credential, EnrolmentRefusal):
        reject_credentials(context, request, refusal_action, body.site, HTTPException(403, credential.remedy))
    context.log.write_event("enrolled", site=body.site, address=context.client_address(request), version=body.version)
    home = context.home
    coordinator = {"name": home.name, "key": context.public_key, "host": home.host, "port": home.port}
    return {
        "credential": credential,
        "certificate": certificate,
        "ca": context.authority.pem,
        "coordinator": coordinator,
    }


def handle_heartbeat(body: HeartbeatPayload, caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    """Records status, approvals and revocations; returns new offers, the states of the site's runs, and their models."""
    store = context.store
    store.record_heartbeat(caller.name, body.status, body.version)
    known_approvals = {(row.run, row.approved_at) for row in store.list_approvals() if row.site == caller.name}
    for approval in body.approvals:
        if (approval.run, approval.at) not in known_approvals:
            is_accepted = store.record_approval(
                approval.run, caller.name, approval.offer, approval.at, approval.expires, approval.officer
            )
            log_event = "approved" if is_accepted else "approval ignored: it is for a different offer"
            context.log.write_event(log_event, "info" if is_accepted else "warning", site=caller.name, run=approval.run)
    site_runs = [run for run in store.list_runs() if caller.name in run.sites]
    digests = {run.id: run.digest for run in site_runs}
    for revocation in body.revoked:
        if digests.get(revocation.run) == revocation.offer:
            store.record_revocation(revocation.run, caller.name, revocation.at)
    new_runs = [run for run in site_runs if run.state not in TERMINAL_STATES and run.digest not in body.held_offers]
    approved_runs = _approved_runs(context, caller.name)
    registered_sites = context.registered_sites()
    models_by_run = {
        run.id: context.run_files.models_for_site(run.id, caller.name) if run.id in approved_runs else []
        for run in site_runs
    }
    return {
        "offers": [context.run_files.load_offer(run.id) for run in new_runs],
        "runs": [{"id": run.id, "state": run.state, "models": models_by_run[run.id]} for run in site_runs],
        "time": format_time(store.clock()),
        "registered": None if registered_sites is None else caller.name in registered_sites,
    }


def download_model(id: RunIdPath, name: str, caller: CurrentCaller, context: ContextDep) -> FileResponse:
    if id not in _approved_runs(context, caller.name) or name not in context.run_files.models_for_site(id, caller.name):
        raise HTTPException(404, f"{id} has no model {name!r} for {caller.name}")
    return FileResponse(context.run_files.model_path(id, name), media_type=BINARY_TYPE)


def leave_federation(caller: CurrentCaller, context: ContextDep) -> ResponseJson:
    context.store.record_departure(caller.name)
    context.log.write_event("site left", site=caller.name)
    return {"ok": True}


def _approved_runs(context: ServiceContext, site: str) -> set[str]:
    """Runs that the site's officer has approved, even if the approval has expired or was revoked since."""
    return {row.run for row in context.store.list_approvals() if row.site == site}


def _sha256_hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
