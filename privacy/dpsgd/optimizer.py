"""Opacus's optimizers with two changes: they clip the gradient of a whole unit, and noise comes from `SecureRandom`.

A unit (a patient, a slide) may have many examples. Their gradients are added before clipping, so that one unit changes
the sum by at most `max_grad_norm`.
"""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import Tensor

from privacy.dpsgd.secure_rng import SecureRandom


class UnitOptimizer(DPOptimizer):  # type: ignore[misc]
    """Before each `pre_step` call `set_example_units`, `set_single_unit` or `set_empty_batch`."""

    def __init__(self, optimizer: torch.optim.Optimizer, secure_random: SecureRandom, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self.secure_random = secure_random
        self._example_units = torch.zeros(0, dtype=torch.int64)
        self._num_units = 0

    def set_example_units(self, example_units: Tensor, num_units: int) -> None:
        """example_units (B,): from 0 to num_units - 1, of the examples whose gradients the hooks have computed."""
        self._example_units, self._num_units = example_units, num_units

    def set_single_unit(self) -> None:
        """`.grad`, the sum of plain backward passes, is one unit's gradient; no gradient per example is stored."""
        self._num_units = 1
        for p in self.params:
            p.grad_sample = torch.zeros_like(p)[None] if p.grad is None else p.grad[None]

    def set_empty_batch(self) -> None:
        """The sample contains no unit: the sum is zero, and only noise is added."""
        self._num_units = 0
        for p in self.params:
            p.grad_sample = torch.zeros(0, *p.shape, device=p.device)

    def clip_and_accumulate(self) -> None:
        samples = [self._by_unit(p.grad_sample) for p in self.params]
        norms = torch.stack([s.flatten(1).norm(dim=1) for s in samples], 1).norm(dim=1)  # (units,)
        factor = (self.max_grad_norm / (norms + 1e-6)).clamp(max=1.0)
        for p, sample in zip(self.params, samples, strict=True):
            grad = (factor @ sample.flatten(1)).view_as(p)
            p.summed_grad = grad if p.summed_grad is None else p.summed_grad.add_(grad)

    def add_noise(self) -> None:
        _add_noise(self, self.secure_random)

    def _by_unit(self, samples: Tensor) -> Tensor:
        """(B, ...) -> (units, ...)"""
        if self._num_units == len(samples):  # one example each
            return samples
        summed = torch.zeros(self._num_units, *samples.shape[1:], device=samples.device)
        return summed.index_add_(0, self._example_units, samples)


class GhostOptimizer(DPOptimizerFastGradientClipping):  # type: ignore[misc]
    """For single examples as units: clips in a second backward pass without storing gradients per example."""

    def __init__(self, optimizer: torch.optim.Optimizer, secure_random: SecureRandom, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self.secure_random = secure_random

    def add_noise(self) -> None:
        _add_noise(self, self.secure_random)

    def set_empty_batch(self) -> None:
        for p in self.params:
            p.grad = torch.zeros_like(p)


def _add_noise(optimizer: DPOptimizer, secure_random: SecureRandom) -> None:
    std = optimizer.noise_multiplier * optimizer.max_grad_norm
    for p in optimizer.params:
        p.grad = p.summed_grad.view_as(p)
        if std:
            p.grad = p.grad + std * secure_random.normal(p.shape).to(p.device)
