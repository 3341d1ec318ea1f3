"""What each region is: by its size, outline and colour against those of the field's own red cells."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from deploy.segmentation.foreground import solidity, typical_size
from deploy.segmentation.illumination import Light
from deploy.segmentation.watershed import Region

Kind = Literal["red", "white", "platelet", "clump", "border", "debris"]

SPECK = 0.12  # of a red cell's area: debris, unless purple; the smallest labelled fragments are twice as large
SMALL = 0.35  # platelets are smaller
LARGE = 1.25  # white cells are larger
THIN = 0.045  # of a diameter: half the width of a scale bar, never of a cell
PURPLE = 0.085  # see `_tone`
NUCLEUS = 1.3  # times as dark as the red cells, and purple: a white cell's, also where it was cut into lobes
PIECE, PRESSED = 0.65, 0.3  # a smaller one, with more of its outline against others: a part of overlapping cells
BLACK = 2.2  # times as dark as the red cells: dirt, hairs


@dataclass(frozen=True)
class Traits:
    """One region's measures, in pixels and optical density."""

    area: float
    solid: float  # area against the convex hull's
    half: float  # of its width, at the widest place
    density: float
    tone: float
    edge: bool  # cut by the image's edge
    pressed: float  # share of the outline that lies against other regions


def traits(region: Region, light: Light, pressed: float = 0.0) -> Traits:
    h, w = region.mask.shape
    high, wide = light.signal.shape
    inside = region.mask > 0
    window = slice(region.y, region.y + h), slice(region.x, region.x + w)
    colour = light.density[window][inside].mean(0)
    contours, _ = cv2.findContours(region.mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_NONE)
    outline = max(contours, key=cv2.contourArea)
    depth = cv2.distanceTransform(cv2.copyMakeBorder(region.mask, 1, 1, 1, 1, cv2.BORDER_CONSTANT), cv2.DIST_L2, 3)
    edge = region.x <= 0 or region.y <= 0 or region.x + w >= wide or region.y + h >= high
    solid = solidity(outline, cv2.contourArea(outline))
    density = float(light.signal[window][inside].mean())
    return Traits(float(inside.sum()), solid, float(depth.max()), density, _tone(colour), edge, pressed)


def _tone(colour: NDArray[np.float32]) -> float:
    """Purple swallows red and lets blue pass, haemoglobin the other way: their difference against the whole."""
    return float((colour[0] - colour[2]) / max(float(np.abs(colour).sum()), 1e-3))


def name_kinds(found: Sequence[Traits], guess: float) -> tuple[list[Kind], float]:
    """A kind for each, and the diameter of the field's single red cells; `guess` is a first one, in the same pixels."""
    about = math.pi / 4 * guess**2
    single = [t for t in found if not t.edge and t.solid > 0.88 and 0.25 * about < t.area < 1.8 * about] or list(found)
    whole = typical_size(np.array([t.area for t in single]))
    diameter = 2 * math.sqrt(whole / math.pi)
    tone = float(np.median([t.tone for t in single]))
    dark = float(np.median([t.density for t in single]))
    return [_kind(t, t.area / whole, t.tone - tone, t.density / dark, diameter) for t in found], diameter


def _kind(t: Traits, area: float, purple: float, dark: float, diameter: float) -> Kind:
    blue = purple > 1.5 * PURPLE and t.tone > 0.02  # in itself, too: hairs are grey, which is purple beside pale cells
    if t.half < THIN * diameter:
        return "debris"
    clumped = blue and area < LARGE and dark < NUCLEUS  # platelets by the dozen: no haemoglobin, and no nucleus either
    if purple > PURPLE and not t.edge and (area < SMALL or clumped):
        return "platelet"
    if area < SPECK or dark > (2 * BLACK if blue else BLACK):
        return "debris"
    if t.edge:
        return "border"
    if purple > PURPLE and (area > LARGE or (blue and dark > NUCLEUS)):
        return "white"
    if area > 2.4 or (area > 1.7 and t.solid < 0.9) or (area < PIECE and t.pressed > PRESSED):
        return "clump"
    return "red"
