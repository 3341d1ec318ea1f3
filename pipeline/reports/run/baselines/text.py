"""What the yardsticks say, in sentences made of the numbers: gains, losses, and when a difference is too small to tell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean

from pipeline.reports.document.formatting import count_of, joined, points, score, span
from pipeline.reports.run.baselines.results import Contender
from pipeline.reports.run.headline_metric import Lens

WHERE = {"pooled": "all sites pooled", "coordinator": "on the coordinator's set"}
Every = Mapping[str, Contender]


def findings(every: Every, lens: Lens, metric: str) -> list[str]:
    tell: tuple[Callable[[Every, Lens, str], str], ...] = (_alone, _pooling, _protection, _scanner, _normalising)
    found = [words for one in tell if (words := one(every, lens, metric))]
    return [*_ours(every, lens, metric), *found, _caution(lens)] if found else []


def _ours(every: Every, lens: Lens, metric: str) -> list[str]:
    value, edges = every["federated"].whole(metric), every["federated"].interval(metric)
    sure = f", {lens.level} interval {span(metric, *edges)[1:-1]}" if edges else ""
    where = WHERE[every["federated"].where]
    return (
        []
        if value is None
        else [f"The federation reaches {score(metric, value)} ({lens.name(metric)}, {where}{sure})."]
    )


def _alone(every: Every, lens: Lens, metric: str) -> str:
    """Site by site: each alone has a model of its own, so there is no pooled score to set beside the federation's."""
    if "local" not in every:
        return ""
    ours, theirs = every["federated"].sites(metric), every["local"].sites(metric)
    gains = gains_of(ours, theirs)
    if not gains:
        return _alone_as_a_whole(every, lens, metric)
    if all_alike(gains):
        return f"Each site alone would do about the same {alike_words(gains)}."
    return f"Against each site alone, the federation {gain_words(gains)}."


def _alone_as_a_whole(every: Every, lens: Lens, metric: str) -> str:
    gap = _gap(every, "local", metric)
    if gap is None:
        return ""
    alone = f"Each site alone reaches {_value(every, 'local', metric)}"
    if abs(gap) < TINY:
        return f"{alone}, practically what the federation reaches ({_value(every, 'federated', metric)})."
    way = "gains" if gap < 0 else "loses"
    return f"{alone}: the federation {way} {_size(gap)} over it.{_chance(every, 'local', metric)}"


def _pooling(every: Every, lens: Lens, metric: str) -> str:
    gap = _gap(every, "central", metric)
    if gap is None:
        return ""
    reached, ours = _value(every, "central", metric), _value(every, "federated", metric)
    if abs(gap) < TINY:
        return f"All data in one place would do practically the same: {reached} against {ours}."
    chance = _chance(every, "central", metric)
    if gap > 0:
        return f"All data in one place would reach {reached}: the federation loses {_size(gap)} to it.{chance}"
    return f"All data in one place reaches only {reached}, {_size(gap)} below the federation's {ours}.{chance}"


def _protection(every: Every, lens: Lens, metric: str) -> str:
    cost = _gap(every, "unprotected", metric)
    if cost is None:
        return ""
    reached = f"Unprotected, the same federation reaches {_value(every, 'unprotected', metric)}"
    if abs(cost) < TINY:
        return f"{reached}: privacy costs next to nothing here ({points(cost)} points)."
    chance = _chance(every, "unprotected", metric)
    if cost > 0:
        return f"{reached}: privacy costs {_size(cost)}.{chance}"
    return f"{reached}, {_size(cost)} less: here privacy did no harm.{chance}"


def _scanner(every: Every, lens: Lens, metric: str) -> str:
    cost = _gap(every, "unskewed", metric)
    if cost is None:
        return ""
    reached = f"On the images as they were before the scanners, the same federation reaches {_value(every, 'unskewed', metric)}"
    if abs(cost) < TINY:
        return f"{reached}: the scanners cost next to nothing here ({points(cost)} points)."
    chance = _chance(every, "unskewed", metric)
    if cost > 0:
        return f"{reached}: the scanners, their differences and their faults together, cost {_size(cost)}.{chance}"
    return f"{reached}, {_size(cost)} less: here the scanners did no harm.{chance}"


