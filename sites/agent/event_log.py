"""What an agent has to say: every event into HOME/log/agent.jsonl, the few that a person waits for also as a line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.ops.json_log import Level, open_log

Say = Callable[[str], None]


class Notes:
    def __init__(self, home: Path, say: Say) -> None:
        self._log, self._say = open_log(home / "log" / "agent.jsonl"), say
        self._said: set[tuple[str, ...]] = set()

    def note(self, event: str, level: Level = "info", **fields: Any) -> None:
        self._log.event(event, level, **fields)

    def tell(self, line: str, level: Level = "info", **fields: Any) -> None:
        self.note(line, level, **fields)
        self._say(line)

    def once(self, about: tuple[str, ...], line: str, level: Level = "info", **fields: Any) -> None:
        """`about`: what makes it news."""
        if about not in self._said:
            self._said.add(about)
            self.tell(line, level, **fields)
