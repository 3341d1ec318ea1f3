"""What a study's `[privacy.dp_sgd]` comes to at each site: noise, sampling rate, steps, and the epsilon they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import TrainJob
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.privacy import DpSgdConfig
from privacy.accounting.accountant import DpEvent, calibrate_noise_multiplier, compute_privacy_spent
from sites.training.base import SplitIndices, StepBudget, TrainingConfig
from sites.training.unit_clipping import DpSgdParams


@dataclass(frozen=True)
class PrivacyPlan:
    """Of one site, before its first step."""

    dp_sgd_params: DpSgdParams
    delta: float
    steps_per_round: int  # of a turn
    max_rounds: int  # that it is in at most
    epsilon: float  # after all of them
    accountant: str
    num_examples: int

    def dp_event(self, steps: int) -> DpEvent:
        return DpEvent(self.dp_sgd_params.noise_multiplier, self.dp_sgd_params.sampling_rate, steps)

    def to_dict(self) -> dict[str, Any]:
        flat = asdict(self)
        return {**flat.pop("dp_sgd_params"), **flat}


def plan_privacy(
    dp_sgd: DpSgdConfig,
    epsilon: float | None,
    privacy_unit: str,
    num_units: int,
    num_examples: int,
    batch_size: int,
    steps_per_round: int,
    max_rounds: int,
) -> PrivacyPlan:
    """`epsilon`: this site's, where the study says one."""
    sampling_rate = min(1.0, batch_size / num_examples)
    noise_multiplier = (
        calibrate_noise_multiplier(epsilon, dp_sgd.delta, sampling_rate, steps_per_round * max_rounds)
        if epsilon is not None
        else dp_sgd.noise_multiplier
    )
    assert noise_multiplier is not None  # the section asks for one of both
    total = compute_privacy_spent(
        [DpEvent(noise_multiplier, sampling_rate, steps_per_round * max_rounds)], dp_sgd.delta
    )
    params = DpSgdParams(
        noise_multiplier, dp_sgd.max_grad_norm, privacy_unit, num_units, sampling_rate, num_units / num_examples
    )
    return PrivacyPlan(params, dp_sgd.delta, steps_per_round, max_rounds, total.epsilon, total.accountant, num_examples)


def max_steps_per_round(
    rounds: Sequence[DryRunRound], split_indices: SplitIndices, training_config: TrainingConfig
) -> int:
    """Private steps of a turn, at most."""
    return max(
        sum(
            StepBudget.from_job(job, split_indices, training_config).steps_requested
            for job in dry_run_round.jobs
            if isinstance(job, TrainJob) and job.dataset == "train"
        )
        for dry_run_round in rounds
    )


def resolve_privacy_unit(dp_sgd: DpSgdConfig, data_unit: str | None) -> str:
    """By name; "auto" is the coarsest key that the data have."""
    return dp_sgd.privacy_unit if dp_sgd.privacy_unit != "auto" or data_unit is None else data_unit


def count_units(train: Tensor, unit: Tensor | None) -> int:
    return len(train) if unit is None else len(unit[train].unique())


def values_by_site(value: float | tuple[float, ...] | None, sites: Sequence[SiteId]) -> Mapping[SiteId, float | None]:
    """One value for all sites, or one each."""
    values = value if isinstance(value, tuple) else (value,) * len(sites)
    return dict(zip(sites, values, strict=True))
