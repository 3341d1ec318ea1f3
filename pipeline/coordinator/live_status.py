"""RUN/live.json, the present status of a run, and RUN/control.json, the state that its operators request.

The run's process writes the first and reads the second, the service the reverse; both survive a kill of either process.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pipeline.core.files import write_atomically
from pipeline.protocol.messages import ClientFailure, SiteId

DesiredState = Literal["run", "pause", "stop", "regroup"]
MIN_WRITE_SECONDS = 0.5  # between two writes that only report progress


@dataclass
class LiveStatus:
    folder: Path
    rounds: int
    round: int = 0
    phase: str = "starting"
    asked: list[SiteId] = field(default_factory=list)
    answered: list[SiteId] = field(default_factory=list)
    missed: dict[SiteId, ClientFailure] = field(default_factory=dict)
    lost: list[SiteId] = field(default_factory=list)  # sites without a heartbeat; a regrouped job includes them again
    _written: float = 0.0

    def write(self, force: bool = True) -> None:
        now = time.monotonic()
        if not force and now - self._written < MIN_WRITE_SECONDS:
            return
        self._written = now
        fields = {k: v for k, v in vars(self).items() if k not in ("folder", "_written")}
        fields["missed"] = {site: asdict(failure) for site, failure in self.missed.items()}
        record = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "pid": os.getpid(), **fields}
        write_atomically(self.folder / "live.json", json.dumps(record).encode())


def requested_state(folder: Path) -> DesiredState:
    """`run` if the file is missing or invalid."""
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
