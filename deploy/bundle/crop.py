"""How large a crop a bundle's network is shown, and whether an image is a field or a single cell."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.bundle.bundle import ModelBundle
    from deploy.imaging.images import InputImage


MIN_FIELD_CROPS = 2.0  # an image this many windows high and wide is a field


def is_field_image(bundle: ModelBundle, input_image: InputImage) -> bool:
    """A picture so large is no single cell."""
    crop_diameters, rbc_diameter_px = bundle.manifest.crop_diameters, bundle.manifest.rbc_diameter_px
    return (
        crop_diameters is not None
        and rbc_diameter_px is not None
        and min(input_image.pixels.shape[:2]) >= MIN_FIELD_CROPS * crop_diameters * rbc_diameter_px
    )


def describe_crop(bundle: ModelBundle) -> str:
    """How a single cell has to be cut out to look as the training cells did."""
    crop_diameters, rbc_diameter_px = bundle.manifest.crop_diameters, bundle.manifest.rbc_diameter_px
    if crop_diameters is None or rbc_diameter_px is None:
        return f"as the study's images, {bundle.manifest.input_size[0]} x {bundle.manifest.input_size[1]} pixels"
    crop_px = round(crop_diameters * rbc_diameter_px)
    return f"a square of {crop_diameters:.2f} cell diameters about its middle: {crop_px} pixels where a red cell measures {rbc_diameter_px:.0f}"
