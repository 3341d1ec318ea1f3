"""How a cell of a type looks inside: its size, how dense it is, the pallor and what lies in it.

Sizes are radii in pixels of circles of the same area, as measured on labelled cells of a public data set (see __init__.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from numpy.random import Generator

from sites.data.renderer.polygons import pick

RADIUS: dict[str, tuple[float, float]] = {  # median, spread of the logarithm
    "normal": (19.5, 0.09),
    "macrocyte": (24.4, 0.07),
    "microcyte": (15.6, 0.10),
    "spherocyte": (16.6, 0.13),
    "target": (21.0, 0.13),
    "stomatocyte": (20.2, 0.08),
    "ovalocyte": (18.6, 0.11),
    "teardrop": (17.2, 0.15),
    "burr": (18.6, 0.11),
    "schistocyte": (19.5, 0.15),  # times that of the outline
    "hypochromia": (19.8, 0.12),
    "elliptocyte": (17.5, 0.13),
}


@dataclass(frozen=True)
class Look:
    density: float = 1.0
    edge: float = 1.3  # pixels from the outline to full thickness
    depth: float = 0.5  # how much of the thickness the pallor takes
    start: float = 0.3  # the pallor begins and is full at these shares of the way to the middle
    full: float = 0.9
    bump: float = 0.0  # haemoglobin back in the middle, as in a target
    bump_size: float = 0.35
    slit: float = 0.0  # a slit-shaped pallor (or, below 0, a bar or fold)
    slit_long: float = 0.5
    slit_wide: float = 0.15
    tilt: float = 0.15  # how far the pallor is off the middle
    mottle: float = 0.06
    pitch: int = 8  # pixels between the knots of its mottling


def look(kind: str, rng: Generator) -> Look:
    drawn = LOOKS[kind](rng)
    return replace(drawn, mottle=pick(rng, 0.04, 0.15), pitch=4) if rng.random() < 0.12 else drawn


def normal(rng: Generator) -> Look:
    start = pick(rng, 0.05, 0.45)
    return Look(depth=pick(rng, 0.25, 0.98), start=start, full=start + pick(rng, 0.4, 0.75), tilt=pick(rng, 0, 0.25))


def dense(rng: Generator) -> Look:
    return Look(
        density=pick(rng, 0.85, 1.35), depth=pick(rng, -0.12, 0.12), edge=pick(rng, 1.2, 3), start=0.2, full=1.0
    )


def target(rng: Generator) -> Look:
    start, bar = pick(rng, 0.15, 0.4), rng.random() < 0.2
    return Look(
        density=pick(rng, 0.75, 1.05),
        depth=pick(rng, 0.45, 0.95),
        start=start,
        full=start + pick(rng, 0.1, 0.25),
        bump=0.0 if bar else pick(rng, 0.3, 1.0),
        bump_size=pick(rng, 0.2, 0.48),
        slit=pick(rng, -0.7, -0.3) if bar else 0.0,
        slit_long=0.9,
        tilt=pick(rng, 0, 0.3),
        mottle=0.1,
    )


def stomatocyte(rng: Generator) -> Look:
    return Look(
        density=pick(rng, 0.85, 1.1),
        depth=pick(rng, 0, 0.3),
        slit=pick(rng, 0.7, 1.0),
        slit_long=pick(rng, 0.38, 0.66),
        slit_wide=pick(rng, 0.12, 0.42),
        tilt=pick(rng, 0, 0.2),
    )


def hypochromic(rng: Generator) -> Look:
    start = pick(rng, 0.12, 0.38)
    return Look(
        density=pick(rng, 0.7, 1.0),
        depth=pick(rng, 0.75, 1.0),
        start=start,
        full=start + pick(rng, 0.22, 0.5),
        tilt=pick(rng, 0, 0.15),
        edge=pick(rng, 1, 1.6),
    )


def burr(rng: Generator) -> Look:
    return Look(
        density=pick(rng, 0.8, 1.25),
        depth=pick(rng, 0, 0.7),
        start=0.3,
        full=0.85,
    )


def oval(rng: Generator) -> Look:
    return Look(depth=pick(rng, 0.1, 0.85), start=pick(rng, 0.1, 0.45), full=1.0, tilt=pick(rng, 0, 0.2))


def fragment(rng: Generator) -> Look:
    """Some are dense, many keep a pallor, some are faint or folded."""
    density, chance = pick(rng, 0.6, 1.3), rng.random()
    if chance < 0.4:
        return Look(density=density, depth=pick(rng, -0.1, 0.3), start=0.2, full=1.0)
    if chance < 0.78:
        start = pick(rng, 0.1, 0.45)
        return Look(
            density=density, depth=pick(rng, 0.3, 0.9), start=start, full=start + pick(rng, 0.35, 0.7), tilt=0.4
        )
    return Look(
        density=density,
        depth=pick(rng, 0.1, 0.6),
        slit=pick(rng, -0.7, 0.8),
        slit_long=pick(rng, 0.5, 1.0),
        slit_wide=pick(rng, 0.12, 0.3),
        tilt=0.3,
    )


LOOKS = {
    "normal": normal,
    "macrocyte": normal,
    "microcyte": normal,
    "spherocyte": dense,
    "target": target,
    "stomatocyte": stomatocyte,
    "ovalocyte": oval,
    "teardrop": oval,
    "burr": burr,
    "schistocyte": fragment,
    "hypochromia": hypochromic,
    "elliptocyte": oval,
}
