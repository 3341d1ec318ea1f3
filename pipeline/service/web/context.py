"""What the service's routes share."""

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

RegisteredSites = Callable[[], set[str] | None]  # sites that FLARE's server knows; None: it cannot be asked just now
StudyCheck = Callable[["Study"], None]  # refuses what hospitals cannot run
AddressResolver = Callable[[str, int], str]  # the far end of a connection that came through the front


@dataclass(frozen=True)
class ServiceContext:
    home: CoordinatorHome
    store: CoordinatorStore
    log: JsonLog
    authority: CertificateAuthority
    public_key: str  # the coordinator's public key
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
