"""HOME/status.json: the agent's status for `hemofed site status`. Heartbeats contain REPORTED_FIELDS of it."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from pipeline.core.files import write_atomically

AgentState = Literal["starting", "connected", "disconnected", "denied", "stopped"]
REPORTED_FIELDS = ("state", "run", "flare", "disk_free_gb", "versions")  # no paths, and no texts that may contain paths
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
    coordinator: str  # name
    url: str
    state: AgentState = "starting"
    problem: str = ""  # why the agent is not connected
    connected_since: str | None = None
    last_heartbeat: str | None = None
    pending_offers: tuple[dict[str, str], ...] = ()  # without an approval
    run: str | None = None  # in which this site takes part now
    flare: Literal["off", "running", "restarting"] = "off"
    disk_free_gb: float = 0.0
    models: tuple[str, ...] = ()  # downloaded since the agent started
    warnings: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=installed_versions)
    pid: int = field(default_factory=os.getpid)
    written_at: str = field(default_factory=utc_timestamp)

    def reported_fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in REPORTED_FIELDS} | {"warnings": len(self.warnings)}

    def save(self, home: Path) -> None:
        write_atomically(home / STATUS_FILE, json.dumps(asdict(self), indent=1).encode())


def read_status(home: Path) -> AgentStatus | None:
    """None if no agent has ever run for this home."""
    try:
        return TypeAdapter(AgentStatus).validate_json((home / STATUS_FILE).read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def delete_status(home: Path) -> None:
    (home / STATUS_FILE).unlink(missing_ok=True)


def is_agent_running(status: AgentStatus) -> bool:
    """Whether the agent that wrote the status still runs."""
    import psutil

    try:
        written_at = datetime.fromisoformat(status.written_at)
        process = psutil.Process(status.pid)
        # a reused process id belongs to a process that started later
        return status.state != "stopped" and process.create_time() <= written_at.timestamp() + 1
    except (ValueError, psutil.Error):
        return False
