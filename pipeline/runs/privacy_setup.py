"""From a study's `[privacy]` to what enforces it: terms for the trainer, a desk for every site, noise, masks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from pipeline.aggregation.client_level_dp import ClientLevelDpMean
from pipeline.aggregation.client_sampling import num_sampled_clients, sample_clients
from pipeline.aggregation.rules import AggregationRule
from pipeline.aggregation.secure_aggregation import SecureAggregationSetup, UpdateLayout
from pipeline.protocol.messages import SiteId
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.privacy import ClientLevelDpConfig, DpSgdConfig
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, calibrate_noise_multiplier, compute_privacy_spent
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.records import DatasetSnapshot, LedgerBudget, StudyCommitment
from privacy.secure_aggregation.shamir import reconstruction_threshold
from sites.governance.home import SiteHome
from sites.population.simulated_sites import FederatedDataset
from sites.privacy.budget_guard import BudgetGuard
from sites.privacy.plan import (
    PrivacyPlan,
    count_units,
    max_steps_per_round,
    plan_privacy,
    resolve_privacy_unit,
    values_by_site,
)
from sites.privacy.secure_agg_client import SecureAggClient
from sites.training.base import Trainer, TrainerContext, TrainingConfig
from sites.training.select_trainer import TrainerKind, make_trainer
from sites.training.unit_clipping import ClippingMode, select_clipping

UNLIMITED_EPSILON = 1e6  # epsilon of a simulated site for which the study names none: only counted


@dataclass(frozen=True)
class PrivacySetup:
    dataset: FederatedDataset  # without those who withdrew
    privacy_plans: Mapping[SiteId, PrivacyPlan] = field(default_factory=dict)
    secure_agg_clients: Mapping[SiteId, SecureAggClient] = field(default_factory=dict)
    secure_aggregation: SecureAggregationSetup | None = None
    aggregation_rule: AggregationRule | None = None
    privacy_record: Mapping[str, Any] = field(default_factory=dict)  # for privacy.json

    def privacy_spent(self) -> dict[str, Any]:
        """Epsilon spent at each site so far, over all studies on its data."""
        if not self.privacy_plans:
            return {}
        charges_by_site = {
            site: secure_agg_client.home.ledger.list_charges()
            for site, secure_agg_client in self.secure_agg_clients.items()
        }
        return {
            "epsilon": {
                site: charges[-1].total_epsilon if charges else 0.0 for site, charges in charges_by_site.items()
            }
        }

    def create_trainer(self, trainer_kind: TrainerKind, trainer_context: TrainerContext, study: Study) -> Trainer:
        dp_params = {site: privacy_plan.dp_sgd_params for site, privacy_plan in self.privacy_plans.items()}
        return make_trainer(
            trainer_kind, trainer_context, dp_params, select_clipping_mode(study, trainer_context, self.privacy_plans)
        )


def build_privacy_plans(
    study: Study, dataset: FederatedDataset, dry_run_rounds: Sequence[DryRunRound], training_config: TrainingConfig
) -> dict[SiteId, PrivacyPlan]:
    dp_sgd = study.privacy.dp_sgd
    if dp_sgd is None:
        return {}
    return {
        site: build_privacy_plan(study, dp_sgd, dataset, site, dataset.sites, dry_run_rounds, training_config)
        for site in dataset.sites
    }


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
        dp_sgd,
        values_by_site(dp_sgd.epsilon, sites)[site],
        unit,
        num_units,
        num_examples,
        batch_size,
        steps_per_round,
        num_participations,
    )


def setup_privacy(
    study: Study,
    dataset: FederatedDataset,
    dry_run_rounds: Sequence[DryRunRound],
    training_config: TrainingConfig,
    run_path: Path | None,
    homes_folder: Path | None,
) -> PrivacySetup:
    """`homes`: where simulated sites live between runs; in the run's folder, new, if not given. Without a run, promises
    are only worked out."""
    if run_path is None:
        privacy_plans = build_privacy_plans(study, dataset, dry_run_rounds, training_config)
        return PrivacySetup(
            dataset, privacy_plans, privacy_record=describe_privacy(study, dataset.sites, privacy_plans, None)
        )
    site_homes = _open_site_homes(study, dataset, homes_folder or run_path / "homes")
    dataset = exclude_withdrawn(dataset, site_homes)
    for site, home in site_homes.items():
        record_data(home, dataset, site)
    privacy_plans = {
        site: restore_committed_plan(privacy_plan, site_homes[site], study.hash)
        for site, privacy_plan in build_privacy_plans(study, dataset, dry_run_rounds, training_config).items()
    }
    public_keys = {site: keys.public_bytes(home.agent_key) for site, home in site_homes.items()}
    secure_aggregation = create_secure_aggregation(study, public_keys, dry_run_rounds, study.hash)
    coordinator_key, signer = open_countersigner(
        run_path / "coordinator" if homes_folder is None else homes_folder / ".coordinator"
    )
    secure_agg_clients = {}
    for site, home in site_homes.items():
        privacy_plan = privacy_plans.get(site)
        guard = (
            None
            if privacy_plan is None
            else BudgetGuard(home, privacy_plan, study.name, study.hash, signer.countersign, coordinator_key)
        )
        secure_agg_clients[site] = SecureAggClient(site, home, guard, secure_aggregation, study.weighting)
    privacy_record = describe_privacy(study, dataset.sites, privacy_plans, secure_aggregation)
    return PrivacySetup(
        dataset,
        privacy_plans,
        secure_agg_clients,
        secure_aggregation,
        create_client_level_dp(study, privacy_record),
        privacy_record,
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
    settings = study.privacy.secure_aggregation
    if settings is None:
        return None
    if study.privacy.client_level_dp is not None:
        settings = settings.model_copy(update={"max_update_norm": study.privacy.client_level_dp.max_update_norm})
    update = dry_run_rounds[-1].update
    if study.privacy.dp_sgd is not None:  # a training loss is no mechanism's: it stays at the site
        update = replace(update, summed={k: v for k, v in update.summed.items() if k != "train_loss"})
    num_clients = num_sampled_clients(len(public_keys), study.client_sampling.fraction)
    return SecureAggregationSetup(
        UpdateLayout.from_update(update, num_clients, settings),
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


def _open_site_homes(study: Study, dataset: FederatedDataset, homes_folder: Path) -> dict[SiteId, SiteHome]:
    dp_sgd = study.privacy.dp_sgd
    unit = resolve_privacy_unit(dp_sgd, dataset.privacy_unit) if dp_sgd else dataset.privacy_unit or "example"
    epsilon_by_site = (
        dict.fromkeys(dataset.sites, None)
        if dp_sgd is None
        else values_by_site(dp_sgd.epsilon_budget or dp_sgd.epsilon, dataset.sites)
    )
    homes = {}
    for site in dataset.sites:
        path = homes_folder / quote(site, safe="")
        if (path / "ledger.jsonl").is_file():
            homes[site] = SiteHome.open(path)
        else:
            budget = LedgerBudget(
                epsilon=epsilon_by_site[site] or UNLIMITED_EPSILON, delta=dp_sgd.delta if dp_sgd else 1e-5
            )
            homes[site] = SiteHome.create(path, site, f"{site}:{study.data.name}", unit, budget)
    return homes


def record_data(home: SiteHome, dataset: FederatedDataset, site: SiteId) -> None:
    """What the data set is made of now, if that is news."""
    unit_codes = None if home.ledger.state.opening.privacy_unit == "example" else dataset.pool.unit_ids
    train = dataset.split_indices[site].train
    data_record = DatasetSnapshot(
        fingerprint=dataset.fingerprint, num_units=count_units(train, unit_codes), num_examples=len(train)
    )
    recorded = [entry.record for entry in home.ledger.entries("data")]
    if not recorded or recorded[-1] != data_record:
        home.ledger.append(data_record)


def open_countersigner(folder: Path) -> tuple[str, LedgerCountersigner]:
    """One coordinator, with its public key, for all runs that share the sites' homes."""
    path = folder / "key.pem"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        keys.save_key(keys.generate_key(), path)
    key = keys.load_key(path)
    return keys.public_hex(key), LedgerCountersigner(folder / "receipts", key)


