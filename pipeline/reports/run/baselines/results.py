"""The federation and its yardsticks, in one form and one order: from each site alone to all data in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from pipeline.reports.document.figure_style import PALETTE
from pipeline.reports.run.headline_metric import RANKED, Lens, Span, interval_in, worst_site
from pipeline.reports.run.record import Json, Record, number, site_values


@dataclass(frozen=True)
class Look:
    label: str
    colour: str
    marker: str  # shapes differ too: not everybody sees the colours
    words: str


LOOKS: Mapping[str, Look] = {
    "local": Look("Each site alone", PALETTE[8], "X", "every site goes on alone from the same start; its last round"),
    "federated": Look("Federated", PALETTE[0], "o", "this run"),
    "unprotected": Look("Federated, unprotected", PALETTE[3], "v", "as this run, without clipping, noise and masks"),
    "normalised": Look("Federated, normalised", PALETTE[1], "D", "as this run, each site normalises its own colours"),
    "unskewed": Look("Federated, no scanners", PALETTE[4], "^", "as this run, on the images before the scanners"),
    "central": Look("All data in one place", PALETTE[2], "s", "one model on all data, which hospitals cannot do"),
}


@dataclass(frozen=True)
class Contender:
    key: str
    look: Look
    test: Json
    curve: list[tuple[int, float]]
    metric: str  # of the curve
    intervals: Json
    where: str  # coordinator or pooled: the same for all, so that they are judged alike
    several: bool = False  # a model a site, or a group: their scores have no common order

    def whole(self, metric: str) -> float | None:
        """None where the scores of several models would be put in one order."""
        if self.several and metric in RANKED:
            return None
        return number((self.test.get(self.where) or {}).get(metric))

    def interval(self, metric: str, site: str | None = None) -> Span | None:
        return interval_in(self.intervals, metric, site, self.where) if site or self.whole(metric) is not None else None

    def sites(self, metric: str) -> dict[str, float]:
        return site_values(self.test.get("sites") or {}, metric)

    def mean(self, metric: str) -> float | None:
        values = self.sites(metric)
        return fmean(values.values()) if values else None

    def worst(self, metric: str) -> str | None:
        return worst_site(self.test.get("sites") or {}, metric)

    @property
    def roc(self) -> Json | None:
        found: Json | None = (self.test.get(self.where) or {}).get("roc")
        return found if found and found.get("fpr") and not self.several else None


def contenders(record: Record) -> dict[str, Contender]:
    """Empty without yardsticks: a federation alone has nothing to be held against."""
    results = record.results or {}
    yards: Json = results.get("yardsticks") or {}
    test: Json = results.get("test") or {}
    known = {name: yard for name, yard in yards.items() if (yard or {}).get("test") or (yard or {}).get("curve")}
    if not known or not test:
        return {}
    where = "pooled" if test.get("pooled") else "coordinator"
    every = {**known, "federated": {"test": test, "intervals": results.get("intervals")}}
    order = [name for name in LOOKS if name in every] + [name for name in every if name not in LOOKS]
    return {name: _one(name, every[name], where, record) for name in order}


def _one(name: str, found: Json, where: str, record: Record) -> Contender:
    plain = name.replace("_", " ")
    look = LOOKS.get(name) or Look(plain[:1].upper() + plain[1:], PALETTE[5], "P", "")
    curve = [(int(turn), value) for turn, value in found.get("curve") or () if number(value) is not None]
    alike = name not in ("local", "central")  # the run's own strategy
    several = record.several if alike else name == "local"
    intervals: Json = {} if alike and record.personal else found.get("intervals") or {}  # they are of the common model
    if name == "federated" and record.personal:
        look = replace(look, words="this run, every site by its own model")
    metric = str(found.get("metric") or "accuracy")
    return Contender(name, look, found.get("test") or {}, curve, metric, intervals, where, several)


def shared_metric(every: Mapping[str, Contender], lens: Lens) -> str:
    """The leading metric, unless no yardstick has it, as in runs of older versions."""
    others = (one for one in every.values() if one.key != "federated")
    there = any(one.whole(lens.metric) is not None or one.sites(lens.metric) for one in others)
    return lens.metric if there else "accuracy"
