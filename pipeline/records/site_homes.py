"""Where the homes of a run's simulated sites are: in the run folder, or in a folder that outlives it.

RUN/homes.json names such a folder, so that a resumed run finds it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

from pipeline.protocol.messages import SiteId
from pipeline.records.base import FileRecord


class SiteHomesRecord(FileRecord):
    FILE_NAME: ClassVar[str] = "homes.json"

    folder: str


@dataclass(frozen=True)
class SiteHomes:
    """The homes of all sites, and the folder of the coordinator that countersigns their ledgers."""

    folder: Path
    coordinator_folder: Path
    is_shared: bool  # with other runs

    @classmethod
    def locate(cls, run: Path, shared_folder: Path | None = None) -> SiteHomes:
        """`shared_folder`: if the caller has it; else homes.json says."""
        record = SiteHomesRecord.read_if_present(run) if shared_folder is None else None
        shared = Path(record.folder) if record else shared_folder
        if shared is None:
            return cls(run / "homes", run / "coordinator", is_shared=False)
        return cls(shared, shared / ".coordinator", is_shared=True)

    def home_path(self, site: SiteId) -> Path:
        return self.folder / quote(site, safe="")
