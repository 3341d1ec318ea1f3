"""What a study's `[privacy.dp_sgd]` comes to at each site: noise, sampling rate, steps, and the epsilon they add up to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pipeline.aggregation.client_sampling import num_sampled_clients, sample_clients
from pipeline.aggregation.secure_aggregation import SecureAggregationSetup, UpdateLayout
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import TrainJob
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.privacy import DpSgdConfig
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, calibrate_noise_multiplier, compute_privacy_spent
from privacy.ledger.records import DatasetSnapshot, StudyCommitment
from privacy.secure_aggregation.shamir import reconstruction_threshold
from sites.data.pool import SplitIndices
from sites.governance.home import SiteHome
from sites.population.simulated_sites import FederatedDataset
from sites.training.base import StepBudget, TrainerContext, TrainingConfig
from sites.training.unit_clipping import ClippingMode, DpSgdParams, select_clipping


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
    return PrivacyPlan(
        dp_sgd_params=params,
        delta=dp_sgd.delta,
        steps_per_round=steps_per_round,
        max_rounds=max_rounds,
        epsilon=total.epsilon,
        accountant=total.accountant,
        num_examples=num_examples,
    )


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


def build_privacy_plan(
    study: Study,
    dp_sgd: DpSgdConfig,
    dataset: FederatedDataset,
    site: SiteId,
    sites: Sequence[SiteId],
    dry_run_rounds: Sequence[DryRunRound],
    training_config: TrainingConfig,
) -> PrivacyPlan:
    """`sites`: all of the study, of which `people` may be this one alone."""
    unit = resolve_privacy_unit(dp_sgd, dataset.privacy_unit)
    examples = dataset.split_indices[site]
    num_examples, num_units = (
        examples.num_examples,
        count_units(examples.train, None if unit == "example" else dataset.pool.unit_ids),
    )
    num_invitations = max_participations(study, sites, site)
    num_participations = min(dp_sgd.max_participations or num_invitations, num_invitations)
    steps_per_round, batch_size = (
        max_steps_per_round(dry_run_rounds, examples, training_config),
        min(training_config.batch_size or num_examples, num_examples),
    )
    return plan_privacy(
        dp_sgd=dp_sgd,
        epsilon=values_by_site(dp_sgd.epsilon, sites)[site],
        privacy_unit=unit,
        num_units=num_units,
        num_examples=num_examples,
        batch_size=batch_size,
        steps_per_round=steps_per_round,
        max_rounds=num_participations,
    )


def restore_committed_plan(privacy_plan: PrivacyPlan, home: SiteHome, study_hash: str) -> PrivacyPlan:
    """A plan that has begun goes on as it began, whoever withdrew since."""
    commitment, data_record = None, None
    for entry in home.ledger.entries():
        if isinstance(entry.record, DatasetSnapshot):
            data_record = entry.record
        if isinstance(entry.record, StudyCommitment) and entry.record.study_hash == study_hash:
            commitment = entry.record
            break
    if commitment is None or data_record is None:
        return privacy_plan
    dp_params = replace(
        privacy_plan.dp_sgd_params,
        noise_multiplier=commitment.noise_multiplier,
        sampling_rate=commitment.sampling_rate,
        num_units=data_record.num_units,
        loss_scale=data_record.num_units / max(data_record.num_examples, 1),
    )
    return replace(
        privacy_plan,
        dp_sgd_params=dp_params,
        steps_per_round=commitment.steps_per_round,
        max_rounds=commitment.max_participations,
    )


def create_secure_aggregation(
    study: Study, public_keys: Mapping[SiteId, bytes], dry_run_rounds: Sequence[DryRunRound], session_id: str
) -> SecureAggregationSetup | None:
    """`roster`: public keys of all sites of the study; `identity`: what sums are bound to, so that none is made twice."""
    settings, client_level_dp = study.privacy.secure_aggregation, study.privacy.client_level_dp
    if settings is None:
        return None
    max_update_norm = settings.max_update_norm if client_level_dp is None else client_level_dp.max_update_norm
    update = dry_run_rounds[-1].update
    if study.privacy.dp_sgd is not None:  # a training loss is no mechanism's: it stays at the site
        update = replace(update, summed={k: v for k, v in update.summed.items() if k != "train_loss"})
    num_clients = num_sampled_clients(len(public_keys), study.client_sampling.fraction)
    return SecureAggregationSetup(
        UpdateLayout.from_update(
            update, num_clients=num_clients, max_update_norm=max_update_norm, max_examples=settings.max_examples
        ),
        public_keys,
        session_id,
        reconstruction_threshold(num_clients),
    )


def exclude_withdrawn(dataset: FederatedDataset, homes: Mapping[SiteId, SiteHome]) -> FederatedDataset:
    """Nobody who withdrew is trained on, or judged on, any more."""
    unit = dataset.pool.unit_ids
    if unit is None or not any(home.withdrawn_units for home in homes.values()):
        return dataset
    examples = dict(dataset.split_indices)
    for site, home in homes.items():
        is_remaining = torch.tensor(home.retained_mask(dataset.unit_names), device=unit.device)
        indices = examples[site]
        train, val, test = (rows[is_remaining[unit[rows]]] for rows in (indices.train, indices.val, indices.test))
        examples[site] = replace(indices, train=train, val=val, test=test)
    return replace(dataset, split_indices=examples)


def record_data(home: SiteHome, dataset: FederatedDataset, site: SiteId) -> None:
    """What the data set is made of now, if that is news."""
    unit_codes = None if home.ledger.state.opening.privacy_unit == "example" else dataset.pool.unit_ids
    train = dataset.split_indices[site].train
    data_record = DatasetSnapshot(
        fingerprint=dataset.fingerprint, num_units=count_units(train, unit_codes), num_examples=len(train)
    )
    recorded = [entry.record for entry in home.ledger.entries(DatasetSnapshot.kind)]
    if not recorded or recorded[-1] != data_record:
        home.ledger.append(data_record)


def max_participations(study: Study, sites: Sequence[SiteId], site: SiteId) -> int:
    """Known beforehand: who is asked when follows from the study's seed. At least 1, for a plan of no steps is none."""
    round_numbers = range(1, study.rounds + 1)
    return max(
        1,
        sum(
            site in sample_clients(sites, study.client_sampling.fraction, study.seed, round_number)
            for round_number in round_numbers
        ),
    )


def select_clipping_mode(
    study: Study, trainer_context: TrainerContext, privacy_plans: Mapping[SiteId, PrivacyPlan]
) -> ClippingMode:
    dp_sgd = study.privacy.dp_sgd
    if dp_sgd is not None and dp_sgd.clipping != "auto":
        return dp_sgd.clipping
    num_examples = sum(privacy_plan.num_examples for privacy_plan in privacy_plans.values())
    num_units = sum(privacy_plan.dp_sgd_params.num_units for privacy_plan in privacy_plans.values())
    return select_clipping(trainer_context.make_model(), num_examples / max(num_units, 1))
