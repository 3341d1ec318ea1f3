"""What the counts on a slide say about the patient's blood.

A model that calls 2 of 1,000 whole cells broken finds some on every healthy slide, and one that sees half of the broken
ones counts half of them. Rogan and Gladen (1978) take both back: prevalence = (share + spec - 1) / (sens + spec - 1).
The interval holds every prevalence under which the count would be no surprise, given the chance in the count, in both
error rates, which were measured on a number of labelled cells (as Lang and Reiczigel 2014 shrink and weigh them), and
the differences between places: a slide comes from one, and the rates from several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.bundle.operating_points import Point

LINE = 0.01  # of red cells: the share of schistocytes that raises suspicion of thrombotic microangiopathy
ENOUGH = 1000  # red cells that a person would count
FEWEST = 100  # without so many nothing is decided: single cells are picked, not counted
Z = 1.959963984540054  # 95 %
GRID = tuple((n / 4000) ** 2 for n in range(4001))  # shares from 0 to 1; at the line, a two-hundredth of it apart
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
            many = "few" if flagged / counted < 1 - point.specificity else "many"
            why = f"so {many} calls do not fit the error rates that were measured; measure the model here: `hemofed edge verify`"
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
    """Rogan and Gladen's estimate, and limits at 95 %.

    None where the test is no test; no limits where no prevalence whatever would give such a count.
    """
    sens, spec = point.sensitivity or 0.0, point.specificity or 0.0
    if sens + spec <= 1:
        return None, None, None
    apparent = flagged / counted
    estimate = _share((apparent + spec - 1) / (sens + spec - 1))
    n_sens, n_spec = point.tp + point.fn + 2, point.tn + point.fp + 2
    sens, spec = (point.tp + 1) / n_sens, (point.tn + 1) / n_spec
    var_sens = sens * (1 - sens) / n_sens + point.sensitivity_spread**2
    var_spec = spec * (1 - spec) / n_spec + point.specificity_spread**2

    def likely(share: float) -> bool:
        due = share * sens + (1 - share) * (1 - spec)
        variance = due * (1 - due) / counted + share**2 * var_sens + (1 - share) ** 2 * var_spec
        return (apparent - due) ** 2 <= Z**2 * variance

    fits = [share for share in GRID if likely(share)]
    return (estimate, fits[0], fits[-1]) if fits else (estimate, None, None)


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))
