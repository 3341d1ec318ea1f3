"""What the yardsticks say, in sentences made of the numbers: gains, losses, and when a difference is too small to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from pipeline.reports.document.formatting import format_count, format_interval, format_points, format_score, join_names
from pipeline.reports.run.baselines.results import BaselineResult
from pipeline.reports.run.headline_metric import HeadlineMetric

TEST_SET_LABELS = {"pooled": "all sites pooled", "coordinator": "on the coordinator's set"}
ResultsByName = Mapping[str, BaselineResult]


def baseline_findings(results: ResultsByName, headline: HeadlineMetric, metric: str) -> list[str]:
    describers: tuple[Callable[[ResultsByName, HeadlineMetric, str], str], ...] = (
        _describe_local_only,
        _describe_central,
        _describe_privacy_cost,
        _describe_scanner_cost,
        _describe_color_normalization,
    )
    sentences = [sentence for describe in describers if (sentence := describe(results, headline, metric))]
    return [*_describe_federation(results, headline, metric), *sentences, _seed_caution(headline)] if sentences else []


def _describe_federation(results: ResultsByName, headline: HeadlineMetric, metric: str) -> list[str]:
    value, interval = results["federated"].overall_score(metric), results["federated"].score_interval(metric)
    interval_text = (
        f", {headline.confidence_level} interval {format_interval(metric, *interval)[1:-1]}" if interval else ""
    )
    test_set_label = TEST_SET_LABELS[results["federated"].evaluated_at]
    return (
        []
        if value is None
        else [
            f"The federation reaches {format_score(metric, value)} ({headline.metric_title(metric)}, {test_set_label}{interval_text})."
        ]
    )


def _describe_local_only(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    """Site by site: each alone has a model of its own, so there is no pooled score to set beside the federation's."""
    if "local_only" not in results:
        return ""
    federated_scores, local_only_scores = (
        results["federated"].scores_by_site(metric),
        results["local_only"].scores_by_site(metric),
    )
    gains = gains_by_site(federated_scores, local_only_scores)
    if not gains:
        return _describe_overall_local_only(results, headline, metric)
    if are_gains_negligible(gains):
        return f"Each site alone would do about the same {describe_negligible_gains(gains)}."
    return f"Against each site alone, the federation {describe_gains(gains)}."


