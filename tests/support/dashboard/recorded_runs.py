"""Small studies of two moons that are really run, so that the dashboard's tests show real records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.cli.commands.run import run_and_report
from pipeline.coordinator.run_folder import RunFolder
from pipeline.records.privacy_record import PrivacyRecord
from pipeline.records.run_results import RunResults
from pipeline.study.schema import Study
from pipeline.study.toml_file import find_study, load_study

Json = dict[str, Any]
FILE_KINDS = {
    "models": "model",
    "plots": "plot",
    "report.html": "report",
    "results.json": "table",
    "rounds.jsonl": "table",
}
STUDIES: Mapping[str, Json] = {
    # stragglers with partial updates, dropouts, and an update whose norm is an outlier
    "slow": {
        "name": "moons-stragglers",
        "rounds": 30,
        "strategy": "fedprox",
        "round": {"deadline": 16.0},
        "sites": {"count": 4, "stragglers": 0.3, "dropout": 0.1, "speed": [1.0, 1.2, 1.5, 2.0]},
        "aggregation": {"name": "mean", "outlier_factor": 1.9},
    },
    "tree": {
        "name": "moons-clusters",
        "rounds": 16,
        "strategy": {"name": "similarity_clustering", "cluster_every": 4},
        "sites": {"count": 6},
        "feature_skew": {"name": "plane", "sites": 3, "dx": 0.8, "dy": 0.4},
    },
    # one site's privacy budget is spent before the study ends
    "private": {
        "name": "moons-private",
        "rounds": 8,
        "strategy": "fedavg",
        "sites": {"count": 4},
        "local": {"lr": 0.1, "batch_size": 20, "steps": 10},
        "privacy": {
            "dp_sgd": {
                "privacy_unit": "example",
                "epsilon": [4.0, 4.0, 8.0, 8.0],
                "epsilon_budget": [4.0, 2.0, 12.0, 20.0],
            }
        },
    },
}


def time_ago(**delta: float) -> str:
    """ISO time; negative values are in the future."""
    return (datetime.now(UTC) - timedelta(**delta)).isoformat()


@dataclass(frozen=True)
class RecordedRun:
    study: str  # TOML
    rounds: list[Json]
    results: Json
    privacy: Json | None
    files: dict[str, Path]

    @property
    def sites(self) -> list[str]:
        return sorted(self.rounds[-1]["sampled_clients"])

    def rename_sites(self, names: Mapping[str, str]) -> RecordedRun:
        def rename(value: Any) -> Any:
            if isinstance(value, dict):
                return {names.get(key, key): rename(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [rename(inner) for inner in value]
            return names.get(value, value) if isinstance(value, str) else value

        return RecordedRun(
            study=self.study,
            rounds=rename(self.rounds),
            results=rename(self.results),
            privacy=rename(self.privacy),
            files=self.files,
        )


def record_run(kind: str, parent: Path) -> RecordedRun:
    """Runs the study of this kind in a new folder below `parent`, and reads its files."""
    defaults = load_study(find_study("moons-demo"), {}).to_dict()
    study = Study.model_validate(defaults | STUDIES[kind])
    folder = RunFolder.create(parent / kind, study)
    run_and_report(study, folder, None, run_baselines=False, quiet=True)
    privacy = PrivacyRecord.read_if_present(folder.path)
    return RecordedRun(
        study=(folder.path / "study.toml").read_text(),
        rounds=[record.to_dict() for record in folder.load_rounds()],
        results=RunResults.read(folder.path).to_dict(),
        privacy=privacy and privacy.to_dict(),
        files={path: folder.path / path for path in _list_downloads(folder.path)},
    )


def _list_downloads(folder: Path) -> list[str]:
    paths = [file.relative_to(folder).as_posix() for file in sorted(folder.rglob("*")) if file.is_file()]
    return [path for path in paths if path.split("/")[0] in FILE_KINDS]
