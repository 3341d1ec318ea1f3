"""Rogan and Gladen's estimate on worked examples, and the coverage of the interval by simulation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from deploy.bundle.operating_points import OperatingPoint
from deploy.slide.prevalence import estimate_prevalence
from deploy.slide.slide_result import SlideCounts
from deploy.slide.verdict import VERDICT_ABOVE, VERDICT_BELOW, VERDICT_UNDECIDED, assess_prevalence


def make_point(sens: float, spec: float, positives: int = 100, negatives: int = 1000) -> OperatingPoint:
    tp, tn = round(sens * positives), round(spec * negatives)
    return OperatingPoint(name="p", log_odds=0.0, tp=tp, fn=positives - tp, tn=tn, fp=negatives - tn)


def test_rogan_and_gladen_by_hand():
    """30 of 1,000 flagged at sensitivity 0.5 and specificity 0.98: (0.03 - 0.02) / (0.5 + 0.98 - 1)."""
    estimate, low, high = estimate_prevalence(1000, 30, make_point(0.5, 0.98))
    assert estimate == pytest.approx(0.01 / 0.48)
    assert low is not None
    assert high is not None
    assert low < estimate < high


def test_rogan_gladen_of_a_perfect_model_is_the_flagged_fraction():
    estimate, _, _ = estimate_prevalence(1000, 25, make_point(1, 1))
    assert estimate == pytest.approx(0.025)


def test_prevalence_is_not_negative():
    estimate, low, high = estimate_prevalence(1000, 15, make_point(0.5, 0.98))
    assert (estimate, low) == (0.0, 0.0)
    assert high is not None
    assert high > 0


@pytest.mark.parametrize(("counted", "flagged", "spec"), [(1000, 1000, 0.998), (200, 150, 0.998), (1000, 0, 0.98)])
def test_counts_without_compatible_prevalence_give_no_verdict(counted, flagged, spec):
    """All cells flagged at sensitivity 0.5; none flagged where 20 false positives are expected."""
    known = make_point(0.5, spec, 1000, 10_000)
    assert estimate_prevalence(counted, flagged, known)[1:] == (None, None)
    estimate = assess_prevalence(counted, flagged, known)
    assert estimate.verdict == VERDICT_UNDECIDED
    assert "do not fit the measured error rates" in estimate.reason


def test_few_cells_give_no_verdict():
    good = make_point(0.8, 0.999, 500, 20_000)
    assert assess_prevalence(1, 1, good).verdict == VERDICT_UNDECIDED
    assert "at least 100" in assess_prevalence(50, 5, good).reason
    assert assess_prevalence(50, 5, good).needs_review


def test_reliability_warnings_exclude_a_verdict():
    good = make_point(0.8, 0.999, 500, 20_000)
    assert assess_prevalence(1000, 60, good).verdict == VERDICT_ABOVE
    estimate = assess_prevalence(1000, 60, good, ["the light is strange"])
    assert (estimate.verdict, estimate.reason, estimate.needs_review) == (
        VERDICT_UNDECIDED,
        "the light is strange",
        True,
    )


def test_prevalence_of_a_model_at_chance_is_undefined():
    assert estimate_prevalence(1000, 30, make_point(0.02, 0.98)) == (None, None, None)
    estimate = assess_prevalence(1000, 30, make_point(0.02, 0.98))
    assert estimate.verdict == VERDICT_UNDECIDED
    assert "chance" in estimate.reason


@pytest.mark.parametrize("true", [0.002, 0.01, 0.02, 0.1])
def test_prevalence_interval_coverage(true):
    """Each repetition draws cells, sensitivity and specificity."""
    rng, sens, spec, hits = np.random.default_rng(7), 0.5, 0.995, 0
    for _ in range(2000):
        tp, tn = rng.binomial(80, sens), rng.binomial(1500, spec)
        known = OperatingPoint(name="p", log_odds=0, tp=tp, fn=80 - tp, tn=tn, fp=1500 - tn)
        called = rng.binomial(1000, true * sens + (1 - true) * (1 - spec))
        _, low, high = estimate_prevalence(1000, int(called), known)
        hits += low is not None and high is not None and low <= true <= high
    assert 0.93 <= hits / 2000 <= 0.995


@pytest.mark.parametrize("true", [0.002, 0.01, 0.05])
def test_prevalence_interval_coverage_with_spread_between_sites(true):
    """The rates of the slide's site differ from the pooled ones; without the spread the interval covers too little."""
    rng, hits, blind = np.random.default_rng(3), 0, 0
    tp, tn = 250, 19_900
    pooled = OperatingPoint(name="p", log_odds=0, tp=tp, fn=500 - tp, tn=tn, fp=20_000 - tn)
    known = pooled.model_copy(update={"sensitivity_spread": 0.15, "specificity_spread": 0.002})
    for _ in range(1000):
        sens, spec = rng.normal(0.5, 0.15), rng.normal(0.995, 0.002)
        chance = true * np.clip(sens, 0, 1) + (1 - true) * (1 - np.clip(spec, 0, 1))
        called = int(rng.binomial(3000, chance))
        for one in (known, pooled):
            _, low, high = estimate_prevalence(3000, called, one)
            held = low is not None and high is not None and low <= true <= high
            hits, blind = hits + (held and one is known), blind + (held and one is pooled)
    assert hits >= 930
    assert blind < hits - 50


