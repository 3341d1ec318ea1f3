"""Objects that all routes of the service share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from pipeline.ops.certificates import CertificateAuthority
from pipeline.ops.json_log import JsonLog
from pipeline.service.runtime.run_files import RunFiles
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.service.web.middleware import AuthFailureLimiter
from pipeline.service.web.serializers import ApiSerializers
from pipeline.service.web.server_sent_events import EventStream

if TYPE_CHECKING:
    from pipeline.study.schema import Study

RegisteredSites = Callable[[], set[str] | None]  # sites known to FLARE's server; None if it does not answer
StudyCheck = Callable[["Study"], None]  # raises if the study can only be simulated
AddressResolver = Callable[[str, int], str]  # the TLS router's host and port -> the client's address


@dataclass(frozen=True)
class ServiceContext:
    home: CoordinatorHome
    store: CoordinatorStore
    log: JsonLog
    authority: CertificateAuthority
    public_key: str  # of the coordinator, hex
    run_files: RunFiles
    serializers: ApiSerializers
    event_stream: EventStream
    auth_failures: AuthFailureLimiter
    registered_sites: RegisteredSites
    check_study: StudyCheck
    resolve_address: AddressResolver

    def client_address(self, request: Request) -> str:
        return self.resolve_address(request.client.host, request.client.port) if request.client else "unknown"


def get_context(request: Request) -> ServiceContext:
    context: ServiceContext = request.app.state.context
    return context


ContextDep = Annotated[ServiceContext, Depends(get_context)]
