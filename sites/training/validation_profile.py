"""Computes a site's part of the validation profile (`ProfileSums`).

The temperature, the operating points and the out-of-distribution guard of an exported model derive from the sums over
sites.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.probe.feature_names import QUALITY_MEASURES
from models.probe.feature_probe import FeatureProbe
from models.probe.histogram_ranges import MAX_LOG2_DISTANCE, MIN_LOG2_DISTANCE
from pipeline.protocol.tasks import (
    DISTANCE_BINS,
    IMAGE_MEASURE_BINS,
    PROFILE_SCORE_BINS,
    TEMPERATURES,
    FeatureWhitening,
    ProfileJob,
    ProfileSums,
)
from sites.data.pool import ExamplePool
from sites.training.evaluation import EXAMPLES_PER_PASS, empty_sums, score_logits


def compute_profile(
    module: nn.Module, pool: ExamplePool, index: Tensor, num_classes: int, job: ProfileJob
) -> ProfileSums:
    """Sums over the pool rows `index` (N,). The features are those of `FeatureProbe`, (N, D)."""
    probe = FeatureProbe(module, tuple(pool.x.shape[1:]))
    whitening = job.whitening
    parts = [_probe_images(probe, pool.inputs(part), job.num_tta_views) for part in index.split(EXAMPLES_PER_PASS)]
    num_features = probe.project.shape[1]
    if not parts:
        parts = [(torch.zeros(0, num_classes), torch.zeros(0, num_features), torch.zeros(0, len(QUALITY_MEASURES)))]
    logits, features, measures = (torch.cat(part).double() for part in zip(*parts, strict=True))
    y = pool.labels(index).cpu()
    temperature = whitening.temperature if whitening else 1.0
    evaluation = (
        score_logits(logits / temperature, y, PROFILE_SCORE_BINS)
        if len(index)
        else empty_sums(num_classes, PROFILE_SCORE_BINS)
    )
    nll_by_temperature = [
        F.cross_entropy(logits / t, y, reduction="sum") if len(y) else torch.zeros(()) for t in TEMPERATURES
    ]
    return ProfileSums(
        n=evaluation.n,
        nll_by_temperature=torch.stack(nll_by_temperature).double(),
        feature_sums=torch.zeros(num_classes, num_features, dtype=torch.float64).index_add_(0, y, features),
        feature_product_sums=features.T @ features,
        confusion=evaluation.confusion,
        scores=evaluation.scores,
        calibration=evaluation.calibration,
        distances=distance_histogram(features, y, whitening, num_classes)
        if whitening
        else torch.zeros(num_classes, DISTANCE_BINS, dtype=torch.int64),
        image_measures=_measure_histograms(measures),
    )


def _probe_images(probe: FeatureProbe, x: Tensor, num_tta_views: int) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return tuple(part.cpu() for part in probe.forward_tta(x, num_tta_views))


def distance_histogram(features: Tensor, y: Tensor, whitening: FeatureWhitening, num_classes: int) -> Tensor:
    """(C, DISTANCE_BINS): number of images of each class by their distance to the nearest class centre.

    features: (N, D); y: (N,). Distances are Euclidean after whitening, divided by sqrt(D).
    """
    whitened = (features - whitening.mean.double()) @ whitening.whitening.double()
    distances = torch.cdist(whitened, whitening.class_centers.double()).amin(1) / whitened.shape[1] ** 0.5
    log2_distance = distances.clamp(min=1e-9).log2()
    bin_index = (
        ((log2_distance - MIN_LOG2_DISTANCE) / (MAX_LOG2_DISTANCE - MIN_LOG2_DISTANCE) * DISTANCE_BINS)
        .long()
        .clamp(0, DISTANCE_BINS - 1)
    )
    return torch.bincount(y * DISTANCE_BINS + bin_index, minlength=num_classes * DISTANCE_BINS).view(
        num_classes, DISTANCE_BINS
    )


def _measure_histograms(measures: Tensor) -> Tensor:
    """Measures (N, Q) in [0, 1] -> histograms (Q, IMAGE_MEASURE_BINS)."""
    bin_index = (measures * IMAGE_MEASURE_BINS).long().clamp(0, IMAGE_MEASURE_BINS - 1)
    return torch.stack([torch.bincount(column, minlength=IMAGE_MEASURE_BINS) for column in bin_index.unbind(1)])
