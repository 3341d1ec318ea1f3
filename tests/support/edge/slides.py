"""The result of a slide from the results of its images."""

from __future__ import annotations

from collections.abc import Sequence

from deploy.bundle.operating_points import OperatingPoint
from deploy.inference.runtime import BundleRuntime
from deploy.slide.image_result import ImageResult, ImageSummary
from deploy.slide.session import SlideSession
from deploy.slide.slide_result import SlideResult


def count_slide(
    results: Sequence[ImageResult], runtime: BundleRuntime, operating_point: OperatingPoint | None
) -> SlideResult:
    session = SlideSession(runtime, operating_point)
    for result in results:
        session.add_image(result.summarize())
    return session.result()


def make_summary(digest: int = 0, **changes: object) -> ImageSummary:
    """A field of 210 counted cells, 10 of them flagged; 17 more regions are excluded."""
    fields = {
        "name": f"field-{digest}.png",
        "kind": "field",
        "pixel_digest": f"{digest:064x}",
        "patient": None,
        "study": None,
        "num_found": 227,
        "num_counted": 210,
        "num_flagged": 10,
        "excluded": {"platelet": 12, "not a cell": 5},
        "feature_sums": None,
        "rbc_diameter_px": 41.0,
    }
    return ImageSummary.model_validate(fields | changes)
