"""A systemd unit for a site's agent: it may write its home and nothing else, gains no rights, and comes back by itself."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path

from pipeline.core.errors import BadRun

NAME = "hemofed-agent.service"
# GPUs stay reachable (no PrivateDevices), and compilers of kernels may map memory (no MemoryDenyWriteExecute)
TEXT = """\
[Unit]
Description=hemofed agent of {site}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=simple
User={user}
ExecStart={command} site join {home}
# HTTPS_PROXY=http://proxy.example.org:3128 and the like, readable by root alone
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


def unit_text(
    home: Path, site: str, user: str | None = None, command: Path | None = None, cores: int | None = None
) -> str:
    """`command`: the `hemofed` to run, the one beside this Python if not given."""
    place = home.resolve()
    text = TEXT.format(
        site=site,
        user=user or getpass.getuser(),
        command=_quoted(command or Path(sys.executable).parent / "hemofed"),
        home=_quoted(place),
        home_plain=_plain(place),
        cache=_quoted_text(f"XDG_CACHE_HOME={place / 'cache'}"),
        cores="" if cores is None else f"CPUQuota={100 * cores}%",
    )
    return text.replace("\n\nNoNew", "\nNoNew")  # where no cores are named


def _plain(path: Path) -> str:
    """systemd reads % as a sign of its own, and ends a value with the line."""
    if any(ord(c) < 32 or c in "\"'\\$" for c in str(path)):
        raise BadRun(f"{str(path)!r} has characters that a systemd unit cannot hold; move the home")
    return str(path).replace("%", "%%")


def _quoted(path: Path) -> str:
    plain = _plain(path)
    return f'"{plain}"' if " " in plain else plain


def _quoted_text(text: str) -> str:
    name, _, value = text.partition("=")
    return f'"{name}={_plain(Path(value))}"'
