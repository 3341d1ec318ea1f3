"""Prevalence of schistocytes on a slide, corrected for the model's error rates, with a 95 % interval and a verdict.

A model with false positives finds schistocytes on every healthy slide, and one with a sensitivity of 0.5 counts half of
them. Rogan and Gladen (1978) correct both: prevalence = (flagged fraction + spec - 1) / (sens + spec - 1).
The interval holds every prevalence that is compatible with the count. Its variance has three parts: the count, both
error rates (measured on a limited number of labelled cells, shrunk and weighted as in Lang and Reiczigel 2014), and the
differences between sites, because a slide comes from one site and the rates come from several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.bundle.operating_points import OperatingPoint

# fraction of red cells: schistocytes from here on raise suspicion of thrombotic microangiopathy
SUSPICION_THRESHOLD = 0.01
RECOMMENDED_CELLS = 1000  # red cells that a person would count
MIN_CELLS = 100  # no verdict from fewer cells
Z_SCORE_95 = 1.959963984540054  # 95 %
PREVALENCE_GRID = tuple((n / 4000) ** 2 for n in range(4001))  # 0 to 1; near the threshold in steps of 1/200 of it
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


def estimate_prevalence(
    num_counted: int, num_flagged: int, operating_point: OperatingPoint
) -> tuple[float | None, float | None, float | None]:
    """Rogan and Gladen's estimate and the limits of its 95 % interval.

    The estimate is None if sensitivity + specificity <= 1; the limits are None if no prevalence explains the count.
    """
    sens, spec = operating_point.sensitivity or 0.0, operating_point.specificity or 0.0
    if sens + spec <= 1:
        return None, None, None
    apparent = num_flagged / num_counted
    estimate = _clip_fraction((apparent + spec - 1) / (sens + spec - 1))
    n_sens, n_spec = operating_point.tp + operating_point.fn + 2, operating_point.tn + operating_point.fp + 2
    sens, spec = (operating_point.tp + 1) / n_sens, (operating_point.tn + 1) / n_spec
    var_sens = sens * (1 - sens) / n_sens + operating_point.sensitivity_spread**2
    var_spec = spec * (1 - spec) / n_spec + operating_point.specificity_spread**2

    def is_plausible(share: float) -> bool:
        expected = share * sens + (1 - share) * (1 - spec)
        variance = expected * (1 - expected) / num_counted + share**2 * var_sens + (1 - share) ** 2 * var_spec
        return (apparent - expected) ** 2 <= Z_SCORE_95**2 * variance

    plausible = [share for share in PREVALENCE_GRID if is_plausible(share)]
    return (estimate, plausible[0], plausible[-1]) if plausible else (estimate, None, None)


def _clip_fraction(value: float) -> float:
    return min(1.0, max(0.0, value))
