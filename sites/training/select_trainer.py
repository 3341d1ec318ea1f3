"""Chooses device, trainer and number of threads by fixed rules, derived from measurements on two cores.

On a CPU, stacking makes MLPs 2 to 4 times faster and convolutions 1.5 times slower; for convolutions one thread per
site is slightly faster. On a GPU every model that can be stacked is stacked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

import torch

from pipeline.core.errors import IncompatibleStudyError
from pipeline.study.run_spec import RunSpec
from pipeline.study.schema import Study
from sites.population.simulated_sites import FederatedDataset
from sites.training.augmentation import BatchAugmentation
from sites.training.base import Trainer, TrainerContext, TrainingConfig
from sites.training.sequential import SequentialTrainer, has_dropout
from sites.training.stacked_mlp import StackedMlpGradients

if TYPE_CHECKING:
    from sites.training.dp_sgd import DpSgdTrainer
    from sites.training.unit_clipping import DpSgdTraining

TrainerKind = Literal["sequential", "stacked", "threaded"]


def select_device(study: Study) -> torch.device:
    """The study's device; "auto" is CUDA, then MPS, then the CPU."""
    if study.device != "auto":
        is_available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
        if not is_available[study.device]:
            raise IncompatibleStudyError(f"device = {study.device!r}, but this machine has none; use device = 'auto'")
        return torch.device(study.device)
    return torch.device("cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu")


def make_training_config(study: Study, lr: Callable[[int], float]) -> TrainingConfig:
    local = study.local
    return TrainingConfig(
        batch_size=None if local.batch_size == "all" else local.batch_size,
        optimizer=local.optimizer,
        momentum=local.momentum,
        weight_decay=local.weight_decay,
        lr_schedule=lr,
        augmentation=BatchAugmentation(**study.augmentation.model_dump()),
        class_balance=local.class_balance,
        trainable_roles=None if local.trainable is None else frozenset(local.trainable),
        public_batch_size=study.public.batch_size,
    )


def make_trainer_context(run_spec: RunSpec, dataset: FederatedDataset, config: TrainingConfig) -> TrainerContext:
    return TrainerContext(
        make_model=run_spec.build_model,
        spec=run_spec.parameter_spec,
        pool=dataset.pool,
        split_indices=dataset.split_indices,
        config=config,
        num_classes=len(run_spec.classes),
        seed=run_spec.study.seed,
        public_indices=dataset.public_indices,
    )


def select_trainer_kind(
    requested: TrainerKind | Literal["auto"],
    context: TrainerContext,
    num_threads: int,
    is_private: bool = False,
) -> TrainerKind:
    """`is_private`: the sites train with DP-SGD, which cannot be stacked."""
    if requested != "auto":
        return requested
    module = context.make_model()
    is_stackable = not is_private and not context.spec.num_norm_stats and not has_dropout(module)
    if context.pool.device.type != "cpu":
        return "stacked" if is_stackable else "sequential"
    if is_stackable and StackedMlpGradients.from_module(module):
        return "stacked"
    uses_threads = num_threads > 1 and len(context.split_indices) > 2
    return "threaded" if uses_threads and not has_dropout(module) else "sequential"


def select_num_threads(requested: int | None, context: TrainerContext) -> int:
    """Threads of torch; small models lose more by waiting for other threads than they gain."""
    is_small = context.spec.num_parameters * (context.config.batch_size or 1000) < 1_000_000
    return requested or (1 if is_small else os.cpu_count() or 1)


@contextmanager
def restored_num_threads() -> Iterator[None]:
    """Restores torch's number of threads, which a study sets for the whole process."""
    num_threads = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def make_trainer(
    kind: TrainerKind, context: TrainerContext, num_threads: int, dp_sgd: DpSgdTraining | None = None
) -> Trainer:
    if kind == "stacked" and dp_sgd is None:
        from sites.training.stacked import StackedTrainer

        # on a GPU all sites are one stack
        return StackedTrainer(context, num_threads if context.pool.device.type == "cpu" else 1)
    if kind == "threaded":
        from sites.training.threaded import ThreadedTrainer

        trainers = [_make_single_trainer(context, dp_sgd) for _ in range(num_threads)]
        if dp_sgd is None:
            return ThreadedTrainer(trainers, context)
        from sites.training.unit_clipping import ignored_hook_warnings

        return ThreadedTrainer(trainers, context, ignored_hook_warnings)
    return _make_single_trainer(context, dp_sgd)


def _make_single_trainer(context: TrainerContext, dp_sgd: DpSgdTraining | None) -> SequentialTrainer | DpSgdTrainer:
    if dp_sgd is None:
        return SequentialTrainer(context)
    from sites.training.dp_sgd import DpSgdTrainer

    return DpSgdTrainer(context, dp_sgd.params_by_site, dp_sgd.resolve_clipping(context.make_model()))
