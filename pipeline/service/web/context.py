"""What the service's routes share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request

from pipeline.ops.certificates import Authority
from pipeline.ops.json_log import Log
from pipeline.service.runtime.run_files import Folders
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import Store
from pipeline.service.web.middleware import Failures
from pipeline.service.web.serializers import Views
from pipeline.service.web.server_sent_events import Streams

if TYPE_CHECKING:
    from pipeline.study.schema import Study

Registered = Callable[[], set[str] | None]  # sites that FLARE's server knows; None: it cannot be asked just now
Check = Callable[["Study"], None]  # refuses what hospitals cannot run
Origin = Callable[[str, int], str]  # the far end of a connection that came through the front


@dataclass(frozen=True)
class Parts:
    home: CoordinatorHome
    store: Store
    log: Log
    authority: Authority
    public: str  # the coordinator's public key
    folders: Folders
    views: Views
    streams: Streams
    failures: Failures
    registered: Registered
    check: Check
    origin: Origin

    def address(self, request: Request) -> str:
        return self.origin(request.client.host, request.client.port) if request.client else "unknown"


def parts(request: Request) -> Parts:
    found: Parts = request.app.state.parts
    return found


Held = Annotated[Parts, Depends(parts)]
