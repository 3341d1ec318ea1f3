"""How good a state is: at the coordinator, at every site, pooled over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from pipeline.aggregation.requests import Asking
from pipeline.coordinator.metrics import Focus, details, metrics
from pipeline.core.parameters import Snapshot
from pipeline.protocol.messages import SiteId, Vectors
from pipeline.protocol.tasks import Evaluate, Evaluated, Split
from pipeline.strategies.base import OWN
from pipeline.study.schema import Study


@dataclass(frozen=True)
class Judged:
    coordinator: Mapping[Split, Evaluated] = field(default_factory=dict)
    sites: Mapping[SiteId, Mapping[Split, Evaluated]] = field(default_factory=dict)  # each site's own model, there
    views: Mapping[str, Judged] = field(default_factory=dict)  # of other models at the sites: "global", "group"
    models: Mapping[str, Mapping[Split, Evaluated]] = field(default_factory=dict)  # others', on the coordinator's data
    up: int = 0  # bytes
    down: int = 0
    missed: Mapping[SiteId, str] = field(default_factory=dict)

    def pooled(self, split: Split) -> Evaluated | None:
        parts = [seen[split] for seen in self.sites.values() if split in seen]
        return sum(parts[1:], parts[0]) if parts else None

    def metrics(self, focus: Focus) -> dict[str, Any]:
        """{split: {"coordinator": ..., "pooled": ..., "sites": {...}}}, without what nobody holds examples of."""
        splits = sorted({*self.coordinator, *(s for seen in self.sites.values() for s in seen)})
        out: dict[str, Any] = {}
        for split in splits:
            entry: dict[str, Any] = {}
            if split in self.coordinator and float(self.coordinator[split].n):
                entry["coordinator"] = metrics(self.coordinator[split], focus)
            pooled = self.pooled(split)
            if pooled is not None and float(pooled.n):
                entry["pooled"] = metrics(pooled, focus)
                entry["sites"] = {site: metrics(seen[split], focus) for site, seen in self.sites.items()}
            views = {name: view.metrics(focus).get(split) for name, view in self.views.items()}
            models = {n: metrics(seen[split], focus) for n, seen in self.models.items() if float(seen[split].n)}
            entry |= {key: found for key, found in (("views", views), ("models", models)) if found and entry}
            if entry:
                out[split] = entry
        return out

    def final(self, focus: Focus) -> dict[str, Any]:
        """The test metrics with what plots need."""
        out: dict[str, Any] = self.metrics(focus).get("test", {})
        for who, seen in (("coordinator", self.coordinator.get("test")), ("pooled", self.pooled("test"))):
            if who in out and seen is not None:
                out[who] |= details(seen, focus)
        for site, found in out.get("sites", {}).items():
            found |= {key: value for key, value in details(self.sites[site]["test"], focus).items() if key == "roc"}
        return out


def value_of(found: Mapping[str, Any], metric: str, split: Split = "val") -> float | None:
    """What the best round is chosen by, pooled over sites where they were asked. Higher is better."""
    entry = found.get(split, {})
    value: float | None = (entry.get("pooled") or entry.get("coordinator") or {}).get(metric)
    return -value if value is not None and metric == "loss" else value


def judge_round(study: Study, state: Any, sites: Sequence[SiteId], asking: Asking) -> Judged:
    strategy, where = study.strategy, study.evaluation.where
    splits = asking.splits
    models = strategy.models(state)
    here = _here(models, splits, asking) if where != "sites" else {}
    views: dict[str, dict[SiteId, dict[Split, Evaluated]]] = {OWN: {}}
    if where != "coordinator" or "global" not in models:
        for reply in asking.each({site: strategy.exam(state, site) for site in sites}):
            for view, seen in _by_view(reply.update.sum).items():
                views.setdefault(view, {})[reply.site] = seen
    others = {view: Judged(sites=seen) for view, seen in views.items() if view != OWN}
    common = here.pop("global", {})
    return Judged(common, views[OWN], others, here, asking.log.up, asking.log.down, asking.log.missed)


def _here(models: Mapping[str, Snapshot], splits: Sequence[Split], asking: Asking) -> dict[str, dict[Split, Evaluated]]:
    """All models on the coordinator's data."""
    jobs = [(name, split) for name in models for split in splits]
    seen = asking.here([Evaluate(models[name].weights, split, models[name].stats) for name, split in jobs])
    found: dict[str, dict[Split, Evaluated]] = {name: {} for name in models}
    for (name, split), one in zip(jobs, seen, strict=True):
        assert isinstance(one, Evaluated)
        found[name][split] = one
    return found


def _by_view(sums: Vectors) -> dict[str, dict[Split, Evaluated]]:
    """The keys are view:split/name."""
    found: dict[str, dict[Split, dict[str, Tensor]]] = {}
    for key, value in sums.items():
        place, _, name = key.rpartition("/")
        view, _, split = place.partition(":")
        found.setdefault(view, {}).setdefault(cast(Split, split), {})[name] = value
    return {view: {split: Evaluated.of(s) for split, s in seen.items()} for view, seen in found.items()}


def headline(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The split and the metrics that one line has room for."""
    for split in ("val", "test", "train"):
        entry = record["metrics"].get(split)
        if entry:
            return split, entry.get("coordinator") or entry.get("pooled") or {}
    return "val", {}
