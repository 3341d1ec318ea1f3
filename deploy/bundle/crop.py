"""The crop of a field that a bundle's network sees, and whether an image is a field or a single cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.bundle.bundle import ModelBundle
    from deploy.imaging.input_image import InputImage


MIN_FIELD_CROPS = 2.0  # an image of at least so many crops in height and width is a field


def is_field_image(bundle: ModelBundle, input_image: InputImage) -> bool:
    crop_diameters, rbc_diameter_px = bundle.manifest.crop_diameters, bundle.manifest.rbc_diameter_px
    return (
        crop_diameters is not None
        and rbc_diameter_px is not None
        and min(input_image.pixels.shape[:2]) >= MIN_FIELD_CROPS * crop_diameters * rbc_diameter_px
    )


def describe_crop(bundle: ModelBundle) -> str:
    """How to cut out a single cell so that it matches the training cells."""
    crop_diameters, rbc_diameter_px = bundle.manifest.crop_diameters, bundle.manifest.rbc_diameter_px
    if crop_diameters is None or rbc_diameter_px is None:
        return f"as the study's images, {bundle.manifest.input_size[0]} x {bundle.manifest.input_size[1]} pixels"
    crop_px = round(crop_diameters * rbc_diameter_px)
    return f"a square of {crop_diameters:.2f} cell diameters around its center: {crop_px} pixels where a red cell measures {rbc_diameter_px:.0f}"
