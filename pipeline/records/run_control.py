"""RUN/control.json: the state that a run's operators request. The service writes it, the run's process reads it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pipeline.records.base import FileRecord

DesiredState = Literal["run", "pause", "stop", "regroup"]


class RunControl(FileRecord):
    FILE_NAME: ClassVar[str] = "control.json"

    desired_state: DesiredState


def requested_state(folder: Path) -> DesiredState:
    """`run` if the file is missing or invalid."""
    control = RunControl.read_if_valid(folder)
    return control.desired_state if control else "run"


def request_state(folder: Path, state: DesiredState) -> None:
    RunControl(desired_state=state).write(folder)
