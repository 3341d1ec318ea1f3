"""What sites' agents say and ask: enrolment, the beat, models of finished runs, farewell."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from fastapi import HTTPException, Request
from fastapi.responses import FileResponse
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, field_validator

from pipeline.core.errors import BadKey
from pipeline.service.runtime.run_states import OVER
from pipeline.service.storage.accounts import Newcomer, NotEnrolled
from pipeline.service.web.auth import Who
from pipeline.service.web.context import Held, Parts
from pipeline.service.web.routes_dashboard import RunId, Token, refuse
from pipeline.service.web.routes_downloads import BYTES
from pipeline.service.web.serializers import Shown, iso
from pipeline.study.offer import Hex32, RunName, SiteName
from privacy.ledger import keys

LONGEST_STATUS = 64_000  # bytes of JSON
Version = Annotated[str, StringConstraints(max_length=40)]


class Words(BaseModel):
    """An agent of a later version may say more; it is not heard."""

    model_config = ConfigDict(extra="ignore", hide_input_in_errors=True)


class Enrol(Words):
    token: Token
    site: SiteName
    key: Hex32
    officer: Hex32
    csr: str = Field(max_length=20_000)
    version: Version
    proof: str = Field(pattern=r"^[0-9a-f]{128}$")

    def statement(self) -> dict[str, str]:
        """What the agent signs: that it holds its key, for this name, invitation and request."""
        return {"site": self.site, "token_sha256": _sha(self.token), "csr_sha256": _sha(self.csr)}


class Given(Words):
    run: RunName
    offer: Hex32
    at: AwareDatetime
    expires: AwareDatetime | None = None
    officer: str = Field("", max_length=80)


class Withdrawn(Words):
    run: RunName
    offer: Hex32
    at: AwareDatetime


class Beat(Words):
    version: Version
    status: dict[str, Any] = {}
    approvals: list[Given] = Field([], max_length=1000)
    withdrawn: list[Withdrawn] = Field([], max_length=1000)
    have: list[Hex32] = Field([], max_length=10_000)  # offers that the agent holds and need not be sent again

    @field_validator("status")
    @classmethod
    def _short(cls, status: dict[str, Any]) -> dict[str, Any]:
        if len(json.dumps(status)) > LONGEST_STATUS:
            raise ValueError(f"a status may have {LONGEST_STATUS} bytes")
        return status


def enrol(body: Enrol, request: Request, parts: Held) -> Shown:
    """Whatever can fail is done before the invitation is used up."""
    accounts, wrong = parts.store.accounts, "enrolment refused"
    if not accounts.invited(body.token, body.site):
        text = "the invitation is wrong, used, expired or for another name; ask the lead for a new one"
        refuse(parts, request, wrong, body.site, HTTPException(403, text))
    if not keys.verified(body.key, "possession", body.statement(), body.proof):
        text = "the proof is not signed by the agent's key; let `hemofed site join` make it"
        refuse(parts, request, wrong, body.site, HTTPException(403, text))
    try:
        certificate = parts.authority.sign_request(body.csr, body.site)
    except BadKey as error:
        refuse(parts, request, wrong, body.site, HTTPException(403, str(error)))
    credential = accounts.enrol(body.token, Newcomer(body.site, body.key, body.officer, body.version))
    if isinstance(credential, NotEnrolled):
        refuse(parts, request, wrong, body.site, HTTPException(403, credential.cure))
    parts.log.event("enrolled", site=body.site, address=parts.address(request), version=body.version)
    home = parts.home
    own = {"name": home.name, "key": parts.public, "host": home.host, "port": home.port}
    return {
        "credential": credential,
        "certificate": certificate,
        "ca": parts.authority.pem,
        "coordinator": own,
    }


def beat(body: Beat, who: Who, parts: Held) -> Shown:
    store = parts.store
    store.seen(who.name, body.status, body.version)
    known = {(row.run, row.at) for row in store.approvals() if row.site == who.name}
    for given in body.approvals:
        if (given.run, given.at) not in known:
            took = store.approve(given.run, who.name, given.offer, given.at, given.expires, given.officer)
            said = "approved" if took else "approval ignored: it is for another offer"
            parts.log.event(said, "info" if took else "warning", site=who.name, run=given.run)
    mine = [run for run in store.runs() if who.name in run.sites]
    digests = {run.id: run.digest for run in mine}
    for back in body.withdrawn:
        if digests.get(back.run) == back.offer:
            store.withdraw(back.run, who.name, back.at)
    fresh = [run for run in mine if run.state not in OVER and run.digest not in body.have]
    took_part = _took_part(parts, who.name)
    there = parts.registered()
    may = {run.id: parts.folders.models_of(run.id, who.name) if run.id in took_part else [] for run in mine}
    return {
        "offers": [parts.folders.json(run.id, "offer.json") for run in fresh],
        "runs": [{"id": run.id, "state": run.state, "models": may[run.id]} for run in mine],
        "time": iso(store.clock()),
        "registered": None if there is None else who.name in there,
    }


def model(id: RunId, name: str, who: Who, parts: Held) -> FileResponse:
    if id not in _took_part(parts, who.name) or name not in parts.folders.models_of(id, who.name):
        raise HTTPException(404, f"{id} has no model {name!r} for {who.name}")
    return FileResponse(parts.folders.model(id, name), media_type=BYTES)


def leave(who: Who, parts: Held) -> Shown:
    parts.store.leave(who.name)
    parts.log.event("site left", site=who.name)
    return {"ok": True}


def _took_part(parts: Parts, site: str) -> set[str]:
    """Runs that its officer approved, even if that has lapsed since."""
    return {row.run for row in parts.store.approvals() if row.site == site}


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
