"""How good a state is: at the coordinator, at every site, pooled over sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pipeline.asking import Asking
from pipeline.messages import SiteId
from pipeline.metrics import Focus, details, metrics
from pipeline.study import Study
from pipeline.work import Evaluate, Evaluated, Split


@dataclass(frozen=True)
class Judged:
    coordinator: Mapping[Split, Evaluated] = field(default_factory=dict)
    sites: Mapping[SiteId, Mapping[Split, Evaluated]] = field(default_factory=dict)
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
    coordinator: dict[Split, Evaluated] = {}
    at_sites: dict[SiteId, dict[Split, Evaluated]] = {}
    model = strategy.models(state).get("global")
    if where != "sites" and model is not None:
        seen = asking.here([Evaluate(model.weights, split, model.stats) for split in splits])
        coordinator = {s: e for s, e in zip(splits, seen, strict=True) if isinstance(e, Evaluated)}
    if where != "coordinator" or model is None:
        for reply in asking.each({site: strategy.brief(state, site) for site in sites}):
            sums = reply.update.sum
            at_sites[reply.site] = {
                split: Evaluated.of(
                    {k.removeprefix(f"{split}/"): v for k, v in sums.items() if k.startswith(f"{split}/")}
                )
                for split in splits
            }
    return Judged(coordinator, at_sites, asking.log.up, asking.log.down, asking.log.missed)


def headline(record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The split and the metrics that one line has room for."""
    for split in ("val", "test", "train"):
        entry = record["metrics"].get(split)
        if entry:
            return split, entry.get("coordinator") or entry.get("pooled") or {}
    return "val", {}
