"""joined/SITE/results.json: the results of a site that joined a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.base import FileRecord
from pipeline.records.scores import ModelMetrics


class JoinResults(FileRecord):
    FILE_NAME: ClassVar[str] = "results.json"

    site: SiteId
    run: str
    strategy: str
    cluster: str | None
    rounds: int
    examples: Mapping[Split, tuple[int, ...]]  # by class
    personalized_model: ModelMetrics | None
    global_model: ModelMetrics | None
    local_only: ModelMetrics | None
    model_file: str
