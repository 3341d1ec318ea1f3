"""The agent's log: all events go to HOME/log/agent.jsonl, announcements also to the terminal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.ops.json_log import LogLevel, open_log

LinePrinter = Callable[[str], None]


class AgentLog:
    def __init__(self, home: Path, print_line: LinePrinter) -> None:
        self._log, self._print_line = open_log(home / "log" / "agent.jsonl"), print_line
        self._announced: set[tuple[str, ...]] = set()

    def log_event(self, event: str, level: LogLevel = "info", **fields: Any) -> None:
        self._log.write_event(event, level, **fields)

    def announce(self, line: str, level: LogLevel = "info", **fields: Any) -> None:
        self.log_event(line, level, **fields)
        self._print_line(line)

    def announce_once(self, dedup_key: tuple[str, ...], line: str, level: LogLevel = "info", **fields: Any) -> None:
        """Announces the line only if `dedup_key` is new."""
        if dedup_key not in self._announced:
            self._announced.add(dedup_key)
            self.announce(line, level, **fields)
