"""Classification metrics of predictions for labelled images, in numpy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def compute_balanced_accuracy(p: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    """Mean recall of the classes that occur in `y`."""
    predicted = p.argmax(1)
    return float(np.mean([(predicted[y == c] == c).mean() for c in np.unique(y)]))


def compute_auroc(p: NDArray[np.float32], y: NDArray[np.int64], positive_index: int) -> float:
    """AUROC of one class against the rest; ties count half."""
    values, value_indices = np.unique(p[:, positive_index], return_inverse=True)
    num_positives = np.bincount(value_indices[y == positive_index], minlength=len(values))
    num_negatives = np.bincount(value_indices[y != positive_index], minlength=len(values))
    num_negatives_below = np.cumsum(num_negatives) - num_negatives
    return float(
        (num_positives * (num_negatives_below + num_negatives / 2)).sum()
        / max(num_positives.sum() * num_negatives.sum(), 1)
    )