def test_reason_names_too_few_and_too_many_flagged_cells():
    known = make_point(0.5, 0.98, 1000, 10_000)
    assert assess_prevalence(1000, 0, known).reason.startswith("so few flagged cells")
    assert assess_prevalence(1000, 900, known).reason.startswith("so many flagged cells")


def test_verdict_follows_from_the_interval():
    good = make_point(0.8, 0.999, 500, 20_000)
    assert assess_prevalence(1000, 60, good).verdict == VERDICT_ABOVE
    assert assess_prevalence(5000, 4, good).verdict == VERDICT_BELOW
    both = assess_prevalence(1000, 9, good)
    assert both.verdict == VERDICT_UNDECIDED
    few = assess_prevalence(300, 3, good)
    assert "700 more cells" in few.reason


def test_false_positives_of_a_healthy_slide_are_corrected():
    """At specificity 0.98 a healthy slide shows 20 of 1,000, twice the threshold, and is not suspicious."""
    estimate = assess_prevalence(1000, 20, make_point(0.6, 0.98, 100, 2000))
    assert estimate.prevalence == pytest.approx(0, abs=1e-12)
    assert not estimate.needs_review
    assert estimate.verdict != VERDICT_ABOVE


def test_more_labelled_cells_narrow_the_interval():
    _, low, high = estimate_prevalence(1000, 20, make_point(0.5, 0.998, 50, 1000))
    _, surer, sure = estimate_prevalence(1000, 20, make_point(0.5, 0.998, 5000, 100_000))
    assert low is not None
    assert high is not None
    assert surer is not None
    assert sure is not None
    assert sure - surer < high - low


def test_slide_counts_derive_the_flagged_fraction_and_whether_they_are_enough():
    enough = SlideCounts(num_counted=1000, num_flagged=20, num_found=1100, excluded={}, drift=None)
    assert (enough.flagged_fraction, enough.has_enough_cells) == (0.02, True)
    few = replace(enough, num_counted=300, num_flagged=3)
    assert (few.flagged_fraction, few.has_enough_cells) == (0.01, False)
    assert replace(enough, num_counted=0, num_flagged=0).flagged_fraction is None
    assert [replace(enough, drift=drift).has_drifted for drift in (None, 0.99, 1.01)] == [False, False, True]


def test_no_counted_cells_or_no_operating_point():
    assert assess_prevalence(0, 0, make_point(0.5, 0.99)).reason == "no cell was counted"
    assert "edge calibrate" in assess_prevalence(100, 3, None).reason
