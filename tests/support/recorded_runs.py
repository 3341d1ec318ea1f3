"""Runs that really ran, for pages to show: small studies of moons, each with something the others do not have."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from pipeline.cli.commands.run import run_and_report
from pipeline.coordinator.run_folder import RunFolder
from pipeline.study.schema import Study, load_study
from pipeline.study.toml_file import find_study

Json = dict[str, Any]
KINDS = {"models": "model", "plots": "plot", "report.html": "report", "results.json": "table", "rounds.jsonl": "table"}
STUDIES: Mapping[str, Json] = {
    # stragglers whose partial work is kept, sites that do not answer, and an update that is too long to be believed
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
    # one site's budget ends before the study does
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


def ago(**delta: float) -> str:
    return (datetime.now(UTC) - timedelta(**delta)).isoformat()


@dataclass(frozen=True)
class Recording:
    study: str  # TOML
    rounds: list[Json]
    results: Json
    privacy: Json | None
    files: dict[str, Path]

    @property
    def sites(self) -> list[str]:
        return sorted(self.rounds[-1]["asked"])

    def renamed(self, names: Mapping[str, str]) -> Recording:
        """The same run at sites with other names."""

        def change(value: Any) -> Any:
            if isinstance(value, dict):
                return {names.get(key, key): change(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [change(inner) for inner in value]
            return names.get(value, value) if isinstance(value, str) else value

        told = (change(self.rounds), change(self.results), change(self.privacy))
        return Recording(self.study, *told, self.files)


def record(kind: str, where: Path) -> Recording:
    """Runs the study, and reads what it wrote."""
    base = load_study(find_study("moons-demo"), {}).to_dict()
    study = Study.model_validate(base | STUDIES[kind])
    folder = RunFolder.create(where / kind, study)
    run_and_report(study, folder, None, run_baselines=False, quiet=True)
    place = folder.path
    privacy = place / "privacy.json"
    found = {path: place / path for path in _files(place)}
    return Recording(
        (place / "study.toml").read_text(),
        folder.load_rounds(),
        json.loads((place / "results.json").read_text()),
        json.loads(privacy.read_text()) if privacy.exists() else None,
        found,
    )


def _files(place: Path) -> list[str]:
    all_files = [file.relative_to(place).as_posix() for file in sorted(place.rglob("*")) if file.is_file()]
    return [path for path in all_files if path.split("/")[0] in KINDS]