def _normalising(every: Every, lens: Lens, metric: str) -> str:
    won, cost = _gap(every, "normalised", metric), _gap(every, "unskewed", metric)
    if won is None:
        return ""
    reached = f"Colour normalisation at each site reaches {_value(every, 'normalised', metric)}"
    if abs(won) < TINY:
        return f"{reached}: next to no change ({points(won)} points)."
    chance = _chance(every, "normalised", metric)
    if won < 0:
        return f"{reached}, {_size(won)} less than without: here it does harm.{chance}"
    if cost is None or cost < TINY or _may_be_chance(every, "unskewed"):
        return f"{reached}, {_size(won)} more than without.{chance}"
    share = f"all of these {_size(cost)}" if won >= cost else f"{100 * won:.1f} of these {_size(cost)}"
    return f"{reached}: it wins back {share}.{chance}"


def _caution(lens: Lens) -> str:
    seeds = (
        "Each score is one training run; another seed would move it too. Differences at single sites are not tested."
    )
    if lens.intervals:
        return seeds
    if lens.common:
        return f"There are intervals of the common model alone, so a small difference may be chance. {seeds}"
    return f"No intervals were made for this run, so a small difference may be chance. {seeds}"


def _gap(every: Every, name: str, metric: str) -> float | None:
    """The yardstick minus the federation."""
    if name not in every:
        return None
    theirs, ours = every[name].whole(metric), every["federated"].whole(metric)
    return None if theirs is None or ours is None else theirs - ours


def _chance(every: Every, name: str, metric: str) -> str:
    """By the paired bootstrap: both were judged on the same units, drawn alike."""
    edges = _difference(every, name)
    if edges is None:
        return ""
    low, high = (points(edge) for edge in edges)
    verdict = "so it may be chance" if _may_be_chance(every, name) else "so the test data at hand do not explain it"
    return f" The interval of the difference is {low} to {high} points, {verdict}."


def _may_be_chance(every: Every, name: str) -> bool:
    edges = _difference(every, name)
    return edges is not None and edges[0] <= 0 <= edges[1]


def _difference(every: Every, name: str) -> tuple[float, float] | None:
    """The interval of the yardstick's score minus the federation's."""
    ours, theirs = (every[one].intervals.get("paired") or {} for one in ("federated", name))
    if not ours.get("values") or ours["metric"] != theirs.get("metric") or len(ours["values"]) != len(theirs["values"]):
        return None
    apart = sorted(b - a for a, b in zip(ours["values"], theirs["values"], strict=True))
    level = float(every["federated"].intervals.get("level") or 0.95)
    edge = round((1 - level) / 2 * (len(apart) - 1))
    return apart[edge], apart[-1 - edge]


def _value(every: Every, name: str, metric: str) -> str:
    return score(metric, every[name].whole(metric))


def _size(gap: float) -> str:
    return f"{abs(100 * gap):.1f} points"


# Site by site, what one model has over another, in a sentence made of the numbers.

TINY = 0.005  # half a point: nobody would notice


def gains_of(ours: Mapping[str, float], theirs: Mapping[str, float]) -> dict[str, float]:
    """At the sites that know both."""
    return {site: ours[site] - theirs[site] for site in ours if site in theirs}


def all_alike(gains: Mapping[str, float]) -> bool:
    return all(abs(gain) < TINY for gain in gains.values())


def alike_words(gains: Mapping[str, float]) -> str:
    return f"({points(fmean(gains.values()))} points {_over(gains)}, no site differs by more than {100 * TINY:g})"


def gain_words(gains: Mapping[str, float]) -> str:
    """`gains 3.0 points on average over 2 sites: better at 1 (most at a, +8.0) and worse at 1 (most at b, −2.0)`."""
    mean = fmean(gains.values())
    better = {site: gain for site, gain in gains.items() if gain >= TINY}
    worse = {site: gain for site, gain in gains.items() if gain <= -TINY}
    even = len(gains) - len(better) - len(worse)
    counts = [
        f"better at {len(better)} (most at {max(better, key=better.__getitem__)}, {points(max(better.values()))})" if better else "",
        f"worse at {len(worse)} (most at {min(worse, key=worse.__getitem__)}, {points(min(worse.values()))})" if worse else "",
        f"about the same at {even}" if even else "",
    ]  # fmt: skip
    verb = "gains" if mean >= TINY else "loses" if mean <= -TINY else "changes"
    by = points(mean) if abs(mean) < TINY else f"{abs(100 * mean):.1f}"
    return f"{verb} {by} points {_over(gains)}: {joined([words for words in counts if words])}"


def _over(gains: Mapping[str, float]) -> str:
    return f"on average over {count_of(len(gains), 'site')}"
