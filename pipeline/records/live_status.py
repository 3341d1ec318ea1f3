"""RUN/live.json: the present status of a run across hospitals. The run's process writes it, the service reads it."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

from pipeline.protocol.messages import ClientFailure, SiteId
from pipeline.records.base import FileRecord

MIN_WRITE_SECONDS = 0.5  # between two writes that only report progress


class LiveStatus(FileRecord):
    FILE_NAME: ClassVar[str] = "live.json"

    at: str  # ISO 8601
    pid: int
    rounds: int
    round: int
    phase: str
    requested: tuple[SiteId, ...]  # sites that were sent the message of this phase
    replied: tuple[SiteId, ...]
    failures: Mapping[SiteId, ClientFailure]
    unreachable: tuple[SiteId, ...]  # sites without a heartbeat; a regrouped job includes them again


@dataclass
class LiveStatusWriter:
    """The status as it changes; `write` stores it."""

    folder: Path
    rounds: int
    round: int = 0
    phase: str = "starting"
    requested: list[SiteId] = field(default_factory=list)
    replied: list[SiteId] = field(default_factory=list)
    failures: dict[SiteId, ClientFailure] = field(default_factory=dict)
    unreachable: list[SiteId] = field(default_factory=list)
    _written: float = 0.0

    def write(self, force: bool = True) -> None:
        now = time.monotonic()
        if not force and now - self._written < MIN_WRITE_SECONDS:
            return
        self._written = now
        LiveStatus(
            at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            pid=os.getpid(),
            rounds=self.rounds,
            round=self.round,
            phase=self.phase,
            requested=tuple(self.requested),
            replied=tuple(self.replied),
            failures=self.failures,
            unreachable=tuple(self.unreachable),
        ).write(self.folder)
