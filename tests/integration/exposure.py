"""What anybody on a machine, or on its network, could see of a federation: ports, arguments, logs."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import psutil

Listening = tuple[int, str, int]  # process, address, port


def listening_of(process: psutil.Process) -> list[Listening]:
    found = process.net_connections(kind="inet")
    return [(process.pid, str(c.laddr.ip), int(c.laddr.port)) for c in found if c.status == psutil.CONN_LISTEN]


def outside(listening: Iterable[Listening]) -> list[Listening]:
    """Those that other machines could reach."""
    return [one for one in listening if not ipaddress.ip_address(one[1].removeprefix("::ffff:")).is_loopback]


def betrays_nothing(folder: Path, argv: Iterable[Collection[str]], more: Collection[str] = ()) -> None:
    """No private key or token in a file below the folder, nor `more`, is in a log there or in an argument."""
    secrets = {line for file in _files(folder, r"\.(key|pem|token)$") for line in _lines(file.read_text())} | set(more)
    assert len(secrets) > 50
    logs = list(_files(folder, r"\.(log|txt|jsonl)(\.\d)?$"))
    assert len(logs) > 5
    said = "\n".join([*(" ".join(parts) for parts in argv), *(file.read_text(errors="replace") for file in logs)])
    assert "PRIVATE KEY" not in said
    assert not [f"{secret[:8]}…" for secret in secrets if secret in said]


def _files(folder: Path, name: str) -> Iterable[Path]:
    return [file for file in folder.rglob("*") if file.is_file() and re.search(name, file.name)]


def _lines(text: str) -> list[str]:
    """Of what is secret: not of certificates, and not the first line, which all keys of a kind begin with."""
    if "-----" in text and "PRIVATE" not in text:
        return []
    lines = [line for line in text.splitlines() if len(line) > 30 and "-----" not in line]
    return lines if len(lines) == 1 else lines[1:]
