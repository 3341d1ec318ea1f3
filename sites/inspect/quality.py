"""Images that stand out among a site's own: blank, black, burnt out, blurred, odd in colour, brightness or contrast.

A figure is odd if it lies far from the site's median in units of the site's spread (median absolute deviation). What is
odd is not wrong: a rare stain is odd too. A person looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sites.inspect.findings import Finding, count
from sites.inspect.measures import FIGURES, Measures

FAR = 6.0  # robust standard deviations
SOFT = 3.5  # of sharpness: at most 1 in 1,000 of Chula's, BCCD's and MP-IDB's cells is less sharp
MANY = 0.02  # share of a site's images
BLANK = 2.0  # contrast, of 255
MOSTLY = 0.5  # share of clipped pixels
NIGHT = 25.0  # median brightness of a site whose pixels do not use their range
# a spread is never taken for smaller than this, so that images which are all alike do not make tiny differences odd
LEAST = dict(zip(FIGURES, (4.0, 2.0, 0.25, 4.0, 0.02, 0.02, 0.01, 0.01), strict=True))


@dataclass(frozen=True)
class Odd:
    """The rows of one kind, most striking first, with how many spreads they lie off (or a share, or a contrast)."""

    kind: str
    means: str
    rows: np.ndarray
    values: np.ndarray

    def json(self, names: Sequence[str]) -> dict[str, Any]:
        images = [{"image": names[r], "value": round(float(v), 3)} for r, v in zip(self.rows, self.values, strict=True)]
        return {"kind": self.kind, "means": self.means, "count": len(self.rows), "images": images}


def spreads_off(values: np.ndarray, least: float) -> np.ndarray:
    """Robust z-scores: 1.4826 median absolute deviations are a standard deviation of normal values."""
    middle = float(np.median(values))
    spread = 1.4826 * float(np.median(np.abs(values - middle)))
    return np.asarray((values - middle) / max(spread, least))


def odd_ones(measures: Measures) -> list[Odd]:
    """Every image has at most one kind: the first in this order."""
    if not len(measures.figures):
        return []
    off = {name: spreads_off(measures.of(name), least) for name, least in LEAST.items()}
    hue = np.hypot(off["red"], off["blue"])
    light, dark, contrast = measures.of("light"), measures.of("dark"), measures.of("contrast")
    tests: tuple[tuple[str, str, np.ndarray, np.ndarray], ...] = (
        ("black", "more than half of the pixels have no light", (dark > MOSTLY) & (off["dark"] > FAR), dark),
        ("blank", "one grey value all over", contrast < BLANK, contrast),
        ("over-exposed", "more than half of the pixels are white", (light > MOSTLY) & (off["light"] > FAR), light),
        ("blurred", "far less sharp than the others", off["sharpness"] < -SOFT, -off["sharpness"]),
        ("noisy", "far more fine detail than the others", off["sharpness"] > FAR, off["sharpness"]),
        ("odd-coloured", "another colour than the others", (hue > FAR) | (off["saturation"] > FAR),
         np.maximum(hue, off["saturation"])),
        ("dark", "far darker than the others", off["brightness"] < -FAR, -off["brightness"]),
        ("bright", "far lighter than the others", off["brightness"] > FAR, off["brightness"]),
        ("flat", "far less contrast than the others", off["contrast"] < -FAR, -off["contrast"]),
        ("harsh", "far more contrast than the others", off["contrast"] > FAR, off["contrast"]),
    )  # fmt: skip
    found, taken = [], np.zeros(len(contrast), bool)
    for kind, means, is_so, value in tests:
        rows = np.flatnonzero(is_so & ~taken)
        taken[rows] = True
        if len(rows):
            rows = rows[np.argsort(-value[rows], kind="stable")]
            found.append(Odd(kind, means, rows, value[rows]))
    return found


CURES = {
    "black": "take them out, or scan them again",
    "blank": "take them out: there is nothing to learn from them",
    "over-exposed": "scan them again with less light, or take them out",
    "blurred": "scan them again in focus, or take them out",
    "noisy": "look whether they are images at all, and not scrambled",
    "odd-coloured": "look: another stain, a colour cast, or something else than a smear?",
}
SECOND = "so many are no slips but another stain, scanner or camera: ask whether they belong to the study"
LOOK = "look at them on the page; keep them if such images will come again"


def findings(odd: Sequence[Odd], measures: Measures, shown: Callable[[int], str]) -> Iterator[Finding]:
    """Nearly every image can not be an outlier, so what all have in common is told by itself."""
    number = len(measures.figures)
    if (
        number
        and float(np.median(measures.of("brightness"))) < NIGHT
        and float(np.median(measures.of("dark"))) < MOSTLY
    ):
        yield Finding(
            "look", "pixels", "the images are nearly black as a whole",
            "if they have 16 bits of which fewer are used (a 12-bit camera), scale them to the full range, all alike",
        )  # fmt: skip
    for one in odd:
        what = f"{count(len(one.rows), 'image')} {'is' if len(one.rows) == 1 else 'are'} {one.kind}: {one.means}"
        names = tuple(shown(int(row)) for row in one.rows)
        slips = len(one.rows) <= max(MANY * number, 3)
        yield Finding("look", "pixels", what, CURES.get(one.kind, LOOK) if slips else SECOND, names)
