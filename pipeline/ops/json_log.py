"""A service's log: JSON lines in a file that rotates by size; secrets are redacted.

Not logging.handlers.RotatingFileHandler: it keeps the file open, so a second process would go on writing to the backup
after a rotation, it creates files that others can read, and a full disk makes it print a traceback for every line.
"""

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

LogLevel = Literal["info", "warning", "error"]
REDACTED = "***"
# whole words of a name: `public_key` and `keys` are redacted, `monkey` and `keyword` are not
SECRET_NAME_PATTERN = re.compile(
    r"token|credential|passw|passphrase|secret|authorization|cookie|csr|proof|(^|[_\W])(key|pem)s?($|[_\W])"
)
SECRET_TEXT_PATTERNS = (
    re.compile(r"(?i)\b(bearer)\s+\S+"),
    re.compile(r"-----BEGIN ([A-Z ]*PRIVATE KEY)-----.*?(-----END [A-Z ]*-----|$)", re.DOTALL),
)
MAX_TEXT_CHARS = 4000  # of one value


def redact(value: Any, name: str = "") -> Any:
    """Redacts values by field name at any depth, and bearer tokens and private keys within texts."""
    if SECRET_NAME_PATTERN.search(name.lower()) and value is not None:
        return REDACTED
    match value:
        case Mapping():
            return {str(k): redact(v, str(k)) for k, v in value.items()}
        case list() | tuple() | set() | frozenset():
            return [redact(v) for v in value]
        case bool() | int() | float() | None:
            return value
    text = str(value)
    for pattern in SECRET_TEXT_PATTERNS:
        text = pattern.sub(rf"\1 {REDACTED}", text)
    return text if len(text) <= MAX_TEXT_CHARS else f"{text[:MAX_TEXT_CHARS]}…"


class JsonLog:
    """`write_event` is thread-safe and does not fail if the disk is full."""

    def __init__(self, path: Path, max_bytes: int, num_backups: int) -> None:
        self.path, self._max_bytes, self._num_backups = path, max_bytes, num_backups
        self._lock = threading.Lock()
        self._has_warned = False

    def write_event(self, event: str, level: LogLevel = "info", **fields: Any) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "level": level, "event": event} | redact(fields)) + "\n"
        with self._lock:
            try:
                self._append_line(line.encode())
                self._has_warned = False
            except OSError as error:
                if not self._has_warned:
                    sys.stderr.write(
                        f"{self.path} cannot be written: {error.strerror}; logging continues when it can\n"
                    )
                self._has_warned = True

    def read_last(self, count: int) -> list[dict[str, Any]]:
        """The last `count` records, oldest first."""
        lines: list[bytes] = []
        for file in (self.path, self._backup_path(1)):
            if len(lines) < count and file.exists():
                lines = file.read_bytes().splitlines() + lines
        return [record for line in lines[-count:] if (record := _parse_line(line)) is not None] if count > 0 else []

    def _append_line(self, line: bytes) -> None:
        if self.path.exists() and self.path.stat().st_size + len(line) > self._max_bytes:
            for age in range(self._num_backups - 1, 0, -1):
                if self._backup_path(age).exists():
                    self._backup_path(age).replace(self._backup_path(age + 1))
            self.path.replace(self._backup_path(1))
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(descriptor, "ab") as file:
            file.write(line)

    def _backup_path(self, age: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{age}")


def open_log(path: Path, max_bytes: int = 5_000_000, num_backups: int = 5) -> JsonLog:
    """Opens a log of at most `max_bytes` per file and `num_backups` older files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return JsonLog(path, max_bytes, num_backups)


def _parse_line(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # truncated by a kill
        return None
    return record if isinstance(record, dict) else None
