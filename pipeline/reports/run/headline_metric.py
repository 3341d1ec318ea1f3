"""How a run wants to be read: the metric that leads, whose data it is taken on, and how sure it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipeline.reports.document.formatting import METRICS, metric_name, score, span
from pipeline.reports.document.page import Cell
from pipeline.reports.run.record import Json, Record, number, site_values

Span = tuple[float, float]
WHOSE = {"coordinator": "coordinator's set", "pooled": "all sites"}
DETECTION = ("positive_auroc", "sensitivity_at_specificity", "positive_auprc")  # as they lead
# taken from scores put in one order, so they mean nothing where the scores come from several models
RANKED = frozenset({"auroc", "auprc", *DETECTION})
RANKING = frozenset({*RANKED, "roc", "pr", "class_auroc"})


@dataclass(frozen=True)
class Lens:
    metric: str  # leads: the positive class's AUROC, else what the study chose its round by, else accuracy
    positive: str | None
    specificity: float
    intervals: Json  # of the scores that lead; empty where none were made
    several: bool = False  # the sites' scores come from several models
    common: Json = field(default_factory=dict)  # intervals of the common model, where sites have their own

    @classmethod
    def of(cls, record: Record) -> Lens:
        evaluation: Json = record.settings.get("evaluation") or {}
        results = record.results or {}
        positive = results.get("positive") or evaluation.get("positive")
        made: Json = results.get("intervals") or {}  # always of the common model
        intervals: Json = {} if record.personal else made
        wanted = "positive_auroc" if positive else str(evaluation.get("best", "accuracy"))
        scores = unmixed(record.scores()[1]) if record.several else record.scores()[1]
        _, main = main_scores(scores, "pooled" in intervals or record.several)
        known = wanted in METRICS and wanted != "loss" and number(main.get(wanted)) is not None
        specificity = number(evaluation.get("specificity")) or 0.95
        named = str(positive) if positive else None
        common = made if record.personal else {}
        return cls(wanted if known else "accuracy", named, specificity, intervals, record.several, common)

    def fair(self, scores: Json) -> Json:
        """Without what means nothing where every site has another model."""
        return unmixed(scores) if self.several else scores

    def whole(self, scores: Json) -> tuple[str, Json]:
        """(whose data, metrics): the pooled scores lead where they have intervals or tell of more than the common model."""
        return main_scores(scores, pooled_first="pooled" in self.intervals or self.several)

    def name(self, metric: str) -> str:
        at = f"{100 * self.specificity:g} % specificity"
        if metric == "sensitivity_at_specificity":
            return f"Sensitivity at {at}"
        if self.positive and metric.startswith("positive_"):
            return f"{metric_name(metric.removeprefix('positive_'))}, {self.positive}"
        return metric_name(metric)

    def interval(self, metric: str, site: str | None = None, where: str = "pooled") -> Span | None:
        """Of one site; or of all, pooled or at the coordinator."""
        return interval_in(self.intervals, metric, site, where)

    def cell(self, metric: str, value: float | None, interval: Span | None) -> Cell:
        shown = score(metric, value)
        return shown if value is None or interval is None else (shown, span(metric, *interval))

    def columns(self, found: Sequence[Json], classes: int) -> list[str]:
        """The metrics that anybody has, the leading one first; means over two classes say nothing beside the positive one."""
        first = [*DETECTION, "accuracy"] if self.positive else [self.metric]
        order = dict.fromkeys([*first, *METRICS])
        hidden = {"auroc", "auprc", "macro_f1"} if self.metric in DETECTION and classes == 2 else set()
        return [m for m in order if m not in hidden and any(number(one.get(m)) is not None for one in found)]

    def among(self, sites: Json) -> str:
        """What sites are ranked by: older runs and sites without a positive example lack the leading metric."""
        return self.metric if site_values(sites, self.metric) else "accuracy"

    def short(self, metric: str) -> str:
        """Its name within a sentence, without the class."""
        name = self.name(metric).split(",")[0]
        return name if name.isupper() else name[:1].lower() + name[1:]

    @property
    def level(self) -> str:
        return f"{100 * (number((self.intervals or self.common).get('level')) or 0.95):g} %"

    @property
    def method(self) -> str:
        """How the intervals were made; empty where there are none."""
        if not self.intervals:
            return ""
        unit = str(self.intervals.get("unit") or "unit")
        units, draws = number(self.intervals.get("units")), number(self.intervals.get("draws"))
        if not any(self.intervals.get(where) for where in WHOSE):
            few = f"{units:,.0f} {unit}s in the test data are" if units else "There are"
            return f"No intervals: {few} too few to tell how much chance moves a score. Take differences with care."
        of, times = f" ({units:,.0f} in the test data)" if units else "", f", {draws:,.0f} times" if draws else ""
        return (
            f"In brackets, {self.level} intervals: a bootstrap that draws whole {unit}s{of} with replacement{times}. "
            f"They say how far the chance choice of {unit}s moves a score, not how far another "
            "training run would."
            + (f" Sites with fewer than {self.intervals['fewest']} {unit}s have none." if self._some_lack else "")
        )

    @property
    def _some_lack(self) -> bool:
        return "fewest" in self.intervals and any(not found for found in (self.intervals.get("sites") or {}).values())


def interval_in(intervals: Json, metric: str, site: str | None = None, where: str = "pooled") -> Span | None:
    found: Json | None = (intervals.get("sites") or {}).get(site) if site else intervals.get(where)
    edges = [number(edge) for edge in (found or {}).get(metric) or ()]
    low, high = edges if len(edges) == 2 else (None, None)
    return None if low is None or high is None else (low, high)


def main_scores(scores: Json, pooled_first: bool = False) -> tuple[str, Json]:
    """(whose data, metrics): the coordinator's set if it has one, else all sites pooled, else the mean over sites."""
    for where in ("pooled", "coordinator") if pooled_first else ("coordinator", "pooled"):
        if scores.get(where):
            return WHOSE[where], scores[where]
    by_metric = {metric: site_values(scores.get("sites") or {}, metric).values() for metric in METRICS}
    means = {metric: fmean(values) for metric, values in by_metric.items() if values}
    return ("mean over sites" if means else "", means)


def unmixed(scores: Json) -> Json:
    """Areas of pooled scores that several models gave become means over sites; their curves go."""
    pooled: Json = scores.get("pooled") or {}
    if not pooled:
        return scores
    kept = {metric: value for metric, value in pooled.items() if metric not in RANKING}
    return {**scores, "pooled": kept | ranked_means(scores.get("sites") or {})}


def ranked_means(sites: Json) -> dict[str, float]:
    found = {metric: site_values(sites, metric) for metric in RANKED}
    return {metric: fmean(values.values()) for metric, values in found.items() if values}


def worst_site(sites: Json, metric: str) -> str | None:
    known = site_values(sites, metric)
    return min(known, key=lambda site: known[site]) if len(sites) > 1 and known else None
