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

Want = Literal["run", "pause", "stop", "regroup"]
OFTEN = 0.5  # seconds between two writes that only tell progress


@dataclass
class Live:
    folder: Path
    rounds: int
    round: int = 0
    phase: str = "starting"
    asked: list[SiteId] = field(default_factory=list)
    answered: list[SiteId] = field(default_factory=list)
    missed: dict[SiteId, str] = field(default_factory=dict)
    lost: list[SiteId] = field(default_factory=list)  # not heard of; a regrouped job takes them in again
    _written: float = 0.0

    def tell(self, at_once: bool = True) -> None:
        now = time.monotonic()
        if not at_once and now - self._written < OFTEN:
            return
        self._written = now
        told = {k: v for k, v in vars(self).items() if k not in ("folder", "_written")}
        whole = {"at": datetime.now(UTC).isoformat(timespec="milliseconds"), "pid": os.getpid(), **told}
        write_atomically(self.folder / "live.json", json.dumps(whole).encode())


def wanted(folder: Path) -> Want:
    """`run` where nothing, or nothing readable, is said."""
    try:
        want = json.loads((folder / "control.json").read_text("utf-8"))["want"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return "run"
    return want if want in ("pause", "stop", "regroup") else "run"


def want(folder: Path, what: Want) -> None:
    write_atomically(folder / "control.json", json.dumps({"want": what}).encode())


def read_live(folder: Path) -> dict[str, Any] | None:
    try:
        told = json.loads((folder / "live.json").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return told if isinstance(told, dict) else None
