"""Sentences that compare the federated run with its baselines: gains, losses and negligible differences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from pipeline.reports.document.formatting import format_count, format_interval, format_points, format_score, join_names
from pipeline.reports.run.baselines.results import ResultsByName
from pipeline.reports.run.headline_metric import HeadlineMetric

TEST_SET_LABELS = {"pooled": "all sites pooled", "coordinator": "on the coordinator's set"}
NEGLIGIBLE_GAIN = 0.005  # half a point


def baseline_findings(results: ResultsByName, headline: HeadlineMetric, metric: str) -> list[str]:
    describers: tuple[Callable[[ResultsByName, HeadlineMetric, str], str], ...] = (
        _describe_local_only,
        _describe_centralized,
        _describe_privacy_cost,
        _describe_skew_cost,
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
            f"The federated model reaches {format_score(metric, value)} ({headline.metric_title(metric)}, {test_set_label}{interval_text})."
        ]
    )


def _describe_local_only(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    """Site by site, as local-only training has one model per site and so no pooled score."""
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
        return f"Local-only training scores about the same {describe_negligible_gains(gains)}."
    return f"Compared with local-only training, the federated model {describe_gains(gains)}."


def _describe_overall_local_only(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    gap = _score_gap(results, "local_only", metric)
    if gap is None:
        return ""
    local_only_text = f"Local-only training reaches {_overall_score_text(results, 'local_only', metric)}"
    if abs(gap) < NEGLIGIBLE_GAIN:
        return f"{local_only_text}, about the same as the federated model ({_overall_score_text(results, 'federated', metric)})."
    verb = "gains" if gap < 0 else "loses"
    return f"{local_only_text}: the federated model {verb} {_gap_text(gap)}.{_describe_chance(results, 'local_only', metric)}"


def _describe_centralized(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    gap = _score_gap(results, "centralized", metric)
    if gap is None:
        return ""
    central_text, federated_text = (
        _overall_score_text(results, "centralized", metric),
        _overall_score_text(results, "federated", metric),
    )
    if abs(gap) < NEGLIGIBLE_GAIN:
        return f"Centralised training reaches about the same: {central_text} against {federated_text}."
    chance_text = _describe_chance(results, "centralized", metric)
    if gap > 0:
        return f"Centralised training reaches {central_text}: the federated model loses {_gap_text(gap)}.{chance_text}"
    return f"Centralised training reaches only {central_text}, {_gap_text(gap)} below the federated model's {federated_text}.{chance_text}"


def _describe_privacy_cost(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    cost = _score_gap(results, "unprotected", metric)
    if cost is None:
        return ""
    unprotected_text = (
        f"Without privacy protection, the same run reaches {_overall_score_text(results, 'unprotected', metric)}"
    )
    if abs(cost) < NEGLIGIBLE_GAIN:
        return f"{unprotected_text}: the cost of privacy is negligible here ({format_points(cost)} points)."
    chance_text = _describe_chance(results, "unprotected", metric)
    if cost > 0:
        return f"{unprotected_text}: privacy costs {_gap_text(cost)}.{chance_text}"
    return f"{unprotected_text}, {_gap_text(cost)} less: privacy did not lower the score here.{chance_text}"


def _describe_skew_cost(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    cost = _score_gap(results, "unskewed", metric)
    if cost is None:
        return ""
    unskewed_text = (
        f"On images without the feature skew, the same run reaches {_overall_score_text(results, 'unskewed', metric)}"
    )
    if abs(cost) < NEGLIGIBLE_GAIN:
        return f"{unskewed_text}: the cost of the feature skew is negligible here ({format_points(cost)} points)."
    chance_text = _describe_chance(results, "unskewed", metric)
    if cost > 0:
        return f"{unskewed_text}: the feature skew (differences between scanners and degraded images together) costs {_gap_text(cost)}.{chance_text}"
    return f"{unskewed_text}, {_gap_text(cost)} less: the feature skew did not lower the score here.{chance_text}"


def _describe_color_normalization(results: ResultsByName, headline: HeadlineMetric, metric: str) -> str:
    gain, skew_cost = _score_gap(results, "normalized", metric), _score_gap(results, "unskewed", metric)
    if gain is None:
        return ""
    normalized_text = f"Colour normalisation at each site reaches {_overall_score_text(results, 'normalized', metric)}"
    if abs(gain) < NEGLIGIBLE_GAIN:
        return f"{normalized_text}: a negligible change ({format_points(gain)} points)."
    chance_text = _describe_chance(results, "normalized", metric)
    if gain < 0:
        return f"{normalized_text}, {_gap_text(gain)} less than without: it lowers the score here.{chance_text}"
    if skew_cost is None or skew_cost < NEGLIGIBLE_GAIN or _may_be_chance(results, "unskewed"):
        return f"{normalized_text}, {_gap_text(gain)} more than without.{chance_text}"
    recovered_text = (
        f"all of these {_gap_text(skew_cost)}"
        if gain >= skew_cost
        else f"{100 * gain:.1f} of these {_gap_text(skew_cost)}"
    )
    return f"{normalized_text}: it recovers {recovered_text}.{chance_text}"


def _seed_caution(headline: HeadlineMetric) -> str:
    seeds_text = (
        "Each score is from one training run and varies with the seed. Differences at single sites are not tested."
    )
    if headline.intervals:
        return seeds_text
    if headline.global_model_intervals:
        return f"Only the global model has intervals, so a small difference may be chance. {seeds_text}"
    return f"This run has no intervals, so a small difference may be chance. {seeds_text}"


def _score_gap(results: ResultsByName, name: str, metric: str) -> float | None:
    """The baseline's score minus the federated one."""
    if name not in results:
        return None
    baseline_score, federated_score = results[name].overall_score(metric), results["federated"].overall_score(metric)
    return None if baseline_score is None or federated_score is None else baseline_score - federated_score


def _describe_chance(results: ResultsByName, name: str, metric: str) -> str:
    """By the paired bootstrap: both were evaluated on the same draws of units."""
    interval = _difference_interval(results, name)
    if interval is None:
        return ""
    low, high = (format_points(edge) for edge in interval)
    verdict = (
        "so it may be chance" if _may_be_chance(results, name) else "so sampling of the test data does not explain it"
    )
    return f" The interval of the difference is {low} to {high} points, {verdict}."


def _may_be_chance(results: ResultsByName, name: str) -> bool:
    interval = _difference_interval(results, name)
    return interval is not None and interval[0] <= 0 <= interval[1]


def _difference_interval(results: ResultsByName, name: str) -> tuple[float, float] | None:
    """The interval of the baseline's score minus the federated one."""
    intervals, baseline_intervals = results["federated"].intervals, results[name].intervals
    if not (intervals and intervals.paired and baseline_intervals and baseline_intervals.paired):
        return None
    federated, baseline = intervals.paired, baseline_intervals.paired
    if not federated.values or federated.metric != baseline.metric or len(federated.values) != len(baseline.values):
        return None
    differences = sorted(b - a for a, b in zip(federated.values, baseline.values, strict=True))
    edge = round((1 - intervals.confidence_level) / 2 * (len(differences) - 1))
    return differences[edge], differences[-1 - edge]


def _overall_score_text(results: ResultsByName, name: str, metric: str) -> str:
    return format_score(metric, results[name].overall_score(metric))


def _gap_text(gap: float) -> str:
    return f"{abs(100 * gap):.1f} points"


# Gains of one model over another, site by site


def gains_by_site(scores: Mapping[str, float], reference_scores: Mapping[str, float]) -> dict[str, float]:
    """Differences at the sites that have both scores."""
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
