"""Base of the records: frozen and validated. A key that the class does not know is refused, in a file as in the code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically


def _none_unless_finite(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


FiniteOrNone = Annotated[float | None, BeforeValidator(_none_unless_finite)]  # JSON has no NaN: it becomes null


class FrozenRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_dict(self) -> dict[str, Any]:
        """As in JSON. A field that was not given, such as the clusters of a run without clusters, is left out."""
        return self.model_dump(mode="json", exclude_unset=True)


class FileRecord(FrozenRecord):
    """A record that is a whole file, FILE_NAME in some folder."""

    FILE_NAME: ClassVar[str]

    def write(self, folder: Path) -> None:
        write_atomically(folder / self.FILE_NAME, (json.dumps(self.to_dict(), indent=1) + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Self:
        record = cls.read_if_present(folder)
        if record is None:
            raise RunFolderError(f"{folder} has no {cls.FILE_NAME}; finish it with `hemofed run --resume {folder}`")
        return record

    @classmethod
    def read_if_present(cls, folder: Path) -> Self | None:
        """None if there is no such file. A damaged one raises an error."""
        path = folder / cls.FILE_NAME
        try:
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise RunFolderError(
                f"{path} is damaged ({describe_invalid(error)}); restore it, or resume the run to write it again"
            ) from error

    @classmethod
    def read_if_valid(cls, folder: Path) -> Self | None:
        """None also for a damaged file, for readers that go on without it."""
        try:
            return cls.read_if_present(folder)
        except (RunFolderError, OSError):
            return None


def describe_invalid(error: ValidationError) -> str:
    """The first problem in one line."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(map(str, problem["loc"]))
    return f"{place}: {problem['msg']}" if place else problem["msg"]
