"""The verdict on a slide: whether the corrected prevalence of schistocytes is above the threshold of suspicion.

There is a verdict only if the whole 95 % interval is on one side of the threshold, enough cells were counted, and nothing
speaks against the model's error rates on this slide; otherwise the verdict is "cannot decide".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deploy.bundle.operating_points import OperatingPoint
from deploy.slide.prevalence import estimate_prevalence

# fraction of red cells: schistocytes from here on raise suspicion of thrombotic microangiopathy
SUSPICION_THRESHOLD = 0.01
RECOMMENDED_CELLS = 1000  # red cells that a person would count
MIN_CELLS = 100  # no verdict from fewer cells
VERDICT_ABOVE, VERDICT_BELOW, VERDICT_UNDECIDED = "above the threshold", "below the threshold", "cannot decide"


@dataclass(frozen=True)
class PrevalenceEstimate:
    prevalence: float | None  # corrected for the model's errors
    prevalence_low: float | None
    prevalence_high: float | None
    verdict: str
    needs_review: bool  # the corrected prevalence reaches the threshold, whatever the interval says
    reason: str  # one sentence


def assess_prevalence(
    num_counted: int,
    num_flagged: int,
    operating_point: OperatingPoint | None,
    reliability_warnings: Sequence[str] = (),
    threshold: float = SUSPICION_THRESHOLD,
) -> PrevalenceEstimate:
    """`reliability_warnings`: why the model's error rates may not hold on this slide; any of them excludes a verdict."""
    estimate, low, high, reason = None, None, None, ""
    if not num_counted:
        reason = "no cell was counted"
    elif operating_point is None or operating_point.sensitivity is None or operating_point.specificity is None:
        reason = "the model has no error rates for cells of this kind; measure it: `hemofed edge calibrate`"
    else:
        estimate, low, high = estimate_prevalence(num_counted, num_flagged, operating_point)
        if estimate is None:
            reason = "at this operating point the model does not beat chance; choose another one"
        elif low is None:
            quantity = "few" if num_flagged / num_counted < 1 - operating_point.specificity else "many"
            reason = f"so {quantity} flagged cells do not fit the measured error rates; measure the model here: `hemofed edge calibrate`"
        elif num_counted < MIN_CELLS:
            reason = f"{num_counted} cells are too few; count at least {MIN_CELLS}, better {RECOMMENDED_CELLS:,}"
        elif reliability_warnings:
            reason = reliability_warnings[0]
    verdict = VERDICT_UNDECIDED
    if not reason and low is not None and high is not None:
        verdict, reason = _compare_interval(low, high, num_counted, threshold)
    return PrevalenceEstimate(
        prevalence=estimate,
        prevalence_low=low,
        prevalence_high=high,
        verdict=verdict,
        needs_review=estimate is not None and estimate >= threshold,
        reason=reason,
    )


def _compare_interval(low: float, high: float, num_counted: int, threshold: float) -> tuple[str, str]:
    """The verdict, and the reason for it."""
    threshold_text = f"{100 * threshold:g} %"
    if low > threshold:
        return VERDICT_ABOVE, f"the whole interval is above {threshold_text}"
    if high < threshold:
        return VERDICT_BELOW, f"the whole interval is below {threshold_text}"
    missing = RECOMMENDED_CELLS - num_counted
    shortfall_text = f"; {missing:,} more cells would make {RECOMMENDED_CELLS:,}" if missing > 0 else ""
    return VERDICT_UNDECIDED, f"the interval spans {threshold_text}{shortfall_text}"
