"""Base of reproductions: run packaged studies, compare the results with published numbers and check claims.

A reproduction is a module with NAME, DESCRIPTION and `run(context) -> ReproductionResult`.
"""

from __future__ import annotations

import csv
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import RunFolderError, StudyError
from pipeline.protocol.tasks import Split
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import RunResults
from pipeline.records.scores import EvaluatedAt, ModelMetrics
from pipeline.study.toml_file import find_study, load_study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REFERENCE_FOLDER = Path(__file__).parent / "reference"


@dataclass(frozen=True)
class ClaimCheck:
    claim: str
    holds: bool
    measured: str


@dataclass(frozen=True)
class ResultTable:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class ReproductionResult:
    payload: Mapping[str, Any]  # printed by --json
    notes: Sequence[str]
    tables: Sequence[ResultTable]
    figures: Sequence[tuple[str, Figure]]  # caption, figure
    checks: Sequence[ClaimCheck]


@dataclass(frozen=True)
class ReproductionRun:
    study: str
    path: Path
    results: RunResults
    round_records: Sequence[RoundRecord]

    @property
    def evaluated_records(self) -> list[RoundRecord]:
        return [record for record in self.round_records if record.metrics]

    def curve(self, split: Split, metric: str = "accuracy", evaluated_at: EvaluatedAt = "coordinator") -> list[float]:
        return [defined_value(record.metrics[split].overall(evaluated_at), metric) for record in self.evaluated_records]

    def evaluated_rounds(self) -> list[int]:
        return [record.round for record in self.evaluated_records]

    def site_metric_by_round(self, split: Split, metric: str) -> dict[int, list[float]]:
        return {
            record.round: [defined_value(metrics, metric) for metrics in record.metrics[split].sites.values()]
            for record in self.evaluated_records
        }


def defined_value(metrics: ModelMetrics | None, metric: str = "accuracy") -> float:
    """A metric that every run of a published study has."""
    value = metrics.value(metric) if metrics else None
    if value is None:
        raise RunFolderError(f"a run of this reproduction has no {metric}; remove it and start again")
    return value


class ProgressDisplay(Protocol):
    """Shows the rounds of one run: a context manager around the run whose value is called after each round."""

    def __call__(
        self, label: str, num_rounds: int, is_finished: bool, /
    ) -> AbstractContextManager[Callable[[RoundRecord], None]]: ...


def no_progress(
    label: str, num_rounds: int, is_finished: bool
) -> AbstractContextManager[Callable[[RoundRecord], None]]:
    return nullcontext(lambda record: None)


@dataclass(frozen=True)
class ReproductionContext:
    """Runs studies in `out_folder`; existing runs are resumed, finished ones are used as they are."""

    out_folder: Path
    data_root: Path | None
    progress: ProgressDisplay = no_progress

    def run_study(self, study: str, label: str, **overrides: Any) -> ReproductionRun:
        """Runs a packaged study as run `label`; overrides are dotted keys with `__` for dots: local__epochs=5."""
        from pipeline.runs.simulation import run_simulation

        setting_overrides = {key.replace("__", "."): value for key, value in overrides.items()}
        study_spec = load_study(find_study(study), setting_overrides).model_copy(update={"name": label})
        path = self.out_folder / label
        folder = RunFolder.open(path) if (path / "study.toml").is_file() else RunFolder.create(path, study_spec)
        if folder.load_study().hash != study_spec.hash:
            raise StudyError(f"{path} contains another version of this study; choose another --out or remove it")
        with self.progress(label, study_spec.rounds, folder.is_finished) as on_round_end:
            results = run_simulation(study_spec, folder, self.data_root, on_round_end)
        return ReproductionRun(label, path, results, folder.load_rounds())


def load_reproductions() -> dict[str, Any]:
    """name -> module, of every reproduction in this package."""
    package = importlib.import_module("pipeline.reproductions")
    modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    return {module.NAME: module for module in modules if hasattr(module, "NAME")}


def load_reference(name: str) -> list[dict[str, str]]:
    with (REFERENCE_FOLDER / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))
