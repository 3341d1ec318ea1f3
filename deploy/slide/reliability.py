"""Warnings about a slide on which the model's measured error rates may not hold."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from deploy.bundle.ood_guard import OUT_OF_DISTRIBUTION
from deploy.slide.image_result import EXCLUSION_REASONS
from deploy.slide.reader import SCALE_TOLERANCE
from deploy.slide.slide_result import SlideCounts
from deploy.slide.verdict import RECOMMENDED_CELLS

MAX_UNCOUNTED_FRACTION = 0.2  # of red cells rejected or in clumps; a few are on every slide


def find_reliability_warnings(counts: SlideCounts, unfit_reason: str | None = None) -> Iterator[str]:
    """Each of them excludes a verdict. `unfit_reason`: why the local calibration forbids one."""
    if unfit_reason:
        yield f"{unfit_reason}: do not use this model here, or measure it again (`hemofed edge calibrate`)"
    num_out_of_distribution, num_clumps = (
        counts.excluded.get(reason, 0) for reason in (OUT_OF_DISTRIBUTION, EXCLUSION_REASONS["clump"])
    )
    num_red_cells = num_out_of_distribution + counts.num_counted
    if num_out_of_distribution > MAX_UNCOUNTED_FRACTION * num_red_cells:
        yield (
            f"{num_out_of_distribution:,} of {num_red_cells:,} red cells look unlike the validation images and are not counted: check "
            "stain, focus, light and magnification"
        )
    if num_clumps > MAX_UNCOUNTED_FRACTION * (num_clumps + counts.num_counted):
        yield (
            f"{num_clumps:,} clumps of cells could not be separated, against {counts.num_counted:,} single cells: the fields "
            "are too crowded; take them where cells do not overlap"
        )
    if counts.has_drifted:
        yield (
            "on average, the counted cells look unlike the validation images: check stain, focus, light and "
            "magnification, or measure the model here (`hemofed edge calibrate`)"
        )
    if counts.rbc_diameters_px and max(counts.rbc_diameters_px) > 1.5 * min(counts.rbc_diameters_px):
        yield "the fields differ in magnification: give those of one microscope setting, or set --rbc-diameter-px"
    if (
        counts.measured_diameters_px
        and not SCALE_TOLERANCE[0]
        < median(counts.measured_diameters_px) / median(counts.rbc_diameters_px)
        < SCALE_TOLERANCE[1]
    ):
        yield (
            f"the cells measure about {median(counts.measured_diameters_px):.0f} pixels, not {median(counts.rbc_diameters_px):.0f} as given: leave --rbc-diameter-px "
            "out, or correct it"
        )
    if 0 < counts.num_single_cells < RECOMMENDED_CELLS:
        yield f"{counts.num_single_cells:,} images of single cells may be a selection: give whole fields, or all cells of a slide"
    if not counts.num_found:
        yield "no cell was found: check that the image is a smear, in focus and evenly lit"
