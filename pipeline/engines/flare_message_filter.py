"""What a site may say through FLARE's server: to the server and to its runs, and of that only what a run needs.

FLARE lets whoever is certified speak to every other node, about everything: a hospital could read another's files, or
end its work. Here the certificate's name, which TLS has proved, decides; headers are the sender's own words.
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

from pipeline.flare.constants import HOME
from pipeline.flare.provisioning import ADMIN, SERVER

ROOT = "server"
EVERY = 2.0  # seconds between two looks at who has left
# (channel, topic) of requests: to the server itself, and to the process of a run
TO_SERVER = {("task", topic) for topic in ("challenge", "register", "quit", "heart_beat", "report_job_failure")} | {
    ("cellnet.channel", "bye"),
    ("credential_manager", "key_exchange"),
}
TO_RUN = {("server_command", "get_task"), ("server_command", "submit_update"), ("cellnet.channel", "bye")}
ASIDE, ANSWER = "aux_communication", "return_only"


class Wall(FLComponent):  # type: ignore[misc]
    """A component of the server's kit."""

    def __init__(self) -> None:
        super().__init__()
        self._left: frozenset[str] = frozenset()
        self._looked = -EVERY

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        if event_type != EventType.SYSTEM_BOOTSTRAP:
            return
        try:
            fl_ctx.get_engine().get_cell().core_cell.add_incoming_filter("*", "*", self._let_through)
        except Exception as error:  # the one kind at which FLARE's server does not start
            raise UnsafeComponentError(f"no wall between the sites: {error!r}") from error

    def _let_through(self, message: Message) -> Message | None:
        name = message.get_prop(MessagePropKey.COMMON_NAME)
        if name in (None, SERVER, ADMIN):
            return None
        why = "it has left, or was removed" if name in self._gone() else wrong(str(name), message)
        if not why:
            return None
        self.logger.warning(f"{name}: refused: {why}")
        return make_reply(ReturnCode.UNAUTHENTICATED, why)

    def _gone(self) -> frozenset[str]:
        """Their certificates are good for years; their membership is not."""
        if time.monotonic() - self._looked > EVERY:
            self._looked = time.monotonic()
            with contextlib.closing(sqlite3.connect(Path(os.environ[HOME], "hemofed.db"), timeout=5.0)) as rows:
                found = rows.execute("SELECT name FROM sites WHERE left IS NOT NULL").fetchall()
            self._left = frozenset(name for (name,) in found)
        return self._left


def wrong(name: str, message: Message) -> str:
    """Why a message that came over this site's connection goes no further; empty if it may."""

    def said(key: str) -> Any:
        return message.get_header(key, "")

    origin, target = str(said(MessageHeaderKey.ORIGIN)), str(said(MessageHeaderKey.DESTINATION))
    if origin.partition(".")[0] != name:
        return f"a message in the name of {origin}"
    if target.partition(".")[0] != ROOT:
        return f"a message to {target}; sites speak to the coordinator alone"
    if said(MessageHeaderKey.MSG_TYPE) != MessageType.REQ:
        return ""
    about = said(MessageHeaderKey.CHANNEL), said(MessageHeaderKey.TOPIC)
    if about[0] == STREAM_CHANNEL:
        if said(StreamHeaderKey.ERROR_TYPE) == "BlobSizeError":
            return "it says that it was sent too much, at which FLARE would end the run"
        if about[1] != STREAM_DATA_TOPIC:
            return ""
        about = said(StreamHeaderKey.CHANNEL), said(StreamHeaderKey.TOPIC)
    if about[0] == ANSWER or about in (TO_SERVER if target == ROOT else TO_RUN):
        return ""
    return "" if about[0] == ASIDE and target != ROOT else f"{about[1]} on {about[0]} to {target}"
