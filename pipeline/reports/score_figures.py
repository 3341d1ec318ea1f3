"""What a report draws about one model's scores: confusion, ROC, precision-recall, reliability."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reports.svg import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.words import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Json = Mapping[str, Any]
MOST_LINES, MOST_POINTS = 40, 100  # of single sites
FEW_CLASSES = 6  # as many as a half-width matrix takes, with shares under the counts


@styled()
def confusion(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> Figure:
    """Rows are the truth. Numbers are counts; the colour is the share of the row."""
    import numpy as np
    from matplotlib.colors import to_rgb

    few = len(classes) <= FEW_CLASSES
    figure, axes = new_figure(HALF if few else (WIDE[0], 1.6 + 0.32 * len(classes)))
    table = np.asarray(counts, dtype=float)
    share = table / np.maximum(table.sum(axis=1, keepdims=True), 1)
    cells = np.zeros((*table.shape, 4))
    cells[..., :3] = to_rgb(PALETTE[0])
    cells[..., 3] = 0.03 + 0.72 * share  # never opaque: the ink stays readable on both themes
    axes.imshow(cells, aspect="auto", interpolation="none")
    for row, column in np.ndindex(*table.shape):
        number = f"{table[row, column]:,.0f}"
        words = f"{number}\n{100 * share[row, column]:.0f} %" if few else number
        strength = 1.0 if table[row, column] else 0.45
        axes.text(column, row, words, ha="center", va="center", fontsize=9 if few else 8, alpha=strength)
    names = [shorten(label, 16) for label in classes]
    crowded = max(map(len, names)) * len(names) > (48 if few else 90)
    turned: dict[str, Any] = {"rotation": 40, "ha": "right", "rotation_mode": "anchor"} if crowded else {}
    axes.set_xticks(range(len(names)), names, parse_math=False, **turned)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_xlabel("Predicted")
    axes.set_ylabel("Truth")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    return figure


@styled()
def roc(
    false_positive: Sequence[float],
    true_positive: Sequence[float],
    area: float | None = None,
    sites: Sequence[Json] = (),
    point: tuple[float, float] | None = None,
    point_words: str = "",
    whose: str = "all sites",
) -> Figure:
    """`sites`: {"fpr", "tpr"} each, thin behind the whole; `point`: where the model would be used."""
    figure, axes = unit_square("1 − specificity", "Sensitivity")
    axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    words = "single sites" + (f" (the first {MOST_LINES})" if len(sites) > MOST_LINES else "")
    for nth, site in enumerate(sites[:MOST_LINES]):
        across, upward = thinned(site["fpr"], site["tpr"])
        axes.plot(across, upward, color=INK, alpha=0.28, linewidth=0.8, label=None if nth else words)
    axes.plot(false_positive, true_positive, color=PALETTE[0], linewidth=2.2, label=_with_area(whose, area))
    _mark(axes, point, point_words)
    axes.legend(loc="lower right")
    return figure


@styled()
def precision_recall(
    recall: Sequence[float],
    precision: Sequence[float],
    area: float | None = None,
    prevalence: float | None = None,
    point: tuple[float, float] | None = None,
    whose: str = "all sites",
) -> Figure:
    figure, axes = unit_square("Sensitivity (recall)", "Precision")
    if prevalence is not None:
        words = f"no skill: {100 * prevalence:.1f} % are positive"
        axes.axhline(prevalence, color=INK, alpha=0.5, linewidth=1, linestyle=":", label=words)
    axes.plot(recall, precision, color=PALETTE[0], linewidth=2.2, label=_with_area(whose, area))
    _mark(axes, point, "" if point is None else f"precision {100 * point[1]:.0f} % there")
    high = prevalence is not None and prevalence > 0.45
    axes.legend(loc="lower left" if high or area is None or area > 0.6 else "upper right")
    return figure


@styled()
def reliability(bins: Sequence[tuple[float, float, float]]) -> Figure:
    """(confidence, accuracy, count) a bin: a dot with its 95 % interval, and below it how many examples it stands for."""
    from matplotlib.figure import Figure as Blank

    figure = Blank(figsize=HALF, layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.4, 1))
    filled = [one for one in bins if one[2] > 0]
    confidences, accuracies = [one[0] for one in filled], [one[1] for one in filled]
    upper.scatter(confidences, accuracies, s=30, color=PALETTE[0], linewidths=0, zorder=3)
    upper.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    for confidence, accuracy, count in filled:
        upper.plot([confidence] * 2, wilson(accuracy, count), color=PALETTE[0], alpha=0.45, linewidth=2.5)
    low = min((one[0] for one in filled), default=0.0)
    upper.set_xlim(max(-0.02, low - 0.08), 1.02)
    upper.set_ylim(-0.03, 1.03)
    upper.set_ylabel("Accuracy")
    lower.bar(confidences, [one[2] for one in filled], 0.028, color=PALETTE[0], alpha=0.7)
    lower.set_ylabel("Examples")
    lower.set_xlabel("Confidence")
    lower.yaxis.set_major_formatter("{x:,.0f}")
    lower.locator_params(axis="y", nbins=2)
    return figure


def thinned(across: Sequence[float], upward: Sequence[float]) -> tuple[list[float], list[float]]:
    """At most MOST_POINTS of a rising curve, its ends among them: more would only make the page heavy."""
    step = max(1, math.ceil((len(across) - 1) / (MOST_POINTS - 1)))
    kept = sorted({*range(0, len(across), step), len(across) - 1})
    return [across[at] for at in kept], [upward[at] for at in kept]


def wilson(share: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """The interval of a share of so many examples."""
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return centre - half, centre + half


def unit_square(across: str, upward: str, size: tuple[float, float] = HALF) -> tuple[Figure, Any]:
    figure, axes = new_figure(size)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_box_aspect(0.72)
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    return figure, axes


def _with_area(words: str, area: float | None) -> str:
    return words if area is None else f"{words}, area {area:.3f}"


def _mark(axes: Any, point: tuple[float, float] | None, words: str) -> None:
    if point is not None:
        axes.plot(*point, marker="o", markersize=7, markeredgewidth=1.8, markeredgecolor=PALETTE[3],
                  markerfacecolor="none", linestyle="", label=words, zorder=5)  # fmt: skip
