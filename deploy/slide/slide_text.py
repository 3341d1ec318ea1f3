"""A slide's result in words: the same on a terminal, on a page and in a DICOM report."""

from __future__ import annotations

from collections.abc import Iterator

from deploy.bundle.operating_points import OperatingPoint
from deploy.inference.runtime import ModelInfo
from deploy.slide.slide_result import SlideResult
from deploy.slide.verdict import RECOMMENDED_CELLS, SUSPICION_THRESHOLD, VERDICT_ABOVE, VERDICT_BELOW

VERDICT_TONES = {VERDICT_ABOVE: "above", VERDICT_BELOW: "below"}
THRESHOLD_TEXT = f"{100 * SUSPICION_THRESHOLD:g} %"


def format_percent(fraction: float | None) -> str:
    return "–" if fraction is None else f"{100 * fraction:.2f} %"


def verdict_tone(slide: SlideResult) -> str:
    """The class of the verdict's box in the pages' style."""
    return VERDICT_TONES.get(slide.estimate.verdict, "open")


def format_headline(slide: SlideResult) -> str:
    verdict, reason = slide.estimate.verdict, slide.estimate.reason
    if verdict in VERDICT_TONES:
        return f"{verdict} of {THRESHOLD_TEXT}: {reason}"
    review_text = f"; the estimate is at or above {THRESHOLD_TEXT}: have a person look at the slide"
    return f"{verdict}: {reason}" + (review_text if slide.estimate.needs_review else "")


def build_rows(slide: SlideResult, model: ModelInfo) -> list[tuple[str, str]]:
    """The rows of the report: (label, value)."""
    return [
        *_iter_count_rows(slide),
        *_iter_rate_rows(slide),
        ("model", f"{model.title}, signed by {model.signer}, {model.precision}"),
        ("calibrated on", model.calibrated_on),
    ]


def _iter_count_rows(slide: SlideResult) -> Iterator[tuple[str, str]]:
    counts = slide.counts
    reached_text = f"{RECOMMENDED_CELLS:,} were {'' if counts.has_enough_cells else 'not '}reached"
    yield "cells found", f"{counts.num_found:,}"
    yield "counted", f"{counts.num_counted:,} ({reached_text})"
    for reason, num_cells in counts.excluded.items():
        yield f"not counted: {reason}", f"{num_cells:,}"
    flagged_text = format_percent(counts.flagged_fraction)
    yield f"called {slide.positive_class or 'positive'}", f"{counts.num_flagged:,} ({flagged_text} of those counted)"


def _iter_rate_rows(slide: SlideResult) -> Iterator[tuple[str, str]]:
    estimate, point, counts = slide.estimate, slide.operating_point, slide.counts
    if point:
        rates = ", ".join(_iter_rates(point))
        yield "operating point", f"{point.name or 'chosen'}: probability {point.probability:.4f}; {rates}"
    if estimate.prevalence is not None:
        interval = f"{format_percent(estimate.prevalence_low)} to {format_percent(estimate.prevalence_high)}"
        label = f"{slide.positive_class or 'positive'} corrected for these errors"
        yield label, f"{format_percent(estimate.prevalence)} (95 %: {interval})"
    if counts.drift is not None:
        likeness = "unlike" if counts.has_drifted else "like"
        yield "drift", f"{counts.drift:.2f} (limit 1): the cells look {likeness} the validation images"


def _iter_rates(point: OperatingPoint) -> Iterator[str]:
    for name, rate, spread in (
        ("sensitivity", point.sensitivity, point.sensitivity_spread),
        ("specificity", point.specificity, point.specificity_spread),
    ):
        if rate is not None:
            yield f"{name} {rate:.4f}" + (f" (±{spread:.2g} between sites)" if spread else "")
