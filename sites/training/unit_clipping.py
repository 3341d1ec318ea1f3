"""Three ways to the sum of the units' clipped gradients. All give the same sum; they differ in time and memory.

whole   a unit at a time by plain backward passes: nothing per example is kept, units may be of any size
hooks   gradients of single examples by Opacus's hooks, added up by unit: for units of few examples
ghost   norms first, then a second backward pass of the weighted losses: single examples, large dense layers
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import Tensor, nn

from privacy.dpsgd.optimizer import GhostOptimizer, UnitOptimizer
from privacy.dpsgd.secure_rng import SecureRandom
from sites.training.base import TrainerContext
from sites.training.sequential import example_losses

# of the first layer: images need no gradient. For good, because trainers run in threads, which share their filters
warnings.filterwarnings("ignore", message="Full backward hook is firing")

ClippingMode = Literal["per_unit", "grad_sample", "ghost"]
DpOptimizer = UnitOptimizer | GhostOptimizer
UnitBatch = Sequence[Tensor]  # whole units: each one's rows of the pool
MAX_GRAD_SAMPLE_FLOATS = 1 << 24  # numbers of per-example gradients kept at a time
MAX_EXAMPLES_PER_PASS = 256  # examples in a pass that keeps none
MIN_LARGE_UNIT_EXAMPLES = 6  # examples a unit


@dataclass(frozen=True)
class DpSgdParams:
    """What a site's private training is bound to. Fixed when the plan is, so that one patient more changes none of it."""

    noise_multiplier: float  # standard deviation, in clipping norms
    max_grad_norm: float
    privacy_unit: str
    num_units: int
    sampling_rate: float  # chance of a unit to be in a step
    loss_scale: float = 1.0  # units / examples: the mean over units is then, unclipped, that over examples

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The noisy sum is divided by the number of units that a step draws on average, never by how many it drew."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "loss_reduction": "mean",
            "expected_batch_size": self.sampling_rate * self.num_units,
        }


@dataclass(frozen=True)
class UnitLoss:
    """How the network sees a unit's examples, and what their losses count."""

    context: TrainerContext
    secure_random: SecureRandom
    class_weights: Tensor | None  # (C,) of the classes
    loss_scale: float

    def example_losses(self, module: nn.Module, rows: Tensor) -> Tensor:
        """(B,)"""
        x = self.context.pool.inputs(rows)
        if not self.context.config.augmentation.is_identity:
            x = self.context.config.augmentation(x, self.secure_random.torch_generator())
        return example_losses(module(x), self.context.pool.labels(rows), self.class_weights) * self.loss_scale


class ClippingMethod:
    """`module` is what trains."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.params = [p for p in module.parameters() if p.requires_grad]
        self.trainable_params = self.params

    def select_trainable(self, positions: Collection[int]) -> None:
        """Only these parameters are trained: what does not move is neither clipped nor noised."""
        self.trainable_params = [p for position, p in enumerate(self.params) if position in positions]

    def make_optimizer(
        self, base_optimizer: torch.optim.Optimizer, secure_random: SecureRandom, dp_params: DpSgdParams
    ) -> DpOptimizer:
        return UnitOptimizer(base_optimizer, secure_random, **dp_params.optimizer_kwargs())

    def accumulate_noised_mean(self, sampled_units: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        """Leaves the noised mean gradient of these units in .grad; the sum of their losses."""
        unit_batches = self.split_batches(sampled_units)
        loss_sum = 0.0
        for index, unit_batch in enumerate(unit_batches):
            loss_sum += self.backward(unit_batch, unit_loss, optimizer)
            optimizer.signal_skip_step(index < len(unit_batches) - 1)
            if not optimizer.pre_step():
                optimizer.zero_grad(True)
        if not unit_batches:  # nobody was drawn: the step is noise
            optimizer.set_empty_batch()
            optimizer.pre_step()
        return loss_sum / unit_loss.loss_scale

    def restore_trainable(self) -> None:
        """As it was before `move`, to be read."""

    @abstractmethod
    def split_batches(self, sampled_units: UnitBatch) -> list[UnitBatch]:
        """What goes through the network at once."""

    @abstractmethod
    def backward(self, unit_batch: UnitBatch, unit_loss: UnitLoss, optimizer: DpOptimizer) -> float:
        """Leaves with the optimiser what it clips."""


class PerUnitBackward(ClippingMethod):
    def __init__(self, context: TrainerContext) -> None:
        super().__init__(context.make_model().to(context.pool.device))

    def select_trainable(self, positions: Collection[int]) -> None:
        """Nothing is computed for the others. Opacus's hooks could not do that: they expect every layer to take part."""
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
    def __init__(self, context: TrainerContext) -> None:
        super().__init__(GradSampleModule(context.make_model().to(context.pool.device), loss_reduction="sum"))
        self.max_examples = max(
            1, MAX_GRAD_SAMPLE_FLOATS // max(context.spec.num_parameters, 1)
        )  # examples at once, unless one unit has more

    def split_batches(self, sampled_units: UnitBatch) -> list[UnitBatch]:
        """No unit is split: its gradients have to be added up before they are clipped."""
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
        unit_of_example = torch.arange(len(unit_batch)).repeat_interleave(sizes)
        optimizer.set_example_units(unit_of_example.to(unit_batch[0].device), len(unit_batch))
        return float(loss.detach())


class GhostClipping(ClippingMethod):
    def __init__(self, context: TrainerContext) -> None:
        self.grad_sample_module = GradSampleModuleFastGradientClipping(
            context.make_model().to(context.pool.device), loss_reduction="sum"
        )
        super().__init__(self.grad_sample_module)

    def make_optimizer(
        self, base_optimizer: torch.optim.Optimizer, secure_random: SecureRandom, dp_params: DpSgdParams
    ) -> DpOptimizer:
        self.grad_sample_module.max_grad_norm = dp_params.max_grad_norm
        self.grad_sample_module.trainable_parameters = self.trainable_params  # whose norms are added up
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
    """Measured on a CPU: plain passes win from some six examples a unit on; ghost norms where all layers are dense."""
    if examples_per_unit >= MIN_LARGE_UNIT_EXAMPLES:
        return "per_unit"
    layers = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return "ghost" if examples_per_unit == 1 and all(isinstance(m, nn.Linear) for m in layers) else "grad_sample"
