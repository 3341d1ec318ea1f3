"""A network and images -> `Profiled`: sums from which temperature, operating points and a guard derive."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.probe.feature_probe import MEASURES, Eye
from pipeline.protocol.tasks import DISTANCE_BINS, FINE_BINS, MEASURE_BINS, TEMPERATURES, Lens, Profile, Profiled
from sites.training.base import Pool
from sites.training.evaluation import CHUNK, nothing, score

# distances are even in their binary logarithm from 1/8 to 32; 1 is the root mean square of the images measured
NEAREST, FARTHEST = -3.0, 5.0


def profile(module: nn.Module, pool: Pool, index: Tensor, classes: int, job: Profile) -> Profiled:
    eye = Eye(module, tuple(pool.x.shape[1:]))
    lens = job.lens
    parts = [_seen(eye, pool.inputs(part), job.turns) for part in index.split(CHUNK)]
    width = eye.project.shape[1]
    if not parts:
        parts = [(torch.zeros(0, classes), torch.zeros(0, width), torch.zeros(0, len(MEASURES)))]
    logits, traits, measured = (torch.cat(part).double() for part in zip(*parts, strict=True))
    y = pool.labels(index).cpu()
    heat = lens.temperature if lens else 1.0
    seen = score(logits / heat, y, FINE_BINS) if len(index) else nothing(classes, FINE_BINS)
    heated = [F.cross_entropy(logits / t, y, reduction="sum") if len(y) else torch.zeros(()) for t in TEMPERATURES]
    return Profiled(
        seen.n,
        torch.stack(heated).double(),
        torch.zeros(classes, width, dtype=torch.float64).index_add_(0, y, traits),
        traits.T @ traits,
        seen.confusion,
        seen.scores,
        seen.calibration,
        far(traits, y, lens, classes) if lens else torch.zeros(classes, DISTANCE_BINS, dtype=torch.int64),
        _histograms(measured),
    )


def _seen(eye: Eye, x: Tensor, turns: int) -> tuple[Tensor, ...]:
    with torch.inference_mode():
        return tuple(part.cpu() for part in eye.turned(x, turns))


def far(traits: Tensor, y: Tensor, lens: Lens, classes: int) -> Tensor:
    """(C, DISTANCE_BINS) images by their class and their distance from the nearest centre."""
    white = (traits - lens.mean.double()) @ lens.whiten.double()
    away = torch.cdist(white, lens.centres.double()).amin(1) / white.shape[1] ** 0.5
    octave = away.clamp(min=1e-9).log2()
    place = ((octave - NEAREST) / (FARTHEST - NEAREST) * DISTANCE_BINS).long().clamp(0, DISTANCE_BINS - 1)
    return torch.bincount(y * DISTANCE_BINS + place, minlength=classes * DISTANCE_BINS).view(classes, DISTANCE_BINS)


def _histograms(measured: Tensor) -> Tensor:
    """(N, Q) -> (Q, MEASURE_BINS)"""
    place = (measured * MEASURE_BINS).long().clamp(0, MEASURE_BINS - 1)
    return torch.stack([torch.bincount(column, minlength=MEASURE_BINS) for column in place.unbind(1)])
