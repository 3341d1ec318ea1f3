"""HOME/site.toml: settings of the site's engineer, which no study can change."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from pipeline.core.errors import StudyError
from pipeline.core.files import write_atomically
from pipeline.study.toml_file import to_toml

# keys of [data] that a site may override, because they describe the layout of its files
SITE_LAYOUT_KEYS = ("manifest", "patient", "download")


class SettingsSection(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ResourceLimits(SettingsSection):
    max_cores: PositiveInt | None = None  # None: all
    min_free_disk_gb: PositiveFloat = 10.0  # with less, the site refuses tasks
    max_gpu_memory_gb: PositiveFloat | None = None  # None: all


class SiteSettings(SettingsSection):
    """`simulated_site`: in a rehearsal, this agent uses the examples of this simulated site of the study, not `data`."""

    data: Path | None = None  # folder of the site's images
    layout: dict[str, str | bool] = {}  # SITE_LAYOUT_KEYS with other values than in the study
    simulated_site: str | None = None
    steps_per_second: PositiveFloat | None = None  # for deadlines; None: measured
    limits: ResourceLimits = ResourceLimits()

    @classmethod
    def load(cls, home: Path) -> Self:
        """Without a file: the defaults."""
        file = home / "site.toml"
        try:
            settings = cls.model_validate(tomllib.loads(file.read_text("utf-8")) if file.exists() else {})
        except tomllib.TOMLDecodeError as error:
            raise StudyError(f"{file} is not valid TOML: {error}") from error
        except ValidationError as error:
            raise StudyError(f"{file}: {'; '.join(_describe_errors(error))}") from error
        if unknown_keys := sorted(set(settings.layout) - set(SITE_LAYOUT_KEYS)):
            raise StudyError(
                f"{file}: only the study sets layout.{unknown_keys[0]}; a site can set {', '.join(SITE_LAYOUT_KEYS)}"
            )
        if settings.data is not None and not settings.data.is_absolute():
            return settings.model_copy(update={"data": (home / settings.data).resolve()})
        return settings

    def save(self, home: Path) -> Path:
        values: dict[str, Any] = self.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
        return write_atomically(home / "site.toml", to_toml(values).encode())


def _describe_errors(error: ValidationError) -> Iterator[str]:
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            section = ResourceLimits if key.startswith("limits.") else SiteSettings
            yield f"`{key}` is not a setting of this version; the settings are {', '.join(section.model_fields)}"
        else:
            yield f"`{key}`: {problem['msg']}"
