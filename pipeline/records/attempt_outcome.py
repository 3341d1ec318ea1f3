"""RUN/ended.json: how an attempt at a run ended. The job's process writes it, the supervisor reads it."""

from __future__ import annotations

from typing import ClassVar, Literal

from pipeline.records.base import FileRecord


class AttemptOutcome(FileRecord):
    FILE_NAME: ClassVar[str] = "ended.json"

    outcome: Literal["finished", "halted", "failed"]
    reason: str
