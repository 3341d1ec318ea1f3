"""Reads a run folder for reports, of a finished run or one in progress; missing parts are empty."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeline.core.errors import RunFolderError
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import Split
from pipeline.records.round_record import ROUNDS_FILE, RoundRecord, load_round_records
from pipeline.records.run_results import RunResults
from pipeline.records.scores import EvaluatedAt, EvaluationScores, metric_by_site
from pipeline.records.sites_record import SitesRecord

Settings = Mapping[str, Any]  # a table of study.toml
SPLIT_ORDER: tuple[Split, ...] = ("test", "val", "train")
NO_SITES = SitesRecord(classes=(), shape=(), sites={}, fingerprint="", skipped=())


@dataclass(frozen=True)
class RunRecord:
    folder: Path
    round_records: Sequence[RoundRecord]  # one per round, in order; of a repeated round the last line
    site_data: SitesRecord
    results: RunResults | None  # None while the run is in progress
    study_toml: str  # study.toml

    @cached_property
    def settings(self) -> Settings:
        try:
            return tomllib.loads(self.study_toml)
        except tomllib.TOMLDecodeError as error:
            raise RunFolderError(
                f"{self.folder / 'study.toml'}: {error}; restore the file that the run wrote"
            ) from error

    @cached_property
    def name(self) -> str:
        study_name = self.results.study if self.results else self.settings.get("name")
        return str(study_name or self.folder.resolve().name)

    @property
    def strategy_name(self) -> str | None:
        return self.results.strategy if self.results else self._component_name("strategy")

    @property
    def model_name(self) -> str | None:
        return self.results.model if self.results else self._component_name("model")

    def _component_name(self, section: str) -> str | None:
        setting = self.settings.get(section)
        component = setting.get("name") if isinstance(setting, Mapping) else setting
        return str(component) if component else None

    @property
    def sites(self) -> list[SiteId]:
        """In the order of sites.json, then other sites that were sampled in a round."""
        sampled_sites = (site for record in self.round_records for site in record.sampled_clients)
        return list(dict.fromkeys([*self.site_data.sites, *sampled_sites]))

    @property
    def last_round(self) -> int:
        return self.round_records[-1].round if self.round_records else 0

    @property
    def result_round(self) -> int:
        """The round that the result is from, the last one while the run is in progress."""
        return self.results.best_round if self.results else self.last_round

    @property
    def seconds(self) -> float | None:
        if self.results:
            return self.results.seconds
        return sum(record.seconds.total for record in self.round_records) if self.round_records else None

    @property
    def uplink_bytes(self) -> int:
        return self.results.traffic.up if self.results else sum(record.bytes.up for record in self.round_records)

    @property
    def downlink_bytes(self) -> int:
        return self.results.traffic.down if self.results else sum(record.bytes.down for record in self.round_records)

    def scores_by_round(self, split: Split) -> dict[int, EvaluationScores]:
        """Of the rounds that were evaluated on this split."""
        return {record.round: record.metrics[split] for record in self.round_records if split in record.metrics}

    def metric_by_round(self, split: Split, evaluated_at: EvaluatedAt, metric: str) -> list[tuple[int, float]]:
        """(round, value); undefined values are left out."""
        overall = {n: scores.overall(evaluated_at) for n, scores in self.scores_by_round(split).items()}
        return [
            (n, value) for n, metrics in overall.items() if metrics and (value := metrics.value(metric)) is not None
        ]

    def site_metric_by_round(self, split: Split, metric: str) -> dict[int, list[float]]:
        """round -> the values of all sites."""
        values_by_round = {n: metric_by_site(s.sites, metric) for n, s in self.scores_by_round(split).items()}
        return {n: list(values.values()) for n, values in values_by_round.items() if values}

    def most_evaluated_split(self) -> Split:
        """The split that most rounds were evaluated on; ties go to test, then validation."""
        return max(SPLIT_ORDER, key=lambda split: len(self.scores_by_round(split)))

    def latest_scores(self) -> tuple[Split, EvaluationScores]:
        """(split, scores) of the final test, or of the last evaluated round."""
        if self.results:
            return "test", self.results.test
        split = self.most_evaluated_split()
        evaluated_scores = list(self.scores_by_round(split).values())
        return split, evaluated_scores[-1] if evaluated_scores else EvaluationScores()

    @cached_property
    def has_personalized_models(self) -> bool:
        """Every site was evaluated with its personalised model, and with the global model for comparison."""
        return bool(self.latest_scores()[1].comparison("global").sites)

    @cached_property
    def has_several_models(self) -> bool:
        """The sites' scores come from more than one model."""
        last_clusters = next((record.clusters for record in reversed(self.round_records) if record.clusters), {})
        return (
            self.has_personalized_models or len(set(last_clusters.values())) > 1 or self.strategy_name == "local_only"
        )


def load_run_record(folder: Path) -> RunRecord:
    study_path = folder / "study.toml"
    if not (folder / ROUNDS_FILE).exists() and not study_path.exists():
        raise RunFolderError(
            f"{folder} is not a run folder: it has neither rounds.jsonl nor study.toml; give the folder that `hemofed run` wrote"
        )
    return RunRecord(
        folder=folder,
        round_records=load_round_records(folder),
        site_data=SitesRecord.read_if_present(folder) or NO_SITES,
        results=RunResults.read_if_present(folder),
        study_toml=study_path.read_text("utf-8") if study_path.exists() else "",
    )
