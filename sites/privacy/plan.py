"""Privacy plans: noise multiplier, sampling rate, steps and epsilon of each site, from the study's `[privacy.dp_sgd]`.

A plan covers all rounds that the site can take part in, so the epsilon of a run is known before its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from pipeline.aggregation.client_sampling import num_sampled_clients, sample_clients
from pipeline.aggregation.secure_aggregation import SecureAggregationSetup, UpdateLayout
from pipeline.protocol.messages import SiteId
from pipeline.protocol.tasks import TrainJob
from pipeline.records.privacy_record import PrivacyPlanRecord
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.privacy import DpSgdConfig
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, calibrate_noise_multiplier, compute_privacy_spent
from privacy.ledger.records import DatasetSnapshot, StudyCommitment
from privacy.secure_aggregation.shamir import reconstruction_threshold
from sites.data.pool import SplitIndices
from sites.governance.home import SiteHome
from sites.population.simulated_sites import FederatedDataset
from sites.training.base import StepBudget, TrainingConfig
from sites.training.unit_clipping import DpSgdParams, DpSgdTraining


@dataclass(frozen=True)
class PrivacyPlan:
    """What DP-SGD costs one site, computed before its first step."""

    dp_sgd_params: DpSgdParams
    delta: float
    steps_per_round: int  # private steps, at most
    max_rounds: int  # rounds that the site takes part in, at most
    epsilon: float  # after `max_rounds` rounds of `steps_per_round` steps
    accountant: str  # the accountant that gave epsilon
    num_examples: int

    def dp_event(self, steps: int) -> DpEvent:
        return DpEvent(self.dp_sgd_params.noise_multiplier, self.dp_sgd_params.sampling_rate, steps)

    def to_record(self) -> PrivacyPlanRecord:
        flat = asdict(self)
        return PrivacyPlanRecord(**flat.pop("dp_sgd_params"), **flat)


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
    """`epsilon`: this site's target, for which the noise multiplier is solved; None: the study sets the multiplier.

    A step samples `batch_size` of `num_examples` examples on average, in whole privacy units.
    """
    sampling_rate = min(1.0, batch_size / num_examples)
    noise_multiplier = (
        calibrate_noise_multiplier(epsilon, dp_sgd.delta, sampling_rate, steps_per_round * max_rounds)
        if epsilon is not None
        else dp_sgd.noise_multiplier
    )
    assert noise_multiplier is not None  # NoiseConfig requires epsilon or noise_multiplier
    total = compute_privacy_spent(
        [DpEvent(noise_multiplier, sampling_rate, steps_per_round * max_rounds)], dp_sgd.delta
    )
    dp_sgd_params = DpSgdParams(
        noise_multiplier=noise_multiplier,
        max_grad_norm=dp_sgd.max_grad_norm,
        privacy_unit=privacy_unit,
        num_units=num_units,
        sampling_rate=sampling_rate,
        loss_scale=num_units / num_examples,
    )
    return PrivacyPlan(
        dp_sgd_params=dp_sgd_params,
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
    """Maximum number of private steps in a round."""
    return max(
        sum(
            StepBudget.from_job(job, split_indices, training_config).steps_requested
            for job in dry_run_round.jobs
            if isinstance(job, TrainJob) and job.dataset == "train"
        )
        for dry_run_round in rounds
    )


def resolve_privacy_unit(dp_sgd: DpSgdConfig, data_unit: str | None) -> str:
    """The name of the privacy unit; "auto" is the coarsest key of the data (`data_unit`)."""
    return dp_sgd.privacy_unit if dp_sgd.privacy_unit != "auto" or data_unit is None else data_unit


def count_units(train_indices: Tensor, unit_ids: Tensor | None) -> int:
    """Privacy units in the training split. `unit_ids`: of all pool rows; None: every example is a unit."""
    return len(train_indices) if unit_ids is None else len(unit_ids[train_indices].unique())


def values_by_site(value: float | tuple[float, ...] | None, sites: Sequence[SiteId]) -> Mapping[SiteId, float | None]:
    """site -> value, from one value for all sites or one for each."""
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
    """`sites`: all sites of the study, in its order; `dataset` may contain `site` alone."""
    privacy_unit = resolve_privacy_unit(dp_sgd, dataset.privacy_unit)
    unit_ids = None if privacy_unit == "example" else dataset.pool.unit_ids
    site_indices = dataset.split_indices[site]
    num_examples = site_indices.num_examples
    num_invitations = max_participations(study, sites, site)
    return plan_privacy(
        dp_sgd=dp_sgd,
        epsilon=values_by_site(dp_sgd.epsilon, sites)[site],
        privacy_unit=privacy_unit,
        num_units=count_units(site_indices.train, unit_ids),
        num_examples=num_examples,
        batch_size=min(training_config.batch_size or num_examples, num_examples),
        steps_per_round=max_steps_per_round(dry_run_rounds, site_indices, training_config),
        max_rounds=min(dp_sgd.max_participations or num_invitations, num_invitations),
    )


def restore_committed_plan(privacy_plan: PrivacyPlan, home: SiteHome, study_hash: str) -> PrivacyPlan:
    """The plan to which the ledger commits, if the run has begun: later withdrawals of patients do not change it."""
    commitment, snapshot = None, None
    for entry in home.ledger.entries():
        if isinstance(entry.record, DatasetSnapshot):
            snapshot = entry.record
        if isinstance(entry.record, StudyCommitment) and entry.record.study_hash == study_hash:
            commitment = entry.record
            break
    if commitment is None or snapshot is None:
        return privacy_plan
    dp_sgd_params = replace(
        privacy_plan.dp_sgd_params,
        noise_multiplier=commitment.noise_multiplier,
        sampling_rate=commitment.sampling_rate,
        num_units=snapshot.num_units,
        loss_scale=snapshot.num_units / max(snapshot.num_examples, 1),
    )
    return replace(
        privacy_plan,
        dp_sgd_params=dp_sgd_params,
        steps_per_round=commitment.steps_per_round,
        max_rounds=commitment.max_participations,
    )


def create_secure_aggregation(
    study: Study, public_keys: Mapping[SiteId, bytes], dry_run_rounds: Sequence[DryRunRound], session_id: str
) -> SecureAggregationSetup | None:
    """None if the study has no secure aggregation.

    `public_keys`: of all sites of the study; `session_id`: the run's identity, to which the sites bind every aggregate
    so that no round is unmasked twice.
    """
    config, client_level_dp = study.privacy.secure_aggregation, study.privacy.client_level_dp
    if config is None:
        return None
    max_update_norm = config.max_update_norm if client_level_dp is None else client_level_dp.max_update_norm
    update = dry_run_rounds[-1].update
    if study.privacy.dp_sgd is not None:  # the training loss has no privacy mechanism, so it stays at the site
        update = replace(update, summed={k: v for k, v in update.summed.items() if k != "train_loss"})
    num_clients = num_sampled_clients(len(public_keys), study.client_sampling.fraction)
    return SecureAggregationSetup(
        UpdateLayout.from_update(
            update, num_clients=num_clients, max_update_norm=max_update_norm, max_examples=config.max_examples
        ),
        public_keys,
        session_id,
        reconstruction_threshold(num_clients),
    )


def exclude_withdrawn(dataset: FederatedDataset, site: SiteId, home: SiteHome) -> FederatedDataset:
    """Removes withdrawn units from the training, validation and test splits of the site."""
    unit_ids = dataset.pool.unit_ids
    if unit_ids is None or not home.withdrawn_units:
        return dataset
    is_retained = torch.tensor(home.retained_mask(dataset.unit_names), device=unit_ids.device)
    indices = dataset.split_indices[site]
    train, val, test = (rows[is_retained[unit_ids[rows]]] for rows in (indices.train, indices.val, indices.test))
    retained = replace(indices, train=train, val=val, test=test)
    return replace(dataset, split_indices={**dataset.split_indices, site: retained})


def record_data(home: SiteHome, dataset: FederatedDataset, site: SiteId) -> None:
    """Appends a snapshot of the data set to the ledger, unless the last snapshot is the same."""
    unit_ids = None if home.ledger.state.opening.privacy_unit == "example" else dataset.pool.unit_ids
    train = dataset.split_indices[site].train
    snapshot = DatasetSnapshot(
        fingerprint=dataset.fingerprint, num_units=count_units(train, unit_ids), num_examples=len(train)
    )
    recorded = [entry.record for entry in home.ledger.entries(DatasetSnapshot.kind)]
    if not recorded or recorded[-1] != snapshot:
        home.ledger.append(snapshot)


def max_participations(study: Study, sites: Sequence[SiteId], site: SiteId) -> int:
    """Number of rounds that sample this site, known from the study's seed. At least 1, because a plan needs a step."""
    num_rounds = sum(
        site in sample_clients(sites, study.client_sampling.fraction, study.seed, round_number)
        for round_number in range(1, study.rounds + 1)
    )
    return max(1, num_rounds)


def dp_sgd_training(study: Study, privacy_plans: Mapping[SiteId, PrivacyPlan]) -> DpSgdTraining | None:
    """None without privacy plans."""
    if study.privacy.dp_sgd is None or not privacy_plans:
        return None
    num_examples = sum(privacy_plan.num_examples for privacy_plan in privacy_plans.values())
    num_units = sum(privacy_plan.dp_sgd_params.num_units for privacy_plan in privacy_plans.values())
    return DpSgdTraining(
        params_by_site={site: privacy_plan.dp_sgd_params for site, privacy_plan in privacy_plans.items()},
        clipping=study.privacy.dp_sgd.clipping,
        examples_per_unit=num_examples / max(num_units, 1),
    )
