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

AgentState = Literal["starting", "connected", "disconnected", "denied", "stopped"]
REPORTED_FIELDS = ("state", "run", "flare", "disk_free_gb", "versions")  # no paths, no words that may name any
STATUS_FILE = "status.json"


def installed_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in ("hemofed", "nvflare", "torch"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def utc_timestamp() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class AgentStatus:
    site: str
    coordinator: str  # its name
    url: str
    state: AgentState = "starting"
    problem: str = ""  # why it is not connected
    connected_since: str | None = None
    last_heartbeat: str | None = None
    pending_offers: tuple[dict[str, str], ...] = ()  # offers that the officer should look at
    run: str | None = None  # that this site takes part in now
    flare: Literal["off", "running", "restarting"] = "off"
    disk_free_gb: float = 0.0
    models: tuple[str, ...] = ()  # fetched since the agent started
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=installed_versions)
    pid: int = field(default_factory=os.getpid)
    written_at: str = field(default_factory=utc_timestamp)

    def reported_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in REPORTED_FIELDS} | {"warnings": len(self.warnings)}

    def save(self, home: Path) -> None:
        write_atomically(home / STATUS_FILE, json.dumps(asdict(self), indent=1).encode())


def read_status(home: Path) -> dict[str, Any] | None:
    """None: no agent ever ran here."""
    try:
        status = json.loads((home / STATUS_FILE).read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def is_agent_running(status: dict[str, Any]) -> bool:
    """Whether the agent that wrote it is there."""
    import psutil

    try:
        written_at = datetime.fromisoformat(status["at"])
        process = psutil.Process(int(status["pid"]))
        # a number that was given to another process since belongs to a younger one
        return status["state"] != "stopped" and process.create_time() <= written_at.timestamp() + 1
    except (KeyError, ValueError, TypeError, psutil.Error):
        return False
