"""What other users of a machine, or of its network, can see of a federation: ports, arguments, logs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

ListeningSocket = tuple[int, str, int]  # process, address, port


def list_listening_sockets(process: psutil.Process) -> list[ListeningSocket]:
    connections = process.net_connections(kind="inet")
    return [(process.pid, str(c.laddr.ip), int(c.laddr.port)) for c in connections if c.status == psutil.CONN_LISTEN]


def reachable_from_outside(sockets: Iterable[ListeningSocket]) -> list[ListeningSocket]:
    """Those that other machines can reach."""
    return [socket for socket in sockets if not ipaddress.ip_address(socket[1].removeprefix("::ffff:")).is_loopback]


def assert_no_secret_exposed(
    folder: Path, argv: Iterable[Collection[str]], other_secrets: Collection[str] = ()
) -> None:
    """Neither the private keys and tokens below the folder nor `other_secrets` are in a log there or in an argument."""
    key_files = _find_files(folder, r"\.(key|pem|token)$")
    secrets = {line for file in key_files for line in _secret_lines(file.read_text())} | set(other_secrets)
    assert len(secrets) > 50
    logs = _find_files(folder, r"\.(log|txt|jsonl)(\.\d)?$")
    assert len(logs) > 5
    visible_text = "\n".join(
        [*(" ".join(parts) for parts in argv), *(file.read_text(errors="replace") for file in logs)]
    )
    assert "PRIVATE KEY" not in visible_text
    assert not [f"{secret[:8]}…" for secret in secrets if secret in visible_text]


def _find_files(folder: Path, pattern: str) -> list[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and re.search(pattern, file.name)]


def _secret_lines(text: str) -> list[str]:
    """No lines of certificates, and not the first line of a key, which is the same for all keys of a kind."""
    if "-----" in text and "PRIVATE" not in text:
        return []
    lines = [line for line in text.splitlines() if len(line) > 30 and "-----" not in line]
    return lines if len(lines) == 1 else lines[1:]
