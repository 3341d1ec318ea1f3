"""The verdict on a slide: whether the corrected prevalence of schistocytes is above the threshold of suspicion.

There is a verdict only if the whole 95 % interval is on one side of the threshold, enough cells were counted, and nothing
speaks against the model's error rates on this slide; otherwise the verdict is "cannot decide".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.bundle.operating_points import OperatingPoint
from deploy.slide.prevalence import estimate_prevalence

# fraction of red cells: schistocytes from here on raise suspicion of thrombotic microangiopathy
SUSPICION_THRESHOLD = 0.01
RECOMMENDED_CELLS = 1000  # red cells that a person would count
MIN_CELLS = 100  # no verdict from fewer cells
RESEARCH_USE_NOTICE = "research use only, not a medical device"
VERDICT_ABOVE, VERDICT_BELOW, VERDICT_UNDECIDED = "above the threshold", "below the threshold", "cannot decide"


@dataclass(frozen=True)
class PrevalenceEstimate:
    num_counted: int  # red cells that the out-of-distribution guard accepted
    num_flagged: int  # of these, called positive
    flagged_fraction: float | None  # num_flagged / num_counted
    prevalence: float | None  # corrected
    prevalence_low: float | None
    prevalence_high: float | None
    verdict: str
    needs_review: bool  # the corrected prevalence reaches the threshold, whatever the interval says
    reason: str  # one sentence
    has_enough_cells: bool  # at least RECOMMENDED_CELLS were counted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def assess_prevalence(
    num_counted: int,
    num_flagged: int,
    operating_point: OperatingPoint | None,
    reliability_warnings: Sequence[str] = (),
    threshold: float = SUSPICION_THRESHOLD,
) -> PrevalenceEstimate:
    """`reliability_warnings`: why the model's error rates may not hold on this slide; any of them excludes a verdict."""
    flagged_fraction = num_flagged / num_counted if num_counted else None
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
    needs_review = estimate is not None and estimate >= threshold
    if reason or low is None or high is None:
        return PrevalenceEstimate(
            num_counted=num_counted,
            num_flagged=num_flagged,
            flagged_fraction=flagged_fraction,
            prevalence=estimate,
            prevalence_low=low,
            prevalence_high=high,
            verdict=VERDICT_UNDECIDED,
            needs_review=needs_review,
            reason=reason,
            has_enough_cells=num_counted >= RECOMMENDED_CELLS,
        )
    threshold_text = f"{100 * threshold:g} %"
    if low > threshold:
        verdict, reason = VERDICT_ABOVE, f"the whole interval is above {threshold_text}"
    elif high < threshold:
        verdict, reason = VERDICT_BELOW, f"the whole interval is below {threshold_text}"
    else:
        shortfall_text = (
            ""
            if num_counted >= RECOMMENDED_CELLS
            else f"; {RECOMMENDED_CELLS - num_counted:,} more cells would make {RECOMMENDED_CELLS:,}"
        )
        verdict, reason = VERDICT_UNDECIDED, f"the interval spans {threshold_text}{shortfall_text}"
    return PrevalenceEstimate(
        num_counted=num_counted,
        num_flagged=num_flagged,
        flagged_fraction=flagged_fraction,
        prevalence=estimate,
        prevalence_low=low,
        prevalence_high=high,
        verdict=verdict,
        needs_review=needs_review,
        reason=reason,
        has_enough_cells=num_counted >= RECOMMENDED_CELLS,
    )
