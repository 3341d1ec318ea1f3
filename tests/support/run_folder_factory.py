"""Run folders written by hand, for tests of reports. Tests change plain dicts; the typed records write them, so that a stale
key fails the test."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.coordinator.run_folder import RUN_FORMAT
from pipeline.records.round_record import RoundRecord, write_round_records
from pipeline.records.run_results import RunResults
from pipeline.records.sites_record import SitesRecord

HOSTILE_NAME = "<script>alert('$x_1$')</script>"  # of a site: HTML, and matplotlib's mathtext


def make_metrics(accuracy: float | None, n: int = 100, **more: Any) -> dict[str, Any]:
    return {
        "n": n,
        "loss": None if accuracy is None else 2 * (1 - accuracy),
        "accuracy": accuracy,
        "balanced_accuracy": accuracy,
        "macro_f1": None,
        "auroc": 0.75,
        "auprc": None,
        "calibration_error": 0.125,
        **more,
    }


def make_round_record(round_number: int, accuracies: dict[str, float | None], **more: Any) -> dict[str, Any]:
    """A line of rounds.jsonl; `accuracies`: site -> validation accuracy."""
    requested = list(accuracies) if round_number else []
    work = {"steps_requested": 50, "steps_done": 50, "num_examples": 10, "seconds": 1.0}
    return {
        "round": round_number,
        "lr": 0.1,
        "sampled_clients": requested,
        "accepted": requested,
        "failures": {},
        "work": {site: dict(work) for site in requested},
        "train_loss": {},
        "bytes": {"up": 1_000_000 * len(requested), "down": 2_000_000 * len(requested)},
        "seconds": {"train": 30.0, "evaluate": 1.0, "save": 0.5},
        "clock": None,
        "void": None,
        "evaluation_failures": {},
        "metrics": {"val": {"sites": {site: make_metrics(value) for site, value in accuracies.items()}}},
        **more,
    }


def make_record(round_number: int, accuracies: dict[str, float | None] | None = None, **more: Any) -> RoundRecord:
    return RoundRecord.model_validate(make_round_record(round_number, accuracies or {}, **more))


def make_results(**more: Any) -> RunResults:
    return RunResults.model_validate((RunFolderFactory(Path()).results or {}) | more)


def make_baseline(
    test: dict[str, Any], curve: list[list[float]] | None = None, intervals: dict[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    return {"test": test, "intervals": intervals, "metric": "accuracy", "curve": curve or [], **more}


def make_intervals(**more: Any) -> dict[str, Any]:
    settings = {
        "privacy_unit": "patient",
        "num_units": 40,
        "min_units": 10,
        "num_resamples": 1000,
        "confidence_level": 0.95,
    }
    return {**settings, "paired": None, **more}


@dataclass
class RunFolderFactory:
    """A small finished run of two sites, "a" and HOSTILE_NAME; tests change fields and call `write`."""

    path: Path
    round_records: list[dict[str, Any]] = field(
        default_factory=lambda: [
            make_round_record(0, {"a": 0.25, HOSTILE_NAME: 0.5}),
            make_round_record(1, {"a": 0.5, HOSTILE_NAME: 0.75}),
            make_round_record(2, {"a": 0.6, HOSTILE_NAME: 0.8}),
        ]
    )
    site_data: dict[str, Any] = field(
        default_factory=lambda: {
            "classes": ["normal", "schistocyte"],
            "shape": [3, 32, 32],
            "sites": {site: {"train": [30, 12], "val": [3, 1], "test": [9, 4]} for site in ("a", HOSTILE_NAME)},
            "coordinator": None,
            "fingerprint": "sha256:feed",
            "skipped": ["b/17.png: truncated"],
        }
    )
    results: dict[str, Any] | None = field(
        default_factory=lambda: {
            "study": "Smears & friends",
            "study_hash": "0123456789abcdef",
            "strategy": "fedavg",
            "model": "mlp",
            "num_parameters": 101770,
            "rounds": 2,
            "best_round": 1,
            "selected_by": "val accuracy",
            "stop_reason": "all rounds done",
            "void_rounds": 0,
            "intervals": None,
            "positive_class": "schistocyte",
            "test": {
                "pooled": make_metrics(
                    0.812,
                    positive_auroc=0.875,
                    confusion=[[16, 2], [4, 4]],
                    roc={"fpr": [0, 0.5, 1], "tpr": [0, 0.9, 1]},
                    pr={"recall": [0, 1], "precision": [1, 0.3]},
                    reliability=[[0.6, 0.5, 10], [0.9, 0.95, 16], [0.3, 0.0, 0]],
                ),
                "sites": {"a": make_metrics(0.7), HOSTILE_NAME: make_metrics(0.9)},
            },
            "worst_site": {"site": "a", "accuracy": 0.7},
            "site_std": {"accuracy": 0.1},
            "baselines": {
                "local_only": make_baseline({"pooled": make_metrics(0.66)}, [[0, 0.2], [1, 0.5], [2, 0.66]]),
                "centralized": make_baseline({"pooled": make_metrics(0.93)}),
            },
            "traffic": {"up": 4_000_000, "down": 8_000_000},
            "seconds": 95.0,
            "software": {"torch": "2.13.0"},
        }
    )
    study_toml: str = 'name = "smears"\nseed = 1\n[strategy]\nname = "fedavg"\n[model]\nname = "mlp"\n'

    def write(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        write_round_records(self.path, [RoundRecord.model_validate(record) for record in self.round_records])
        SitesRecord.model_validate(self.site_data).write(self.path)
        (self.path / "run.json").write_text(json.dumps({"format": RUN_FORMAT}))
        (self.path / "study.toml").write_text(self.study_toml)
        (self.path / RunResults.FILE_NAME).unlink(missing_ok=True)
        if self.results is not None:
            RunResults.model_validate(self.results).write(self.path)
        return self.path
