"""Logits and labels -> `Evaluated`: sums from which accuracy, AUROC and calibration derive."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.protocol.tasks import CALIBRATION_BINS, SCORE_BINS, Evaluated
from sites.training.base import Pool

CHUNK = 1000  # examples at once where no batch size is asked for
# bins are even in asinh(log-odds): fine around p = 1/2, and an over-confident model's log-odds of +-10,000 still differ
REACH = 10.0


def evaluate(module: nn.Module, pool: Pool, index: Tensor, classes: int) -> Evaluated:
    if not len(index):
        return nothing(classes)
    with torch.inference_mode():
        return score(logits_of(module, pool, index), pool.labels(index).cpu())


def logits_of(module: nn.Module, pool: Pool, index: Tensor) -> Tensor:
    """(N, C) double on the CPU, for Apple's GPUs have no double."""
    module.eval()
    with torch.inference_mode():
        return torch.cat([module(pool.inputs(part)) for part in index.split(CHUNK)]).cpu().double()


def nothing(classes: int, bins: int = SCORE_BINS) -> Evaluated:
    return Evaluated(
        torch.zeros((), dtype=torch.float64),
        torch.zeros((), dtype=torch.float64),
        torch.zeros(classes, classes, dtype=torch.int64),
        torch.zeros(classes, 2, bins, dtype=torch.int32),
        torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64),
    )


def bins_of(logits: Tensor, bins: int = SCORE_BINS) -> Tensor:
    """(N, C) of the log-odds log p - log(1 - p), with 1 - p summed over the other classes, so that it does not cancel
    near 1."""
    log_p = logits.double().log_softmax(1)
    others = [torch.cat([log_p[:, :c], log_p[:, c + 1 :]], 1).logsumexp(1) for c in range(logits.shape[1])]
    odds = log_p - torch.stack(others, 1)
    return ((odds.asinh() + REACH) / (2 * REACH) * bins).long().clamp(0, bins - 1)


def score(logits: Tensor, y: Tensor, bins: int = SCORE_BINS) -> Evaluated:
    """logits (N, C), y (N,)."""
    n, classes = logits.shape
    logits = logits.double()
    log_p = logits.log_softmax(1)
    p = log_p.exp()
    confidence, guess = p.max(1)
    own = F.one_hot(y, classes).bool()
    cell = (torch.arange(classes) * 2 + own.long()) * bins + bins_of(logits, bins)
    level = (confidence * CALIBRATION_BINS).long().clamp(0, CALIBRATION_BINS - 1)
    calibration = torch.zeros(CALIBRATION_BINS, 3, dtype=torch.float64)
    calibration.index_add_(0, level, torch.stack([torch.ones_like(confidence), confidence, (guess == y).double()], 1))
    return Evaluated(
        torch.tensor(float(n), dtype=torch.float64),
        F.nll_loss(log_p, y, reduction="sum"),
        torch.bincount(y * classes + guess, minlength=classes * classes).view(classes, classes),
        torch.bincount(cell.flatten(), minlength=classes * 2 * bins).view(classes, 2, bins).int(),
        calibration,
    )
