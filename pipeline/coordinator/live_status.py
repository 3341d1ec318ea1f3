"""RUN/live.json and RUN/control.json: what the process of a run is doing now, and what it is told to do.

The service reads one and writes the other; both survive whichever process is killed.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pipeline.core.files import write_atomically
from pipeline.protocol.messages import SiteId

DesiredState = Literal["run", "pause", "stop", "regroup"]
MIN_WRITE_SECONDS = 0.5  # seconds between two writes that only tell progress


@dataclass
class LiveStatus:
    folder: Path
    rounds: int
    round: int = 0
    phase: str = "starting"
    asked: list[SiteId] = field(default_factory=list)
    answered: list[SiteId] = field(default_factory=list)
    missed: dict[SiteId, str] = field(default_factory=dict)
    lost: list[SiteId] = field(default_factory=list)  # not heard of; a regrouped job takes them in again
    _written: float = 0.0

    def write(self, force: bool = True) -> None:
        now = time.monotonic()
        if not force and now - self._written < MIN_WRITE_SECONDS:
            return
        self._written = now
        fields = {k: v for k, v in vars(self).items() if k not in ("folder", "_written")}
        record = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "pid": os.getpid(), **fields}
        write_atomically(self.folder / "live.json", json.dumps(record).encode())


def requested_state(folder: Path) -> DesiredState:
    """`run` where nothing, or nothing readable, is said."""
    try:
        state = json.loads((folder / "control.json").read_text("utf-8"))["want"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return "run"
    return state if state in ("pause", "stop", "regroup") else "run"


def request_state(folder: Path, state: DesiredState) -> None:
    write_atomically(folder / "control.json", json.dumps({"want": state}).encode())


def read_live_status(folder: Path) -> dict[str, Any] | None:
    try:
        record = json.loads((folder / "live.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return record if isinstance(record, dict) else None
