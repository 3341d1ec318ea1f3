"""What a service did, as JSON lines in a file that turns over by size. No secret ever reaches it."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

Level = Literal["info", "warning", "error"]
MASK = "***"
# whole words of a name: `public_key` and `keys` are masked, `monkey` and `keyword` are not
SECRET = re.compile(
    r"token|credential|passw|passphrase|secret|authorization|cookie|csr|proof|(^|[_\W])(key|pem)s?($|[_\W])"
)
IN_TEXT = (
    re.compile(r"(?i)\b(bearer)\s+\S+"),
    re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(-----END [A-Z ]*-----|$)", re.DOTALL),
)
LONGEST = 4000  # characters of one text


def redacted(value: Any, name: str = "") -> Any:
    """By the name of a field, at any depth; and what betrays itself within a text."""
    if SECRET.search(name.lower()) and value is not None:
        return MASK
    match value:
        case Mapping():
            return {str(k): redacted(v, str(k)) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [redacted(v) for v in value]
        case bool() | int() | float() | None:
            return value
    text = str(value)
    for pattern in IN_TEXT:
        text = pattern.sub(rf"\1 {MASK}", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


class Log:
    """`event` is safe to call from any thread, and never fails a service whose disk is full."""

    def __init__(self, path: Path, most: int, kept: int) -> None:
        self.path, self._most, self._kept = path, most, kept
        self._lock = threading.Lock()
        self._told = False

    def event(self, event: str, level: Level = "info", **fields: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "level": level, "event": event} | redacted(fields)) + "\n"
        with self._lock:
            try:
                self._write(line.encode())
                self._told = False
            except OSError as error:
                if not self._told:
                    sys.stderr.write(f"{self.path} cannot be written: {error.strerror}; logging goes on when it can\n")
                self._told = True

    def last(self, count: int) -> list[dict[str, Any]]:
        """The newest records, oldest of them first."""
        lines: list[bytes] = []
        for file in (self.path, self._older(1)):
            if len(lines) < count and file.exists():
                lines = file.read_bytes().splitlines() + lines
        return [record for line in lines[-count:] if (record := _read(line)) is not None] if count > 0 else []

    def _write(self, line: bytes) -> None:
        if self.path.exists() and self.path.stat().st_size + len(line) > self._most:
            for age in range(self._kept - 1, 0, -1):
                if self._older(age).exists():
                    self._older(age).replace(self._older(age + 1))
            self.path.replace(self._older(1))
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "ab") as file:
            file.write(line)

    def _older(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{age}")


def open_log(path: Path, most: int = 5_000_000, kept: int = 5) -> Log:
    """`most` bytes in a file, and so many older files beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return Log(path, most, kept)


def _read(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:  # cut short by a kill
        return None
    return found if isinstance(found, dict) else None
