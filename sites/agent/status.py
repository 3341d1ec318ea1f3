"""HOME/status.json: what the agent last did and saw, for `hemofed site status`; a part of it goes with every beat."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pipeline.core.files import write_atomically

State = Literal["starting", "connected", "disconnected", "denied", "stopped"]
OUTWARD = ("state", "run", "flare", "disk_free_gb", "versions")  # no paths, no words that may name any
FILE = "status.json"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("hemofed", "nvflare", "torch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Status:
    site: str
    coordinator: str  # its name
    url: str
    state: State = "starting"
    problem: str = ""  # why it is not connected
    connected_since: str | None = None
    last_beat: str | None = None
    waiting: tuple[dict[str, str], ...] = ()  # offers that the officer should look at
    run: str | None = None  # that this site takes part in now
    flare: Literal["off", "running", "restarting"] = "off"
    disk_free_gb: float = 0.0
    models: tuple[str, ...] = ()  # fetched since the agent started
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=versions)
    pid: int = field(default_factory=os.getpid)
    at: str = field(default_factory=now)

    def outward(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in OUTWARD} | {"warnings": len(self.warnings)}

    def save(self, home: Path) -> None:
        write_atomically(home / FILE, json.dumps(asdict(self), indent=1).encode())


def read_status(home: Path) -> dict[str, Any] | None:
    """None: no agent ever ran here."""
    try:
        found = json.loads((home / FILE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def runs_now(status: dict[str, Any]) -> bool:
    """Whether the agent that wrote it is there."""
    import psutil

    try:
        written = datetime.fromisoformat(status["at"])
        process = psutil.Process(int(status["pid"]))
        # a number that was given to another process since belongs to a younger one
        return status["state"] != "stopped" and process.create_time() <= written.timestamp() + 1
    except (KeyError, ValueError, TypeError, psutil.Error):
        return False
