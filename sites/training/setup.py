"""Builds the trainer of a run, the same for a simulation, for a site, and for the coordinator of real sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import JobResult, LocalJob
from pipeline.study.run_spec import RunSpec
from sites.population.simulated_sites import FederatedDataset
from sites.training.base import Trainer, TrainerContext, TrainingConfig, TrainRequest
from sites.training.select_trainer import (
    TrainerKind,
    make_trainer,
    make_trainer_context,
    select_num_threads,
    select_trainer_kind,
)

if TYPE_CHECKING:
    from sites.training.unit_clipping import DpSgdTraining


@dataclass(frozen=True)
class TrainingSetup:
    """A trainer and what it was built from."""

    context: TrainerContext
    trainer: Trainer
    kind: TrainerKind
    num_threads: int

    @property
    def environment(self) -> dict[str, Any]:
        """What a resumed run must have in common with the run that it continues, to be equal bit for bit."""
        device = self.context.pool.device.type
        return {"trainer": self.kind, "threads": self.num_threads, "device": device, "torch": torch.__version__}

    def run_jobs(self, owner: SiteId, jobs: Sequence[LocalJob], round_number: int) -> list[JobResult]:
        """Runs jobs on the examples of `owner`, for example the coordinator's own."""
        return self.trainer.run([TrainRequest(owner, round_number, index, job) for index, job in enumerate(jobs)])


def set_up_training(
    run_spec: RunSpec,
    dataset: FederatedDataset,
    training_config: TrainingConfig,
    *,
    dp_sgd: DpSgdTraining | None = None,
    max_threads: int | None = None,
    recorded_environment: Mapping[str, Any] | None = None,
) -> TrainingSetup:
    """Sets torch's number of threads. `recorded_environment`: of the run that is resumed; it decides trainer and threads."""
    study = run_spec.study
    context = make_trainer_context(run_spec, dataset, training_config)
    if recorded_environment is None:
        num_threads = min(select_num_threads(study.num_threads, context), max_threads or 1024)
        kind = select_trainer_kind(study.trainer, context, num_threads, dp_sgd is not None)
    else:
        num_threads, kind = recorded_environment["threads"], recorded_environment["trainer"]
    torch.set_num_threads(num_threads)
    return TrainingSetup(context, make_trainer(kind, context, num_threads, dp_sgd), kind, num_threads)
