"""Prevalence of schistocytes on a slide, corrected for the model's error rates, with a 95 % interval.

A model with false positives finds schistocytes on every healthy slide, and one with a sensitivity of 0.5 counts half of
them. Rogan and Gladen (1978) correct both: prevalence = (flagged fraction + spec - 1) / (sens + spec - 1).
The interval holds every prevalence that is compatible with the count. Its variance has three parts: the count, both
error rates (measured on a limited number of labelled cells, shrunk and weighted as in Lang and Reiczigel 2014), and the
differences between sites, because a slide comes from one site and the rates come from several.
"""

from __future__ import annotations

from deploy.bundle.operating_points import OperatingPoint

Z_SCORE_95 = 1.959963984540054  # 95 %
PREVALENCE_GRID = tuple((n / 4000) ** 2 for n in range(4001))  # 0 to 1; near the threshold in steps of 1/200 of it


def estimate_prevalence(
    num_counted: int, num_flagged: int, operating_point: OperatingPoint
) -> tuple[float | None, float | None, float | None]:
    """Rogan and Gladen's estimate and the limits of its 95 % interval.

    The estimate is None if sensitivity + specificity <= 1; the limits are None if no prevalence explains the count.
    """
    sens, spec = operating_point.sensitivity or 0.0, operating_point.specificity or 0.0
    if sens + spec <= 1:
        return None, None, None
    apparent = num_flagged / num_counted
    estimate = _clip_fraction((apparent + spec - 1) / (sens + spec - 1))
    n_sens, n_spec = operating_point.tp + operating_point.fn + 2, operating_point.tn + operating_point.fp + 2
    sens, spec = (operating_point.tp + 1) / n_sens, (operating_point.tn + 1) / n_spec
    var_sens = sens * (1 - sens) / n_sens + operating_point.sensitivity_spread**2
    var_spec = spec * (1 - spec) / n_spec + operating_point.specificity_spread**2

    def is_plausible(share: float) -> bool:
        expected = share * sens + (1 - share) * (1 - spec)
        variance = expected * (1 - expected) / num_counted + share**2 * var_sens + (1 - share) ** 2 * var_spec
        return (apparent - expected) ** 2 <= Z_SCORE_95**2 * variance

    plausible = [share for share in PREVALENCE_GRID if is_plausible(share)]
    return (estimate, plausible[0], plausible[-1]) if plausible else (estimate, None, None)


def _clip_fraction(value: float) -> float:
    return min(1.0, max(0.0, value))
