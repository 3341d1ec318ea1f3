"""Evaluates a state at the coordinator, at every site, and pooled over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from pipeline.aggregation.requests import RoundRequest
from pipeline.coordinator.metrics import PositiveClass, compute_metrics, compute_plot_data
from pipeline.core.parameters import ModelState, NamedTensors
from pipeline.protocol.messages import ClientFailure, SiteId
from pipeline.protocol.tasks import EvaluateJob, EvaluationSums, Split
from pipeline.records.scores import EvaluationScores, MetricsBySplit
from pipeline.strategies.base import PERSONAL
from pipeline.study.schema import Study


@dataclass(frozen=True)
class EvaluationResult:
    # the global model on the coordinator's data
    coordinator: Mapping[Split, EvaluationSums] = field(default_factory=dict)
    # each site's model at that site
    sites: Mapping[SiteId, Mapping[Split, EvaluationSums]] = field(default_factory=dict)
    # other models at the sites: "global", "cluster"
    comparisons: Mapping[str, EvaluationResult] = field(default_factory=dict)
    # models other than the global one, on the coordinator's data
    models: Mapping[str, Mapping[Split, EvaluationSums]] = field(default_factory=dict)
    bytes_up: int = 0
    bytes_down: int = 0
    failures: Mapping[SiteId, ClientFailure] = field(default_factory=dict)

    def pool_sites(self, split: Split) -> EvaluationSums | None:
        parts = [sums[split] for sums in self.sites.values() if split in sums]
        return sum(parts[1:], parts[0]) if parts else None

    def metrics_by_split(self, positive_class: PositiveClass) -> dict[Split, EvaluationScores]:
        """Without splits that have no examples."""
        splits = sorted({*self.coordinator, *(s for sums in self.sites.values() for s in sums)})
        scores_by_split = {split: self._scores_of(split, positive_class) for split in splits}
        return {split: scores for split, scores in scores_by_split.items() if scores.coordinator or scores.pooled}

    def _scores_of(self, split: Split, positive_class: PositiveClass) -> EvaluationScores:
        scores: dict[str, Any] = {}
        if split in self.coordinator and float(self.coordinator[split].n):
            scores["coordinator"] = compute_metrics(self.coordinator[split], positive_class)
        pooled = self.pool_sites(split)
        if pooled is not None and float(pooled.n):
            scores["pooled"] = compute_metrics(pooled, positive_class)
            scores["sites"] = {site: compute_metrics(sums[split], positive_class) for site, sums in self.sites.items()}
        comparisons = {
            name: by_split[split]
            for name, view in self.comparisons.items()
            if split in (by_split := view.metrics_by_split(positive_class))
        }
        models = {
            name: compute_metrics(sums[split], positive_class)
            for name, sums in self.models.items()
            if float(sums[split].n)
        }
        other_models = {"comparisons": comparisons, "models": models}
        return EvaluationScores(**scores, **{key: values for key, values in other_models.items() if values})

    def final_scores(self, positive_class: PositiveClass) -> EvaluationScores:
        """Of the test split, with the data for plots."""
        scores = self.metrics_by_split(positive_class).get("test", EvaluationScores())
        updates: dict[str, Any] = {}
        for where, sums in (("coordinator", self.coordinator.get("test")), ("pooled", self.pool_sites("test"))):
            metrics = getattr(scores, where)
            if metrics is not None and sums is not None:
                updates[where] = metrics.model_copy(update=compute_plot_data(sums, positive_class))
        if scores.sites:
            updates["sites"] = {
                site: metrics.model_copy(update=_roc_only(compute_plot_data(self.sites[site]["test"], positive_class)))
                for site, metrics in scores.sites.items()
            }
        return scores.model_copy(update=updates)


def _roc_only(plot_data: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in plot_data.items() if key == "roc"}


def metric_value(metrics: MetricsBySplit, metric: str, split: Split = "val") -> float | None:
    """The value that selects the best round, pooled over sites if they evaluated. Higher is better."""
    scores = metrics.get(split)
    overall = scores and (scores.pooled or scores.coordinator)
    value = overall.value(metric) if overall else None
    return -value if value is not None and metric == "loss" else value


def evaluate_round(study: Study, state: Any, sites: Sequence[SiteId], request: RoundRequest) -> EvaluationResult:
    strategy, evaluate_at = study.strategy, study.evaluation.evaluate_at
    splits = request.exchange.splits
    models = strategy.global_models(state)
    on_coordinator = _evaluate_on_coordinator(models, splits, request) if evaluate_at != "sites" else {}
    sums_by_view: dict[str, dict[SiteId, dict[Split, EvaluationSums]]] = {PERSONAL: {}}
    if evaluate_at != "coordinator" or "global" not in models:
        for reply in request.collect({site: strategy.eval_payload(state, site) for site in sites}):
            for view, sums in _split_by_view(reply.update.summed).items():
                sums_by_view.setdefault(view, {})[reply.site] = sums
    comparisons = {view: EvaluationResult(sites=sums) for view, sums in sums_by_view.items() if view != PERSONAL}
    global_sums = on_coordinator.pop("global", {})
    return EvaluationResult(
        coordinator=global_sums,
        sites=sums_by_view[PERSONAL],
        comparisons=comparisons,
        models=on_coordinator,
        bytes_up=request.log.bytes_up,
        bytes_down=request.log.bytes_down,
        failures=request.log.failures,
    )


def _evaluate_on_coordinator(
    models: Mapping[str, ModelState], splits: Sequence[Split], request: RoundRequest
) -> dict[str, dict[Split, EvaluationSums]]:
    """Evaluates all models on the coordinator's data."""
    jobs = [(name, split) for name in models for split in splits]
    results = request.run_on_coordinator(
        [EvaluateJob(models[name].weights, split, models[name].norm_stats) for name, split in jobs]
    )
    sums_by_model: dict[str, dict[Split, EvaluationSums]] = {name: {} for name in models}
    for (name, split), result in zip(jobs, results, strict=True):
        assert isinstance(result, EvaluationSums)
        sums_by_model[name][split] = result
    return sums_by_model


def _split_by_view(sums: NamedTensors) -> dict[str, dict[Split, EvaluationSums]]:
    """Splits tensors with keys view:split/name."""
    tensors_by_view: dict[str, dict[Split, dict[str, Tensor]]] = {}
    for key, value in sums.items():
        prefix, _, name = key.rpartition("/")
        view, _, split = prefix.partition(":")
        tensors_by_view.setdefault(view, {}).setdefault(cast(Split, split), {})[name] = value
    return {
        view: {split: EvaluationSums.from_dict(s) for split, s in by_split.items()}
        for view, by_split in tensors_by_view.items()
    }
