"""RUN/checkpoint/attempt.json: the attempt at the round that is under way."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pipeline.records.base import FileRecord


class AttemptRecord(FileRecord):
    FILE_NAME: ClassVar[str] = "attempt.json"

    round: int
    attempt: int


def next_attempt(folder: Path, round: int) -> int:
    """The next attempt number of a round, written to disk before any request, so that every execution has its own."""
    last = AttemptRecord.read_if_present(folder)
    attempt = last.attempt + 1 if last and last.round == round else 1
    AttemptRecord(round=round, attempt=attempt).write(folder)
    return attempt
