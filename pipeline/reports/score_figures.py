"""What a report draws about one model's scores: confusion, ROC, precision-recall, reliability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pipeline.reports.svg import HALF, INK, PALETTE, WIDE, new_figure, styled
from pipeline.reports.words import shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
def roc(false_positive: Sequence[float], true_positive: Sequence[float], area: float | None = None) -> Figure:
    figure, axes = _unit_square("1 − specificity", "Sensitivity")
    axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    axes.plot(false_positive, true_positive, color=PALETTE[0])
    _note(axes, "AUROC", area)
    return figure


@styled()
def precision_recall(recall: Sequence[float], precision: Sequence[float], area: float | None = None) -> Figure:
    figure, axes = _unit_square("Sensitivity (recall)", "Precision")
    axes.plot(recall, precision, color=PALETTE[0])
    _note(axes, "AUPRC", area)
    return figure


@styled()
def reliability(bins: Sequence[tuple[float, float, float]]) -> Figure:
    """(confidence, accuracy, count) per bin; a dot's area grows with its count."""
    figure, axes = _unit_square("Confidence", "Accuracy")
    axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
    filled = [one for one in bins if one[2] > 0]
    most = max((count for _, _, count in filled), default=1)
    confidences, accuracies = [one[0] for one in filled], [one[1] for one in filled]
    areas = [12 + 108 * count / most for _, _, count in filled]
    axes.plot(confidences, accuracies, color=PALETTE[0], linewidth=1.2, alpha=0.6)
    axes.scatter(confidences, accuracies, s=areas, color=PALETTE[0], linewidths=0, alpha=0.85)
    return figure


def _unit_square(across: str, upward: str) -> tuple[Figure, Any]:
    figure, axes = new_figure()
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_box_aspect(0.72)
    axes.set_xlabel(across)
    axes.set_ylabel(upward)
    return figure, axes


def _note(axes: Any, name: str, area: float | None) -> None:
    if area is not None:
        axes.text(0.97, 0.05, f"{name} {area:.3f}", ha="right", transform=axes.transAxes, fontsize=10)
