"""Reads a run folder for reports, of a finished run or one in progress; missing parts are empty."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.core.errors import RunFolderError
from pipeline.core.files import load_round_records

JsonObject = Mapping[str, Any]
SPLIT_ORDER = ("test", "val", "train")


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    round_records: Sequence[JsonObject]  # one per round, in order; of a repeated round the last line
    site_data: JsonObject  # sites.json
    results: JsonObject | None  # results.json; None while the run is in progress
    study_toml: str  # study.toml

    @cached_property
    def settings(self) -> JsonObject:
        try:
            return tomllib.loads(self.study_toml)
        except tomllib.TOMLDecodeError as error:
            raise RunFolderError(
                f"{self.folder / 'study.toml'}: {error}; restore the file that the run wrote"
            ) from error

    @cached_property
    def name(self) -> str:
        study_name = (self.results or {}).get("study") or self.settings.get("name") or self.folder.resolve().name
        return str(study_name)

    def component_name(self, section: str) -> str | None:
        """The name of the run's component in `section`: "strategy" or "model"."""
        setting = (self.results or {}).get(section) or self.settings.get(section)
        component = setting.get("name") if isinstance(setting, Mapping) else setting
        return str(component) if component else None

    @property
    def sites(self) -> list[str]:
        """In the order of sites.json, then other sites that were sampled in a round."""
        sampled_sites = (
            site for round_record in self.round_records for site in round_record.get("sampled_clients") or ()
        )
        return list(dict.fromkeys([*(self.site_data.get("sites") or {}), *sampled_sites]))

    @property
    def last_round(self) -> int:
        return int(self.round_records[-1]["round"]) if self.round_records else 0

    @property
    def seconds(self) -> float | None:
        if self.results and (total := finite_or_none(self.results.get("seconds"))) is not None:
            return total
        round_seconds = [
            value
            for round_record in self.round_records
            for value in map(finite_or_none, (round_record.get("seconds") or {}).values())
        ]
        return sum(value for value in round_seconds if value is not None) if round_seconds else None

    def traffic_bytes(self, direction: str) -> int:
        total = ((self.results or {}).get("traffic") or {}).get(direction)
        return (
            int(total)
            if total is not None
            else sum(round_traffic_bytes(round_record, direction) for round_record in self.round_records)
        )

    def metric_by_round(self, split: str, evaluated_at: str, metric: str) -> list[tuple[int, float]]:
        """(round, value), of `evaluated_at` "coordinator" or "pooled"; undefined values are left out."""
        round_values = (
            (int(round_record["round"]), finite_or_none(round_scores(round_record, split, evaluated_at).get(metric)))
            for round_record in self.round_records
        )
        return [(round_number, value) for round_number, value in round_values if value is not None]

    def site_metric_by_round(self, split: str, metric: str) -> dict[int, list[float]]:
        """round -> the values of all sites."""
        values_by_round = {
            int(round_record["round"]): metric_by_site(round_scores(round_record, split, "sites"), metric)
            for round_record in self.round_records
        }
        return {round_number: list(values.values()) for round_number, values in values_by_round.items() if values}

    def most_evaluated_split(self) -> str:
        """The split that most rounds were evaluated on; ties go to test, then validation."""
        num_evaluated_rounds = {
            split: sum(split in (round_record.get("metrics") or {}) for round_record in self.round_records)
            for split in SPLIT_ORDER
        }
        return max(SPLIT_ORDER, key=lambda split: num_evaluated_rounds[split])

    def latest_scores(self) -> tuple[str, JsonObject]:
        """(split, {"coordinator", "pooled", "sites"}) of the final test, or of the last evaluated round."""
        if self.results:
            return "test", self.results.get("test") or {}
        split = self.most_evaluated_split()
        evaluated_scores = [
            split_scores
            for round_record in self.round_records
            if (split_scores := (round_record.get("metrics") or {}).get(split))
        ]
        return split, evaluated_scores[-1] if evaluated_scores else {}

    @cached_property
    def has_personalized_models(self) -> bool:
        """Every site was evaluated with its personalised model, and with the global model for comparison."""
        return bool(comparison_scores(self.latest_scores()[1], "global").get("sites"))

    @cached_property
    def has_several_models(self) -> bool:
        """The sites' scores come from more than one model."""
        cluster_by_site: JsonObject = next(
            (
                recorded_clusters
                for round_record in reversed(self.round_records)
                if (recorded_clusters := round_record.get("clusters"))
            ),
            {},
        )
        return (
            self.has_personalized_models
            or len(set(cluster_by_site.values())) > 1
            or self.component_name("strategy") == "local_only"
        )


def load_run_record(folder: Path) -> RunRecord:
    if not (folder / "rounds.jsonl").exists() and not (folder / "study.toml").exists():
        raise RunFolderError(
            f"{folder} is not a run folder: it has neither rounds.jsonl nor study.toml; give the folder that `hemofed run` wrote"
        )
    study_path = folder / "study.toml"
    results_path = folder / "results.json"
    return RunRecord(
        folder=folder,
        round_records=load_round_records(folder / "rounds.jsonl"),
        site_data=load_json_object(folder / "sites.json"),
        results=load_json_object(results_path) if results_path.exists() else None,
        study_toml=study_path.read_text("utf-8") if study_path.exists() else "",
    )


def finite_or_none(value: object) -> float | None:
    """`value` if it is a finite number, else None (JSON may contain null and NaN)."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def round_scores(round_record: JsonObject, split: str, evaluated_at: str) -> JsonObject:
    return ((round_record.get("metrics") or {}).get(split) or {}).get(evaluated_at) or {}


def comparison_scores(scores: JsonObject, view_name: str) -> JsonObject:
    """Scores of another model on the sites' data, "global" or "cluster" (the cluster's), as {"pooled", "sites"}."""
    return (scores.get("comparisons") or {}).get(view_name) or {}


def metric_by_site(sites: JsonObject, metric: str) -> dict[str, float]:
    values_by_site = {site: finite_or_none((metrics or {}).get(metric)) for site, metrics in sites.items()}
    return {site: value for site, value in values_by_site.items() if value is not None}


def round_traffic_bytes(round_record: JsonObject, direction: str) -> int:
    return int((round_record.get("bytes") or {}).get(direction) or 0)


def load_json_object(path: Path) -> JsonObject:
    if not path.exists():
        return {}
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path}: {error}; restore it, or resume the run to write it again") from error
    if not isinstance(content, dict):
        raise RunFolderError(f"{path} does not contain a JSON object; restore it, or resume the run to write it again")
    return content
