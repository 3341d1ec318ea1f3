"""Three methods to compute the sum of the privacy units' clipped gradients, equal up to rounding.

They differ in time and memory:

per_unit     one ordinary backward pass per unit: no per-sample gradients, units of any size. Clipping the gradient of
             all data of a user: McMahan et al. 2018, arXiv 1710.06963
grad_sample  per-sample gradients from Opacus's hooks (`p.grad_sample`), added up by unit: for units of few examples.
             Yousefpour et al. 2021, arXiv 2109.12298
ghost        ghost clipping: a first backward pass yields the per-sample gradient norms, a second one the gradient of
             the reweighted losses. For single examples as units and large linear layers. Li et al. 2022, arXiv
             2110.05679; Lee and Kifer 2021, arXiv 2009.03106

A batch is a Poisson sample of units, not of examples; `n` below is the number of examples in one pass, U that of units.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from pipeline.protocol.messages import SiteId
from privacy.dpsgd.optimizer import GhostOptimizer, UnitOptimizer
from privacy.dpsgd.secure_rng import SecureRandom
from sites.training.base import TrainerContext
from sites.training.sequential import example_losses

ClippingMode = Literal["per_unit", "grad_sample", "ghost"]
DpOptimizer = UnitOptimizer | GhostOptimizer
UnitBatch = Sequence[Tensor]  # the pool rows (n_u,) of each unit u
MAX_GRAD_SAMPLE_FLOATS = 1 << 24  # size of the per-sample gradients in memory at once
MAX_EXAMPLES_PER_PASS = 256  # in passes without per-sample gradients
PER_UNIT_MIN_EXAMPLES = 6  # from this mean number of examples per unit on, per_unit is fastest


@contextmanager
def ignored_hook_warnings() -> Iterator[None]:
    """Opacus hooks the first layer, whose input (the images) needs no gradient. Enter it in one thread only."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        yield


@dataclass(frozen=True)
class DpSgdParams:
    """DP-SGD parameters of one site. They are fixed with the privacy plan, so adding a patient changes none of them."""

    noise_multiplier: float  # standard deviation of the noise / max_grad_norm
    max_grad_norm: float  # clipping bound of a unit's gradient
    privacy_unit: str
    num_units: int
    sampling_rate: float  # Poisson sampling: probability that a unit is in a step
    # units / examples: without clipping, the mean over units then equals the mean over examples
    loss_scale: float = 1.0

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The noised sum is divided by the expected number of units per step; the sampled number would be private."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "loss_reduction": "mean",
            "expected_batch_size": self.sampling_rate * self.num_units,
        }


@dataclass(frozen=True)
class DpSgdTraining:
    """How sites train with DP-SGD: the parameters of each site, and the clipping mode for all."""

    params_by_site: Mapping[SiteId, DpSgdParams]
    clipping: ClippingMode | Literal["auto"]
    examples_per_unit: float  # the mean over all sites' units

    def resolve_clipping(self, module: nn.Module) -> ClippingMode:
        return select_clipping(module, self.examples_per_unit) if self.clipping == "auto" else self.clipping


@dataclass(frozen=True)
class UnitLoss:
    """Augmentation and weighted cross-entropy of a unit's examples."""

    context: TrainerContext
    secure_random: SecureRandom
    class_weights: Tensor | None  # (C,)
    loss_scale: float

    def example_losses(self, module: nn.Module, rows: Tensor) -> Tensor:
        """(n,) losses of the examples in these pool rows (n,)."""
        x = self.context.pool.inputs(rows)
        if not self.context.config.augmentation.is_identity:
            x = self.context.config.augmentation(x, self.secure_random.torch_generator())
        return example_losses(module(x), self.context.pool.labels(rows), self.class_weights) * self.loss_scale


