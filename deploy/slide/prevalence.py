"""What the counts on a slide say about the patient's blood.

A model that calls 2 of 1,000 whole cells broken finds some on every healthy slide, and one that sees half of the broken
ones counts half of them. Rogan and Gladen (1978) take both back: prevalence = (share + spec - 1) / (sens + spec - 1).
The interval holds every prevalence under which the count would be no surprise, given the chance in the count, in both
error rates, which were measured on a number of labelled cells (as Lang and Reiczigel 2014 shrink and weigh them), and
the differences between places: a slide comes from one, and the rates from several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.bundle.operating_points import OperatingPoint

SUSPICION_THRESHOLD = (
    0.01  # of red cells: the share of schistocytes that raises suspicion of thrombotic microangiopathy
)
RECOMMENDED_CELLS = 1000  # red cells that a person would count
MIN_CELLS = 100  # without so many nothing is decided: single cells are picked, not counted
Z_SCORE_95 = 1.959963984540054  # 95 %
PREVALENCE_GRID = tuple(
    (n / 4000) ** 2 for n in range(4001)
)  # shares from 0 to 1; at the line, a two-hundredth of it apart
RESEARCH_USE_NOTICE = "research use only, not a medical device"
VERDICT_ABOVE, VERDICT_BELOW, VERDICT_UNDECIDED = "above the line", "below the line", "cannot decide"


@dataclass(frozen=True)
class PrevalenceEstimate:
    num_counted: int  # red cells that the model answered for
    num_flagged: int  # called positive among them
    flagged_fraction: float | None  # flagged / counted
    prevalence: float | None  # corrected
    prevalence_low: float | None
    prevalence_high: float | None
    verdict: str
    needs_review: bool  # the corrected prevalence reaches the line, whether or not chance can be ruled out
    reason: str  # in a sentence
    has_enough_cells: bool  # ENOUGH cells were counted

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def assess_prevalence(
    num_counted: int,
    num_flagged: int,
    operating_point: OperatingPoint | None,
    reliability_warnings: Sequence[str] = (),
    threshold: float = SUSPICION_THRESHOLD,
) -> PrevalenceEstimate:
    """`doubts`: why the model's rates may not hold on this slide; with any, nothing is decided."""
    flagged_fraction = num_flagged / num_counted if num_counted else None
    estimate, low, high, reason = None, None, None, ""
    if not num_counted:
        reason = "no cell was counted"
    elif operating_point is None or operating_point.sensitivity is None or operating_point.specificity is None:
        reason = "the model was never measured on labelled cells of this kind; run `hemofed edge calibrate` with some"
    else:
        estimate, low, high = estimate_prevalence(num_counted, num_flagged, operating_point)
        if estimate is None:
            reason = "at this operating point the model is no better than chance; choose another one"
        elif low is None:
            quantity = "few" if num_flagged / num_counted < 1 - operating_point.specificity else "many"
            reason = f"so {quantity} calls do not fit the error rates that were measured; measure the model here: `hemofed edge calibrate`"
        elif num_counted < MIN_CELLS:
            reason = f"{num_counted} cells are too few; at least {MIN_CELLS} have to be counted, better {RECOMMENDED_CELLS:,}"
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
        verdict, reason = VERDICT_ABOVE, f"the whole interval lies above {threshold_text}"
    elif high < threshold:
        verdict, reason = VERDICT_BELOW, f"the whole interval lies below {threshold_text}"
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
    """Rogan and Gladen's estimate, and limits at 95 %.

    None where the test is no test; no limits where no prevalence whatever would give such a count.
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
