"""HOME/site.toml: what a site's engineer sets, and no study can change."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError

from pipeline.core.errors import StudyError
from pipeline.core.files import write_atomically
from pipeline.study.toml_file import to_toml

SITE_LAYOUT_KEYS = ("manifest", "patient", "download")  # of a study's [data]: how a site's files are laid out


class SettingsSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ResourceLimits(SettingsSection):
    max_cores: PositiveInt | None = None  # all if not given
    min_free_disk_gb: PositiveFloat = 10.0  # that must stay free for work to begin
    max_gpu_memory_gb: PositiveFloat | None = None  # of the card, all if not given


class SiteSettings(SettingsSection):
    """`plays`: in a rehearsal, the simulated site of the study whose examples this agent takes; else all in `data`."""

    data: Path | None = None  # where the site's images lie
    layout: dict[str, str | bool] = {}  # OWN_KEYS that this site sets otherwise than the study
    simulated_site: str | None = None
    steps_per_second: PositiveFloat | None = Field(None)  # steps a second, for deadlines; measured if not given
    limits: ResourceLimits = ResourceLimits()

    @classmethod
    def load(cls, home: Path) -> Self:
        """The defaults where there is no such file."""
        file = home / "site.toml"
        try:
            settings = cls.model_validate(tomllib.loads(file.read_text("utf-8")) if file.exists() else {})
        except (tomllib.TOMLDecodeError, ValidationError) as error:
            raise StudyError(f"{file} cannot be used: {error}") from error
        if unknown_keys := sorted(set(settings.layout) - set(SITE_LAYOUT_KEYS)):
            raise StudyError(
                f"{file}: layout.{unknown_keys[0]} is the study's to say; a site sets {', '.join(SITE_LAYOUT_KEYS)}"
            )
        if settings.data is not None and not settings.data.is_absolute():
            return settings.model_copy(update={"data": (home / settings.data).resolve()})
        return settings

    def save(self, home: Path) -> Path:
        values: dict[str, Any] = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return write_atomically(home / "site.toml", to_toml(values).encode())