class ClippingMethod:
    """Base of the three methods. `module`: the model, wrapped in Opacus's hooks if the method needs them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.trainable_params = self.params

    def select_trainable(self, positions: Collection[int]) -> None:
        """Trains only the parameters at these positions; all others are neither clipped nor noised."""
        self.trainable_params = [p for position, p in enumerate(self.params) if position in positions]

    def make_optimizer(
        self, base_optimizer: torch.optim.Optimizer, secure_random: SecureRandom, dp_params: DpSgdParams
    ) -> DpOptimizer:
        """Wraps `base_optimizer` in one that clips and adds noise."""
        return UnitOptimizer(base_optimizer, secure_random, **dp_params.optimizer_kwargs())

    def compute_noised_gradient(self, sampled_units: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        """Writes the noised mean of the units' clipped gradients to `.grad`; returns the sum of the examples' losses.

        Gradients accumulate over passes (Opacus's `signal_skip_step`), and the last pass adds the noise once.
        """
        unit_batches = self.split_batches(sampled_units)
        loss_sum = 0.0
        for index, unit_batch in enumerate(unit_batches):
            loss_sum += self.backward(unit_batch, unit_loss, optimizer)
            optimizer.signal_skip_step(index < len(unit_batches) - 1)
            if not optimizer.pre_step():
                optimizer.zero_grad(True)
        if not unit_batches:  # an empty Poisson sample: the gradient is noise alone
            optimizer.set_empty_batch()
            optimizer.pre_step()
        return loss_sum / unit_loss.loss_scale

    def restore_trainable(self) -> None:
        """Undoes `select_trainable`, so that `ParameterSpec` finds all parameters."""

    @abstractmethod
    def split_batches(self, sampled_units: UnitBatch) -> list[UnitBatch]:
        """The units of each forward and backward pass."""

    @abstractmethod
    def backward(self, unit_batch: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        """Computes what `optimizer` clips in its `pre_step`; returns the sum of the scaled losses."""


class PerUnitBackward(ClippingMethod):
    """One unit per pass: `.grad` after the backward pass is the unit's gradient."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context.make_model().to(context.pool.device))

    def select_trainable(self, positions: Collection[int]) -> None:
        """Computes no gradients of other parameters. Opacus's hooks do not allow that: they expect every layer's."""
        super().select_trainable(positions)
        for position, p in enumerate(self.params):
            p.requires_grad_(position in positions)

    def restore_trainable(self) -> None:
        for p in self.params:
            p.requires_grad_(True)

    def split_batches(self, sampled_units: UnitBatch) -> list[UnitBatch]:
        return [[rows] for rows in sampled_units]

    def backward(self, unit_batch: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        assert isinstance(optimizer, UnitOptimizer)
        loss_sum = 0.0
        for rows in unit_batch[0].split(MAX_EXAMPLES_PER_PASS):
            loss = unit_loss.example_losses(self.module, rows).sum()
            loss.backward()
            loss_sum += float(loss.detach())
        optimizer.set_single_unit()
        return loss_sum


class GradSampleClipping(ClippingMethod):
    """Per-sample gradients `p.grad_sample` (n, *p.shape), which `UnitOptimizer` adds up to (U, *p.shape) and clips."""

    def __init__(self, context: TrainerContext) -> None:
        super().__init__(GradSampleModule(context.make_model().to(context.pool.device), loss_reduction="sum"))
        # per pass, unless a single unit has more
        self.max_examples = max(1, MAX_GRAD_SAMPLE_FLOATS // max(context.spec.num_parameters, 1))

    def split_batches(self, sampled_units: UnitBatch) -> list[UnitBatch]:
        """Never splits a unit: its per-sample gradients must be added up before clipping."""
        unit_batches: list[list[Tensor]] = []
        num_examples = 0
        for rows in sampled_units:
            if not unit_batches or num_examples + len(rows) > self.max_examples:
                unit_batches.append([])
                num_examples = 0
            unit_batches[-1].append(rows)
            num_examples += len(rows)
        return list(unit_batches)

    def backward(self, unit_batch: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        assert isinstance(optimizer, UnitOptimizer)
        loss = unit_loss.example_losses(self.module, torch.cat(list(unit_batch))).sum()
        loss.backward()
        trainable_ids = {id(p) for p in self.trainable_params}
        for p in self.params:
            if id(p) not in trainable_ids:
                p.grad_sample = p.grad = None  # type: ignore[attr-defined]
        sizes = torch.tensor([len(rows) for rows in unit_batch])
        unit_of_example = torch.arange(len(unit_batch)).repeat_interleave(sizes)  # (n,)
        optimizer.set_example_units(unit_of_example.to(unit_batch[0].device), len(unit_batch))
        return float(loss.detach())


class GhostClipping(ClippingMethod):
    """For single examples as units. Norms come from activations and output gradients, without `grad_sample`."""

    def __init__(self, context: TrainerContext) -> None:
        self.grad_sample_module = GradSampleModuleFastGradientClipping(
            context.make_model().to(context.pool.device), loss_reduction="sum"
        )
        super().__init__(self.grad_sample_module)

    def make_optimizer(
        self, base_optimizer: torch.optim.Optimizer, secure_random: SecureRandom, dp_params: DpSgdParams
    ) -> DpOptimizer:
        self.grad_sample_module.max_grad_norm = dp_params.max_grad_norm
        self.grad_sample_module.trainable_parameters = self.trainable_params  # these count in the norm
        return GhostOptimizer(base_optimizer, secure_random, **dp_params.optimizer_kwargs())

    def split_batches(self, sampled_units: UnitBatch) -> list[UnitBatch]:
        return [[rows] for rows in torch.cat(list(sampled_units)).split(MAX_EXAMPLES_PER_PASS)] if sampled_units else []

    def backward(self, unit_batch: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        losses = unit_loss.example_losses(self.module, unit_batch[0])
        DPTensorFastGradientClipping(self.grad_sample_module, optimizer, losses, "sum").backward()
        return float(losses.detach().sum())


CLIPPING_METHODS: dict[ClippingMode, type[PerUnitBackward] | type[GradSampleClipping] | type[GhostClipping]] = {
    "per_unit": PerUnitBackward,
    "grad_sample": GradSampleClipping,
    "ghost": GhostClipping,
}


def select_clipping(module: nn.Module, examples_per_unit: float) -> ClippingMode:
    """The fastest method, as measured on a CPU. `examples_per_unit`: the mean over units."""
    if examples_per_unit >= PER_UNIT_MIN_EXAMPLES:
        return "per_unit"
    layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return "ghost" if examples_per_unit == 1 and all(isinstance(m, nn.Linear) for m in layers) else "grad_sample"
