"""Opacus's optimisers with two changes: what is clipped is a unit's whole gradient, and noise comes from Entropy.

A unit (a patient, a slide) may have many examples. Their gradients are added up before clipping, so that whatever one
unit holds moves the sum by at most the clipping norm.
"""

from __future__ import annotations

from typing import Any

import torch
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from torch import Tensor

from privacy.dpsgd.secure_rng import SecureRandom


class UnitOptimizer(DPOptimizer):  # type: ignore[misc]
    """Before every `pre_step`, `owners` says whose each example is, or `alone` that all of `.grad` is one unit's."""

    def __init__(self, optimizer: torch.optim.Optimizer, secure_random: SecureRandom, **settings: Any) -> None:
        super().__init__(optimizer, **settings)
        self.secure_random = secure_random
        self._example_units = torch.zeros(0, dtype=torch.int64)
        self._num_units = 0

    def set_example_units(self, example_units: Tensor, num_units: int) -> None:
        """owners (B,): 0 to units - 1, of the examples whose gradients the hooks have left."""
        self._example_units, self._num_units = example_units, num_units

    def set_single_unit(self) -> None:
        """What plain backward passes have added up is a unit's gradient: nothing per example is ever kept."""
        self._num_units = 1
        for p in self.params:
            p.grad_sample = torch.zeros_like(p)[None] if p.grad is None else p.grad[None]

    def set_empty_batch(self) -> None:
        """What is left of a batch into which nobody was drawn."""
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
    """For single examples as units: clipped in a second backward pass, without keeping their gradients."""

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
