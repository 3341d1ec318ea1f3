"""Evaluates a model: sums over examples, from which accuracy, AUROC and calibration derive (`EvaluationSums`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.probe.histogram_ranges import MAX_ASINH_LOG_ODDS
from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, EvaluationSums
from sites.data.pool import ExamplePool

EXAMPLES_PER_PASS = 1000  # batch size of evaluation and of full gradients


def evaluate(module: nn.Module, pool: ExamplePool, index: Tensor, num_classes: int) -> EvaluationSums:
    if not len(index):
        return empty_sums(num_classes)
    with torch.inference_mode():
        return score_logits(compute_logits(module, pool, index), pool.labels(index).cpu())


def compute_logits(module: nn.Module, pool: ExamplePool, index: Tensor) -> Tensor:
    """(N, C) float64 on the CPU, because MPS has no float64."""
    module.eval()
    with torch.inference_mode():
        return torch.cat([module(pool.inputs(part)) for part in index.split(EXAMPLES_PER_PASS)]).cpu().double()


def empty_sums(num_classes: int, num_bins: int = SCORE_BINS) -> EvaluationSums:
    return EvaluationSums(
        torch.zeros((), dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(num_classes, num_classes, dtype=torch.int64),
        torch.zeros(num_classes, 2, num_bins, dtype=torch.int32),
        torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64),
    )


def score_bins(logits: Tensor, num_bins: int = SCORE_BINS) -> Tensor:
    """(N, C): the bin of each class's one-vs-rest log-odds log p - log(1 - p). logits: (N, C).

    1 - p is the sum over the other classes, which avoids cancellation near p = 1.
    """
    log_p = logits.double().log_softmax(1)
    others = [torch.cat([log_p[:, :c], log_p[:, c + 1 :]], 1).logsumexp(1) for c in range(logits.shape[1])]
    log_odds = log_p - torch.stack(others, 1)
    return ((log_odds.asinh() + MAX_ASINH_LOG_ODDS) / (2 * MAX_ASINH_LOG_ODDS) * num_bins).long().clamp(0, num_bins - 1)


def score_logits(logits: Tensor, y: Tensor, num_bins: int = SCORE_BINS) -> EvaluationSums:
    """Sums over N examples. logits: (N, C); y: (N,)."""
    n, num_classes = logits.shape
    logits = logits.double()
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    confidence, predicted = p.max(1)
    is_label = F.one_hot(y, num_classes).bool()
    score_cell = (torch.arange(num_classes) * 2 + is_label.long()) * num_bins + score_bins(logits, num_bins)
    confidence_bin = (confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    calibration_bins = torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64)
    calibration_bins.index_add_(
        0, confidence_bin, torch.stack([torch.ones_like(confidence), confidence, (predicted == y).double()], 1)
    )
    return EvaluationSums(
        torch.tensor(float(n), dtype=torch.float64),
        F.nll_loss(log_p, y, reduction="sum"),
        torch.bincount(y * num_classes + predicted, minlength=num_classes * num_classes).view(num_classes, num_classes),
        torch.bincount(score_cell.flatten(), minlength=num_classes * 2 * num_bins).view(num_classes, 2, num_bins).int(),
        calibration_bins,
    )