def _describe_overall_local_only(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    gap = _score_gap(results, "local_only", metric)
    if gap is None:
        return ""
    local_only_text = f"Each site alone reaches {_overall_score_text(results, 'local', metric)}"
    if abs(gap) < NEGLIGIBLE_GAIN:
        return f"{local_only_text}, practically what the federation reaches ({_overall_score_text(results, 'federated', metric)})."
    verb = "gains" if gap < 0 else "loses"
    return f"{local_only_text}: the federation {verb} {_gap_text(gap)} over it.{_describe_chance(results, 'local', metric)}"


def _describe_central(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    gap = _score_gap(results, "centralized", metric)
    if gap is None:
        return ""
    central_text, federated_text = (
        _overall_score_text(results, "centralized", metric),
        _overall_score_text(results, "federated", metric),
    )
    if abs(gap) < NEGLIGIBLE_GAIN:
        return f"All data in one place would do practically the same: {central_text} against {federated_text}."
    chance_text = _describe_chance(results, "centralized", metric)
    if gap > 0:
        return f"All data in one place would reach {central_text}: the federation loses {_gap_text(gap)} to it.{chance_text}"
    return f"All data in one place reaches only {central_text}, {_gap_text(gap)} below the federation's {federated_text}.{chance_text}"


def _describe_privacy_cost(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    cost = _score_gap(results, "unprotected", metric)
    if cost is None:
        return ""
    unprotected_text = f"Unprotected, the same federation reaches {_overall_score_text(results, 'unprotected', metric)}"
    if abs(cost) < NEGLIGIBLE_GAIN:
        return f"{unprotected_text}: privacy costs next to nothing here ({format_points(cost)} points)."
    chance_text = _describe_chance(results, "unprotected", metric)
    if cost > 0:
        return f"{unprotected_text}: privacy costs {_gap_text(cost)}.{chance_text}"
    return f"{unprotected_text}, {_gap_text(cost)} less: here privacy did no harm.{chance_text}"


def _describe_scanner_cost(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    cost = _score_gap(results, "unskewed", metric)
    if cost is None:
        return ""
    unskewed_text = f"On the images as they were before the scanners, the same federation reaches {_overall_score_text(results, 'unskewed', metric)}"
    if abs(cost) < NEGLIGIBLE_GAIN:
        return f"{unskewed_text}: the scanners cost next to nothing here ({format_points(cost)} points)."
    chance_text = _describe_chance(results, "unskewed", metric)
    if cost > 0:
        return f"{unskewed_text}: the scanners, their differences and their faults together, cost {_gap_text(cost)}.{chance_text}"
    return f"{unskewed_text}, {_gap_text(cost)} less: here the scanners did no harm.{chance_text}"


def _describe_color_normalization(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    gain, scanner_cost = _score_gap(results, "normalised", metric), _score_gap(results, "unskewed", metric)
    if gain is None:
        return ""
    normalized_text = f"Colour normalisation at each site reaches {_overall_score_text(results, 'normalised', metric)}"
    if abs(gain) < NEGLIGIBLE_GAIN:
        return f"{normalized_text}: next to no change ({format_points(gain)} points)."
    chance_text = _describe_chance(results, "normalised", metric)
    if gain < 0:
        return f"{normalized_text}, {_gap_text(gain)} less than without: here it does harm.{chance_text}"
    if scanner_cost is None or scanner_cost < NEGLIGIBLE_GAIN or _may_be_chance(results, "unskewed"):
        return f"{normalized_text}, {_gap_text(gain)} more than without.{chance_text}"
    recovered_text = (
        f"all of these {_gap_text(scanner_cost)}"
        if gain >= scanner_cost
        else f"{100 * gain:.1f} of these {_gap_text(scanner_cost)}"
    )
    return f"{normalized_text}: it wins back {recovered_text}.{chance_text}"


def _seed_caution(headline: HeadlineMetric) -> str:
    seeds_text = (
        "Each score is one training run; another seed would move it too. Differences at single sites are not tested."
    )
    if headline.intervals:
        return seeds_text
    if headline.global_model_intervals:
        return f"There are intervals of the common model alone, so a small difference may be chance. {seeds_text}"
    return f"No intervals were made for this run, so a small difference may be chance. {seeds_text}"


def _score_gap(results: ResultsByName, name: str, metric: str) -> float | None:
    """The yardstick minus the federation."""
    if name not in results:
        return None
    baseline_score, federated_score = results[name].overall_score(metric), results["federated"].overall_score(metric)
    return None if baseline_score is None or federated_score is None else baseline_score - federated_score


def _describe_chance(results: ResultsByName, name: str, metric: str) -> str:
    """By the paired bootstrap: both were judged on the same units, drawn alike."""
    interval = _difference_interval(results, name)
    if interval is None:
        return ""
    low, high = (format_points(edge) for edge in interval)
    verdict = "so it may be chance" if _may_be_chance(results, name) else "so the test data at hand do not explain it"
    return f" The interval of the difference is {low} to {high} points, {verdict}."


def _may_be_chance(results: ResultsByName, name: str) -> bool:
    interval = _difference_interval(results, name)
    return interval is not None and interval[0] <= 0 <= interval[1]


def _difference_interval(results: ResultsByName, name: str) -> tuple[float, float] | None:
    """The interval of the yardstick's score minus the federation's."""
    federated, baseline = (results[result_name].intervals.get("paired") or {} for result_name in ("federated", name))
    if (
        not federated.get("values")
        or federated["metric"] != baseline.get("metric")
        or len(federated["values"]) != len(baseline["values"])
    ):
        return None
    differences = sorted(b - a for a, b in zip(federated["values"], baseline["values"], strict=True))
    level = float(results["federated"].intervals.get("level") or 0.95)
    edge = round((1 - level) / 2 * (len(differences) - 1))
    return differences[edge], differences[-1 - edge]


def _overall_score_text(results: ResultsByName, name: str, metric: str) -> str:
    return format_score(metric, results[name].overall_score(metric))


def _gap_text(gap: float) -> str:
    return f"{abs(100 * gap):.1f} points"


# Site by site, what one model has over another, in a sentence made of the numbers.

NEGLIGIBLE_GAIN = 0.005  # half a point: nobody would notice


def gains_by_site(scores: Mapping[str, float], reference_scores: Mapping[str, float]) -> dict[str, float]:
    """At the sites that know both."""
    return {site: scores[site] - reference_scores[site] for site in scores if site in reference_scores}


def are_gains_negligible(gains: Mapping[str, float]) -> bool:
    return all(abs(gain) < NEGLIGIBLE_GAIN for gain in gains.values())


def describe_negligible_gains(gains: Mapping[str, float]) -> str:
    return f"({format_points(fmean(gains.values()))} points {_mean_basis_text(gains)}, no site differs by more than {100 * NEGLIGIBLE_GAIN:g})"


def describe_gains(gains: Mapping[str, float]) -> str:
    """`gains 3.0 points on average over 2 sites: better at 1 (most at a, +8.0) and worse at 1 (most at b, −2.0)`."""
    mean_gain = fmean(gains.values())
    better = {site: gain for site, gain in gains.items() if gain >= NEGLIGIBLE_GAIN}
    worse = {site: gain for site, gain in gains.items() if gain <= -NEGLIGIBLE_GAIN}
    num_unchanged = len(gains) - len(better) - len(worse)
    parts = [
        f"better at {len(better)} (most at {max(better, key=better.__getitem__)}, {format_points(max(better.values()))})"
        if better
        else "",
        f"worse at {len(worse)} (most at {min(worse, key=worse.__getitem__)}, {format_points(min(worse.values()))})"
        if worse
        else "",
        f"about the same at {num_unchanged}" if num_unchanged else "",
    ]
    verb = "gains" if mean_gain >= NEGLIGIBLE_GAIN else "loses" if mean_gain <= -NEGLIGIBLE_GAIN else "changes"
    size_text = format_points(mean_gain) if abs(mean_gain) < NEGLIGIBLE_GAIN else f"{abs(100 * mean_gain):.1f}"
    return f"{verb} {size_text} points {_mean_basis_text(gains)}: {join_names([part for part in parts if part])}"


def _mean_basis_text(gains: Mapping[str, float]) -> str:
    return f"on average over {format_count(len(gains), 'site')}"
