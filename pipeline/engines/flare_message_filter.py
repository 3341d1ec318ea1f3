"""Filters the messages that sites send through FLARE's server: only to the server and its jobs, only what a run needs.

FLARE lets every certified node send any message to any other node, so a site could read another's files or end its work.
The filter decides by the common name of the certificate, which TLS has verified; the sender sets the headers itself.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

from nvflare.apis.event_type import EventType
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_context import FLContext
from nvflare.apis.fl_exception import UnsafeComponentError
from nvflare.fuel.f3.cellnet.core_cell import make_reply
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey, MessageType, ReturnCode
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamHeaderKey

from pipeline.flare.constants import COORDINATOR_HOME_ENV
from pipeline.flare.provisioning import ADMIN_NAME, SERVER_NAME

SERVER_CELL = "server"
MEMBERSHIP_REFRESH_SECONDS = 2.0  # between two reads of the sites that have left
# (channel, topic) of requests to the server itself, and to the process of a run
ALLOWED_TO_SERVER = {
    ("task", topic) for topic in ("challenge", "register", "quit", "heart_beat", "report_job_failure")
} | {
    ("cellnet.channel", "bye"),
    ("credential_manager", "key_exchange"),
}
ALLOWED_TO_RUN = {("server_command", "get_task"), ("server_command", "submit_update"), ("cellnet.channel", "bye")}
AUX_CHANNEL, RETURN_CHANNEL = "aux_communication", "return_only"


class FlareMessageFilter(FLComponent):  # type: ignore[misc]
    """Component in the startup kit of FLARE's server."""

    def __init__(self) -> None:
        super().__init__()
        self._departed_sites: frozenset[str] = frozenset()
        self._refreshed_at = -MEMBERSHIP_REFRESH_SECONDS

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        try:
            fl_ctx.get_engine().get_cell().core_cell.add_incoming_filter("*", "*", self._filter_message)
        except Exception as error:  # the only exception type that stops FLARE's server at its start
            raise UnsafeComponentError(f"the message filter between the sites failed: {error!r}") from error

    def _filter_message(self, message: Message) -> Message | None:
        name = message.get_prop(MessagePropKey.COMMON_NAME)
        if name in (None, SERVER_NAME, ADMIN_NAME):
            return None
        has_left = name in self._load_departed_sites()
        reason = "it has left, or was removed" if has_left else rejection_reason(str(name), message)
        if not reason:
            return None
        self.logger.warning(f"{name}: refused: {reason}")
        return make_reply(ReturnCode.UNAUTHENTICATED, reason)

    def _load_departed_sites(self) -> frozenset[str]:
        """Sites that have left; their certificates stay valid for years."""
        if time.monotonic() - self._refreshed_at > MEMBERSHIP_REFRESH_SECONDS:
            self._refreshed_at = time.monotonic()
            with contextlib.closing(
                sqlite3.connect(Path(os.environ[COORDINATOR_HOME_ENV], "hemofed.db"), timeout=5.0)
            ) as database:
                records = database.execute("SELECT name FROM sites WHERE left IS NOT NULL").fetchall()
            self._departed_sites = frozenset(name for (name,) in records)
        return self._departed_sites


def rejection_reason(name: str, message: Message) -> str:
    """Why a message from this site's connection is rejected; empty if it passes."""

    def header(key: str) -> Any:
        return message.get_header(key, "")

    origin, target = str(header(MessageHeaderKey.ORIGIN)), str(header(MessageHeaderKey.DESTINATION))
    if origin.partition(".")[0] != name:
        return f"a message with the origin {origin}"
    if target.partition(".")[0] != SERVER_CELL:
        return f"a message to {target}; sites may only send to the coordinator"
    if header(MessageHeaderKey.MSG_TYPE) != MessageType.REQ:
        return ""
    route = header(MessageHeaderKey.CHANNEL), header(MessageHeaderKey.TOPIC)
    if route[0] == STREAM_CHANNEL:
        if header(StreamHeaderKey.ERROR_TYPE) == "BlobSizeError":
            return "a BlobSizeError, at which FLARE would end the run"
        if route[1] != STREAM_DATA_TOPIC:
            return ""
        route = header(StreamHeaderKey.CHANNEL), header(StreamHeaderKey.TOPIC)
    if route[0] == RETURN_CHANNEL or route in (ALLOWED_TO_SERVER if target == SERVER_CELL else ALLOWED_TO_RUN):
        return ""
    return "" if route[0] == AUX_CHANNEL and target != SERVER_CELL else f"{route[1]} on {route[0]} to {target}"
