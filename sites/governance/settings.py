"""HOME/site.toml: what a site's engineer sets, and no study can change."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from pipeline.core.errors import BadStudy
from pipeline.core.files import write_atomically
from pipeline.study.toml_file import to_toml

OWN_KEYS = ("manifest", "patient", "download")  # of a study's [data]: how a site's files are laid out


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Limits(Part):
    cores: PositiveInt | None = None  # all if not given
    disk_gb: PositiveFloat = 10.0  # that must stay free for work to begin
    gpu_memory_gb: PositiveFloat | None = None  # of the card, all if not given


class Settings(Part):
    """`plays`: in a rehearsal, the simulated site of the study whose examples this agent takes; else all in `data`."""

    data: Path | None = None  # where the site's images lie
    layout: dict[str, str | bool] = {}  # OWN_KEYS that this site sets otherwise than the study
    plays: str | None = None
    speed: PositiveFloat | None = Field(None)  # steps a second, for deadlines; measured if not given
    limits: Limits = Limits()

    @classmethod
    def load(cls, home: Path) -> Self:
        """The defaults where there is no such file."""
        file = home / "site.toml"
        try:
            settings = cls.model_validate(tomllib.loads(file.read_text("utf-8")) if file.exists() else {})
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            raise BadStudy(f"{file} cannot be used: {error}") from error
        if others := sorted(set(settings.layout) - set(OWN_KEYS)):
            raise BadStudy(f"{file}: layout.{others[0]} is the study's to say; a site sets {', '.join(OWN_KEYS)}")
        if settings.data is not None and not settings.data.is_absolute():
            return settings.model_copy(update={"data": (home / settings.data).resolve()})
        return settings

    def save(self, home: Path) -> Path:
        plain: dict[str, Any] = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return write_atomically(home / "site.toml", to_toml(plain).encode())
