"""A systemd unit for the site's agent: write access to its home only, no new privileges, automatic restart."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

from pipeline.core.errors import RunFolderError

UNIT_NAME = "hemofed-agent.service"
# without PrivateDevices, because of GPUs; without MemoryDenyWriteExecute, because of kernel compilers
UNIT_TEMPLATE = """\
[Unit]
Description=hemofed agent of {site}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=simple
User={user}
ExecStart={command} site join {home}
# for example HTTPS_PROXY=http://proxy.example.org:3128; let only root read this file
EnvironmentFile=-/etc/hemofed/agent.env
Environment={cache}
WorkingDirectory={home_plain}
Restart=always
RestartSec=5
TimeoutStopSec=60
KillMode=mixed
UMask=0077
{cores}
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
ReadWritePaths={home}
PrivateTmp=yes
ProtectProc=invisible
ProtectClock=yes
ProtectHostname=yes
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
RemoveIPC=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy=multi-user.target
"""


def render_unit(
    home: Path, site: str, user: str | None = None, command: Path | None = None, max_cores: int | None = None
) -> str:
    """`command`: path of `hemofed`; None: the one in the folder of this Python."""
    home_path = home.resolve()
    text = UNIT_TEMPLATE.format(
        site=site,
        user=user or getpass.getuser(),
        command=_quote_path(command or Path(sys.executable).parent / "hemofed"),
        home=_quote_path(home_path),
        home_plain=_escape_path(home_path),
        cache=_quote_assignment(f"XDG_CACHE_HOME={home_path / 'cache'}"),
        cores="" if max_cores is None else f"CPUQuota={100 * max_cores}%",
    )
    return text.replace("\n\nNoNew", "\nNoNew")  # without CPUQuota


def _escape_path(path: Path) -> str:
    """systemd reads % as a specifier, and a line break ends a value."""
    if any(ord(c) < 32 or c in "\"'\\$" for c in str(path)):
        raise RunFolderError(f"{str(path)!r} has characters that a systemd unit cannot contain; move the home")
    return str(path).replace("%", "%%")


def _quote_path(path: Path) -> str:
    escaped = _escape_path(path)
    return f'"{escaped}"' if " " in escaped else escaped


def _quote_assignment(text: str) -> str:
    name, _, value = text.partition("=")
    return f'"{name}={_escape_path(Path(value))}"'