def describe_privacy(
    study: Study,
    sites: Sequence[SiteId],
    privacy_plans: Mapping[SiteId, PrivacyPlan],
    secure_aggregation: SecureAggregationSetup | None,
) -> dict[str, Any]:
    """privacy.json: what was promised before anything was trained."""
    privacy_record: dict[str, Any] = {
        "dp_sgd": {site: privacy_plan.to_dict() for site, privacy_plan in privacy_plans.items()}
    }
    if study.privacy.client_level_dp is not None:
        privacy_record["client_level_dp"] = _describe_client_level_dp(
            study, study.privacy.client_level_dp, sites, secure_aggregation
        )
    if secure_aggregation is not None:
        layout = secure_aggregation.update_layout
        num_clients = num_sampled_clients(len(sites), study.client_sampling.fraction)
        privacy_record["secure_aggregation"] = {"asked": num_clients, "threshold": reconstruction_threshold(num_clients), "clip": layout.settings.max_update_norm,
                              "bits": layout.grid.num_bits, "step": layout.grid.step_size,
                              "fingerprints": {s: keys.fingerprint(k) for s, k in secure_aggregation.public_keys.items()}}  # fmt: skip
    return privacy_record


def _describe_client_level_dp(
    study: Study,
    client_level_dp: ClientLevelDpConfig,
    sites: Sequence[SiteId],
    secure_aggregation: SecureAggregationSetup | None,
) -> dict[str, Any]:
    num_rounds = max(max_participations(study, sites, site) for site in sites)
    noise_multiplier = client_level_dp.noise_multiplier or calibrate_noise_multiplier(
        client_level_dp.epsilon or 0.0, client_level_dp.delta, 1.0, num_rounds
    )
    spent = compute_privacy_spent([DpEvent(noise_multiplier, 1.0, num_rounds)], client_level_dp.delta)
    num_clients = num_sampled_clients(len(sites), study.client_sampling.fraction)
    max_norm = (
        client_level_dp.max_update_norm
        if secure_aggregation is None
        else secure_aggregation.update_layout.grid.max_rounded_norm
    )
    return {"noise": noise_multiplier, "clip": client_level_dp.max_update_norm, "longest": max_norm, "delta": client_level_dp.delta, "epsilon": spent.epsilon,
            "accountant": spent.accountant, "turns": num_rounds, "sites": len(sites), "asked": num_clients}  # fmt: skip


def create_client_level_dp(study: Study, privacy_record: Mapping[str, Any]) -> AggregationRule | None:
    settings = privacy_record.get("client_level_dp")
    return settings and ClientLevelDpMean(
        max_update_norm=settings["clip"],
        noise_multiplier=settings["noise"],
        sensitivity=settings["longest"],
        num_sampled_clients=settings["asked"],
    )


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
