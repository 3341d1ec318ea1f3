"""Baselines of a study with the same number of passes: each site alone, pooled data and others; cached by study hash."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from pathlib import Path
from statistics import fmean

from platformdirs import user_cache_path

from pipeline.aggregation.rules import WEIGHTED_MEAN
from pipeline.coordinator.run_folder import RUN_FORMAT, RunFolder
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import BaselineRecord
from pipeline.records.scores import HeadlineScore, headline_metric, metric_by_site
from pipeline.records.sites_record import SitesRecord
from pipeline.runs.simulation import RoundCallback, run_simulation
from pipeline.strategies.base import Strategy
from pipeline.strategies.centralized import CentralizedTraining
from pipeline.strategies.local_only import LocalOnly
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import ClientSamplingConfig, CompressionConfig, RoundConfig, SitesConfig, Study
from sites.population.color_normalization import NoColorNormalization, SiteNormalization
from sites.population.feature_skew import AcquisitionSkew, NoFeatureSkew

RoundCallbackFactory = Callable[[Study], AbstractContextManager[RoundCallback]]


def run_baselines(
    study: Study,
    folder: RunFolder,
    data_path: Path | None,
    open_callback: RoundCallbackFactory,
    baseline_names: Collection[str] | None = None,
) -> dict[str, BaselineRecord]:
    baseline_studies = build_baseline_studies(study, len(SitesRecord.read(folder.path).sites))
    return {
        name: _run_baseline(baseline, folder, data_path, open_callback)
        for name, baseline in baseline_studies.items()
        if baseline_names is None or name in baseline_names
    }


def build_baseline_studies(study: Study, num_sites: int) -> dict[str, Study]:
    """The same data, model and passes, each site alone and on pooled data; with an acquisition skew, also without the skew
    and with color normalization.

    The baselines of a private study are trained without privacy; `unprotected`, the study itself without privacy, shows
    what privacy costs. The models are not published.
    """
    studies: dict[str, Study] = {
        s.name: _with_strategy(study, s, num_sites) for s in (LocalOnly(), CentralizedTraining())
    }
    if study.privacy != PrivacyConfig():
        studies = {name: baseline.model_copy(update={"privacy": PrivacyConfig()}) for name, baseline in studies.items()}
        studies["unprotected"] = study.model_copy(update={"privacy": PrivacyConfig()})
    elif isinstance(study.feature_skew, AcquisitionSkew):
        studies["unskewed"] = study.model_copy(update={"feature_skew": NoFeatureSkew()})
        if isinstance(study.normalization, NoColorNormalization):
            studies["normalized"] = study.model_copy(update={"normalization": SiteNormalization()})
    return {name: baseline.model_copy(update={"name": f"{study.name}-{name}"}) for name, baseline in studies.items()}


def _with_strategy(study: Study, strategy: Strategy, num_sites: int) -> Study:
    """Full participation, no deadline, no compression, all rounds."""
    local = study.local
    if strategy.requires_pooled_data and local.steps is not None:  # as many as all sites take together
        local = local.model_copy(update={"steps": local.steps * num_sites})
    return study.model_copy(
        update={
            "strategy": strategy,
            "local": local,
            "sites": SitesConfig(count=study.sites.count),
            "client_sampling": ClientSamplingConfig(),
            "round": RoundConfig(),
            "compression": CompressionConfig(),
            "aggregation": WEIGHTED_MEAN,
            "evaluation": study.evaluation.model_copy(update={"patience": None, "target": None}),
        }
    )


def _run_baseline(
    study: Study, folder: RunFolder, data_path: Path | None, open_callback: RoundCallbackFactory
) -> BaselineRecord:
    cache_folder = _open_cache_folder(study, folder)
    with open_callback(study) as on_round_end:
        results = run_simulation(study, cache_folder, data_path, on_round_end, is_baseline=True)
    metric = headline_metric(study.evaluation.positive_class)
    curve = tuple(
        (record.round, _round_score(record, metric, study.strategy))
        for record in cache_folder.load_rounds()
        if record.metrics
    )
    return BaselineRecord(test=results.test, intervals=results.intervals, metric=metric, curve=curve)


def _round_score(record: RoundRecord, metric: str, strategy: Strategy) -> float | None:
    """Headline metric of a round; the mean over sites if each has its own model, because their scores cannot be pooled."""
    headline = HeadlineScore.select(record.metrics)
    if headline is None:
        return None
    if metric == "accuracy" or not strategy.result_in_client_states:
        return headline.metrics.value(metric)
    site_scores = metric_by_site(record.metrics[headline.split].sites, metric).values()
    return fmean(site_scores) if site_scores else None


def _open_cache_folder(study: Study, folder: RunFolder) -> RunFolder:
    """Opens the baseline's folder in the user's cache, by study, data and format; in the run folder if the cache is not writable."""
    fingerprint = SitesRecord.read(folder.path).fingerprint
    path = user_cache_path("hemofed") / "baselines" / f"{study.hash[:24]}-{fingerprint[:12]}-{RUN_FORMAT}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        path = folder.path / "baselines" / study.hash[:24]
    if (path / "study.toml").is_file():
        return RunFolder.open(path)
    shutil.rmtree(path, ignore_errors=True)  # left by a process that was killed before the run began
    return RunFolder.create(path, study)
