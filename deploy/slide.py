"""What the counts on a slide say about the patient's blood.

A model that calls 2 of 1,000 whole cells broken finds some on every healthy slide, and one that sees half of the broken
ones counts half of them. Rogan and Gladen (1978) take both back: prevalence = (share + spec - 1) / (sens + spec - 1).
The interval is Lang and Reiczigel's (2014): it carries the chance in the count and in both error rates, which were
themselves measured on a number of labelled cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.points import Point

LINE = 0.01  # of red cells: the share of schistocytes that raises suspicion of thrombotic microangiopathy
ENOUGH = 1000  # red cells that a person would count
FEWEST = 100  # without so many nothing is decided: single cells are picked, not counted
Z = 1.959963984540054  # 95 %
NOTICE = "research use only, not a medical device"
ABOVE, BELOW, OPEN = "above the line", "below the line", "cannot decide"


@dataclass(frozen=True)
class Verdict:
    counted: int  # red cells that the model answered for
    flagged: int  # called positive among them
    share: float | None  # flagged / counted
    prevalence: float | None  # corrected
    low: float | None
    high: float | None
    verdict: str
    look: bool  # the corrected prevalence reaches the line, whether or not chance can be ruled out
    why: str  # in a sentence
    enough: bool  # ENOUGH cells were counted

    def told(self) -> dict[str, Any]:
        return asdict(self)


def judge(counted: int, flagged: int, point: Point | None, doubts: Sequence[str] = (), line: float = LINE) -> Verdict:
    """`doubts`: why the model's rates may not hold on this slide; with any, nothing is decided."""
    share = flagged / counted if counted else None
    estimate, low, high, why = None, None, None, ""
    if not counted:
        why = "no cell was counted"
    elif point is None or point.sensitivity is None or point.specificity is None:
        why = "the model was never measured on labelled cells of this kind; run `hemofed edge verify` with some"
    else:
        estimate, low, high = prevalence(counted, flagged, point)
        if estimate is None:
            why = "at this operating point the model is no better than chance; choose another one"
        elif low is None:
            why = "so many calls do not fit the error rates that were measured; measure the model here: `hemofed edge verify`"
        elif counted < FEWEST:
            why = f"{counted} cells are too few; at least {FEWEST} have to be counted, better {ENOUGH:,}"
        elif doubts:
            why = doubts[0]
    look = estimate is not None and estimate >= line
    if why or low is None or high is None:
        return Verdict(counted, flagged, share, estimate, low, high, OPEN, look, why, counted >= ENOUGH)
    told = f"{100 * line:g} %"
    if low > line:
        verdict, why = ABOVE, f"the whole interval lies above {told}"
    elif high < line:
        verdict, why = BELOW, f"the whole interval lies below {told}"
    else:
        more = "" if counted >= ENOUGH else f"; {ENOUGH - counted:,} more cells would make {ENOUGH:,}"
        verdict, why = OPEN, f"the interval spans {told}{more}"
    return Verdict(counted, flagged, share, estimate, low, high, verdict, look, why, counted >= ENOUGH)


def prevalence(counted: int, flagged: int, point: Point) -> tuple[float | None, float | None, float | None]:
    """Rogan and Gladen's estimate, and Lang and Reiczigel's limits at 95 %.

    None where the test is no test; no limits where no prevalence whatever would give such a count.
    """
    sens, spec = point.sensitivity or 0.0, point.specificity or 0.0
    if sens + spec <= 1:
        return None, None, None
    estimate = _share((flagged / counted + spec - 1) / (sens + spec - 1))
    positives, negatives = point.tp + point.fn, point.tn + point.fp
    n, n_sens, n_spec = counted + Z**2, positives + 2, negatives + 2
    apparent = (flagged + Z**2 / 2) / n
    sens, spec = (point.tp + 1) / n_sens, (point.tn + 1) / n_spec
    gain = sens + spec - 1
    if gain <= 0:
        return estimate, 0.0, 1.0
    middle = (apparent + spec - 1) / gain
    var_sens, var_spec = sens * (1 - sens) / n_sens, spec * (1 - spec) / n_spec
    shift = 2 * Z**2 * (middle * var_sens - (1 - middle) * var_spec)
    spread = math.sqrt(apparent * (1 - apparent) / n + middle**2 * var_sens + (1 - middle) ** 2 * var_spec) / gain
    low, high = middle + shift - Z * spread, middle + shift + Z * spread
    return (estimate, None, None) if low > 1 or high < 0 else (estimate, _share(low), _share(high))


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
