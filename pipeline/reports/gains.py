"""Site by site, what one model has over another, in a sentence made of the numbers."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from pipeline.reports.words import count_of, joined, points

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
