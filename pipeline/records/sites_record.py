"""sites.json: which data the sites of a run hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.base import FileRecord

ExampleCounts = Mapping[Split, tuple[int, ...]]  # by class; of a real site one number, because it reports no more


class SitesRecord(FileRecord):
    FILE_NAME: ClassVar[str] = "sites.json"

    classes: tuple[str, ...]
    shape: tuple[int, ...]  # of an input
    sites: Mapping[SiteId, ExampleCounts]
    coordinator: ExampleCounts | None = None
    fingerprint: str  # of the data; empty across hospitals
    skipped: tuple[str, ...]  # files left out, each with its reason
