"""The size of a cell of each type, and how it looks inside: density, central pallor and mottling.

A size is the radius in pixels of the circle with the same area, measured on labelled cells of a public data set (see
__init__.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numpy.random import Generator

from sites.data.renderer.polygons import sample_uniform

RADIUS_PIXELS: dict[str, tuple[float, float]] = {  # median, standard deviation of the logarithm
    "normal": (19.5, 0.09),
    "macrocyte": (24.4, 0.07),
    "microcyte": (15.6, 0.10),
    "spherocyte": (16.6, 0.13),
    "target": (21.0, 0.13),
    "stomatocyte": (20.2, 0.08),
    "ovalocyte": (18.6, 0.11),
    "teardrop": (17.2, 0.15),
    "burr": (18.6, 0.11),
    "schistocyte": (19.5, 0.15),  # multiplies the outline, which is smaller than the unit circle
    "hypochromia": (19.8, 0.12),
    "elliptocyte": (17.5, 0.13),
}


@dataclass(frozen=True)
class CellAppearance:
    density: float = 1.0  # haemoglobin, compared with an average cell
    edge_width: float = 1.3  # pixels from the outline to full thickness
    pallor_depth: float = 0.5  # fraction of the thickness that the pallor removes
    pallor_start: float = 0.3  # the pallor begins and is complete at these fractions of the way from edge to centre
    pallor_full: float = 0.9
    bump: float = 0.0  # haemoglobin in the middle of the pallor, as in a target cell
    bump_size: float = 0.35
    slit: float = 0.0  # depth of a slit-shaped pallor; negative: a bar or fold
    slit_length: float = 0.5
    slit_width: float = 0.15
    pallor_offset: float = 0.15  # how far the pallor is off centre
    mottle: float = 0.06  # amplitude of the mottling
    mottle_pitch: int = 8  # pixels between the knots of the mottling


def sample_appearance(cell_type: str, rng: Generator) -> CellAppearance:
    """12 % of the cells have finer mottling."""
    appearance = APPEARANCE_BY_TYPE[cell_type](rng)
    return (
        replace(appearance, mottle=sample_uniform(rng, 0.04, 0.15), mottle_pitch=4)
        if rng.random() < 0.12
        else appearance
    )


def normal_appearance(rng: Generator) -> CellAppearance:
    start = sample_uniform(rng, 0.05, 0.45)
    return CellAppearance(
        pallor_depth=sample_uniform(rng, 0.25, 0.98),
        pallor_start=start,
        pallor_full=start + sample_uniform(rng, 0.4, 0.75),
        pallor_offset=sample_uniform(rng, 0, 0.25),
    )


def dense_appearance(rng: Generator) -> CellAppearance:
    return CellAppearance(
        density=sample_uniform(rng, 0.85, 1.35),
        pallor_depth=sample_uniform(rng, -0.12, 0.12),
        edge_width=sample_uniform(rng, 1.2, 3),
        pallor_start=0.2,
        pallor_full=1.0,
    )


def target_appearance(rng: Generator) -> CellAppearance:
    start, has_bar = sample_uniform(rng, 0.15, 0.4), rng.random() < 0.2
    return CellAppearance(
        density=sample_uniform(rng, 0.75, 1.05),
        pallor_depth=sample_uniform(rng, 0.45, 0.95),
        pallor_start=start,
        pallor_full=start + sample_uniform(rng, 0.1, 0.25),
        bump=0.0 if has_bar else sample_uniform(rng, 0.3, 1.0),
        bump_size=sample_uniform(rng, 0.2, 0.48),
        slit=sample_uniform(rng, -0.7, -0.3) if has_bar else 0.0,
        slit_length=0.9,
        pallor_offset=sample_uniform(rng, 0, 0.3),
        mottle=0.1,
    )


def stomatocyte_appearance(rng: Generator) -> CellAppearance:
    return CellAppearance(
        density=sample_uniform(rng, 0.85, 1.1),
        pallor_depth=sample_uniform(rng, 0, 0.3),
        slit=sample_uniform(rng, 0.7, 1.0),
        slit_length=sample_uniform(rng, 0.38, 0.66),
        slit_width=sample_uniform(rng, 0.12, 0.42),
        pallor_offset=sample_uniform(rng, 0, 0.2),
    )


def hypochromic_appearance(rng: Generator) -> CellAppearance:
    start = sample_uniform(rng, 0.12, 0.38)
    return CellAppearance(
        density=sample_uniform(rng, 0.7, 1.0),
        pallor_depth=sample_uniform(rng, 0.75, 1.0),
        pallor_start=start,
        pallor_full=start + sample_uniform(rng, 0.22, 0.5),
        pallor_offset=sample_uniform(rng, 0, 0.15),
        edge_width=sample_uniform(rng, 1, 1.6),
    )


def burr_appearance(rng: Generator) -> CellAppearance:
    return CellAppearance(
        density=sample_uniform(rng, 0.8, 1.25),
        pallor_depth=sample_uniform(rng, 0, 0.7),
        pallor_start=0.3,
        pallor_full=0.85,
    )


def oval_appearance(rng: Generator) -> CellAppearance:
    return CellAppearance(
        pallor_depth=sample_uniform(rng, 0.1, 0.85),
        pallor_start=sample_uniform(rng, 0.1, 0.45),
        pallor_full=1.0,
        pallor_offset=sample_uniform(rng, 0, 0.2),
    )


def schistocyte_appearance(rng: Generator) -> CellAppearance:
    """Some are dense, many have a pallor, some are faint or folded."""
    density, chance = sample_uniform(rng, 0.6, 1.3), rng.random()
    if chance < 0.4:
        return CellAppearance(
            density=density, pallor_depth=sample_uniform(rng, -0.1, 0.3), pallor_start=0.2, pallor_full=1.0
        )
    if chance < 0.78:
        start = sample_uniform(rng, 0.1, 0.45)
        return CellAppearance(
            density=density,
            pallor_depth=sample_uniform(rng, 0.3, 0.9),
            pallor_start=start,
            pallor_full=start + sample_uniform(rng, 0.35, 0.7),
            pallor_offset=0.4,
        )
    return CellAppearance(
        density=density,
        pallor_depth=sample_uniform(rng, 0.1, 0.6),
        slit=sample_uniform(rng, -0.7, 0.8),
        slit_length=sample_uniform(rng, 0.5, 1.0),
        slit_width=sample_uniform(rng, 0.12, 0.3),
        pallor_offset=0.3,
    )


APPEARANCE_BY_TYPE = {
    "normal": normal_appearance,
    "macrocyte": normal_appearance,
    "microcyte": normal_appearance,
    "spherocyte": dense_appearance,
    "target": target_appearance,
    "stomatocyte": stomatocyte_appearance,
    "ovalocyte": oval_appearance,
    "teardrop": oval_appearance,
    "burr": burr_appearance,
    "schistocyte": schistocyte_appearance,
    "hypochromia": hypochromic_appearance,
    "elliptocyte": oval_appearance,
}
