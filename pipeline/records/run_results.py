"""results.json: the results of a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import FiniteFloat

from pipeline.protocol.messages import SiteId
from pipeline.records.base import FileRecord, FiniteOrNone, FrozenRecord
from pipeline.records.scores import EvaluatedAt, EvaluationScores

Interval = tuple[FiniteFloat, FiniteFloat]  # (low, high)


class PairedResamples(FrozenRecord):
    """The headline metric in every resample: two models on the same test examples have the same resamples."""

    metric: str
    values: tuple[float, ...]


class BootstrapIntervals(FrozenRecord):
    """Intervals of the global model's test metrics, by a bootstrap over whole privacy units."""

    privacy_unit: str
    num_units: int
    min_units: int  # with fewer units a site has no interval
    num_resamples: int
    confidence_level: float
    paired: PairedResamples | None
    coordinator: Mapping[str, Interval] = {}  # by metric
    pooled: Mapping[str, Interval] = {}
    sites: Mapping[SiteId, Mapping[str, Interval]] = {}

    def overall(self, evaluated_at: EvaluatedAt) -> Mapping[str, Interval]:
        return self.coordinator if evaluated_at == "coordinator" else self.pooled


class BaselineRecord(FrozenRecord):
    test: EvaluationScores
    intervals: BootstrapIntervals | None
    metric: str  # of the curve
    curve: tuple[tuple[int, FiniteOrNone], ...]  # (round, value)


class WorstSite(FrozenRecord):
    site: SiteId
    accuracy: float


class SiteDeviation(FrozenRecord):
    """Standard deviation over sites."""

    accuracy: float


class RunTraffic(FrozenRecord):
    up: int
    down: int


class RunResults(FileRecord):
    FILE_NAME: ClassVar[str] = "results.json"

    study: str
    study_hash: str
    strategy: str
    model: str
    num_parameters: int
    rounds: int
    best_round: int
    selected_by: str
    stop_reason: str
    void_rounds: int
    positive_class: str | None
    test: EvaluationScores
    worst_site: WorstSite | None
    site_std: SiteDeviation | None
    intervals: BootstrapIntervals | None  # in simulations only
    baselines: Mapping[str, BaselineRecord]
    traffic: RunTraffic
    seconds: float
    software: Mapping[str, str | int]
