"""Turns a study's `[privacy]` into privacy plans, budget guards, secure aggregation and client-level DP of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.aggregation.client_level_dp import ClientLevelDpMean
from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.aggregation.rules import AggregationRule
from pipeline.aggregation.secure_aggregation import SecureAggregationSetup
from pipeline.protocol.messages import SiteId
from pipeline.records.privacy_record import (
    ClientLevelDpRecord,
    PrivacyPlanRecord,
    PrivacyRecord,
    SecureAggregationRecord,
)
from pipeline.records.site_homes import SiteHomes
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.privacy import ClientLevelDpConfig
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent, calibrate_noise_multiplier, compute_privacy_spent
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.records import LedgerBudget
from privacy.secure_aggregation.shamir import reconstruction_threshold
from sites.governance.home import SiteHome
from sites.population.simulated_sites import FederatedDataset
from sites.privacy.plan import (
    PrivacyPlan,
    build_privacy_plan,
    create_secure_aggregation,
    max_participations,
    resolve_privacy_unit,
    values_by_site,
)
from sites.privacy.setup import RunPrivacy, set_up_site_privacy
from sites.privacy.site_privacy import SitePrivacy
from sites.training.base import TrainingConfig

UNLIMITED_EPSILON = 1e6  # budget of a simulated site without epsilon: its spending is only recorded


@dataclass(frozen=True)
class PrivacySetup:
    dataset: FederatedDataset  # without withdrawn units
    privacy_plans: Mapping[SiteId, PrivacyPlan] = field(default_factory=dict)
    privacy_by_site: Mapping[SiteId, SitePrivacy] = field(default_factory=dict)
    secure_aggregation: SecureAggregationSetup | None = None
    aggregation_rule: AggregationRule | None = None
    privacy_record: PrivacyRecord = field(default_factory=PrivacyRecord)


def build_privacy_plans(
    study: Study, dataset: FederatedDataset, dry_run_rounds: Sequence[DryRunRound], training_config: TrainingConfig
) -> dict[SiteId, PrivacyPlan]:
    dp_sgd = study.privacy.dp_sgd
    if dp_sgd is None:
        return {}
    return {
        site: build_privacy_plan(
            study=study,
            dp_sgd=dp_sgd,
            dataset=dataset,
            site=site,
            sites=dataset.sites,
            dry_run_rounds=dry_run_rounds,
            training_config=training_config,
        )
        for site in dataset.sites
    }


def setup_privacy(
    study: Study,
    dataset: FederatedDataset,
    dry_run_rounds: Sequence[DryRunRound],
    training_config: TrainingConfig,
    run_path: Path | None,
    homes_folder: Path | None,
) -> PrivacySetup:
    """`homes_folder`: of the simulated sites' homes; None: new ones in the run folder. Without `run_path` the privacy plans
    are only computed."""
    if run_path is None:
        privacy_plans = build_privacy_plans(study, dataset, dry_run_rounds, training_config)
        return PrivacySetup(
            dataset,
            privacy_plans,
            privacy_record=describe_privacy(study, dataset.sites, _records_of(privacy_plans), None),
        )
    locations = SiteHomes.locate(run_path, homes_folder)
    site_homes = _open_site_homes(study, dataset, locations)
    public_keys = {site: keys.public_bytes(home.agent_key) for site, home in site_homes.items()}
    coordinator_key, signer = open_countersigner(locations.coordinator_folder)
    run_privacy = RunPrivacy(
        study=study,
        run_digest=study.hash,
        sites=dataset.sites,
        dry_run_rounds=dry_run_rounds,
        training_config=training_config,
        secure_aggregation=create_secure_aggregation(study, public_keys, dry_run_rounds, study.hash),
        countersign=signer.countersign,
        coordinator_key=coordinator_key,
    )
    privacy_by_site: dict[SiteId, SitePrivacy] = {}
    for site, home in site_homes.items():
        dataset, privacy_by_site[site] = set_up_site_privacy(run_privacy, home, site, dataset)
    privacy_plans = {
        site: privacy.privacy_plan for site, privacy in privacy_by_site.items() if privacy.privacy_plan is not None
    }
    privacy_record = describe_privacy(study, dataset.sites, _records_of(privacy_plans), run_privacy.secure_aggregation)
    return PrivacySetup(
        dataset=dataset,
        privacy_plans=privacy_plans,
        privacy_by_site=privacy_by_site,
        secure_aggregation=run_privacy.secure_aggregation,
        aggregation_rule=create_client_level_dp(privacy_record),
        privacy_record=privacy_record,
    )


def _open_site_homes(study: Study, dataset: FederatedDataset, locations: SiteHomes) -> dict[SiteId, SiteHome]:
    dp_sgd = study.privacy.dp_sgd
    unit = resolve_privacy_unit(dp_sgd, dataset.privacy_unit) if dp_sgd else dataset.privacy_unit or "example"
    epsilon_by_site = (
        dict.fromkeys(dataset.sites, None)
        if dp_sgd is None
        else values_by_site(dp_sgd.epsilon_budget or dp_sgd.epsilon, dataset.sites)
    )
    homes = {}
    for site in dataset.sites:
        path = locations.home_path(site)
        if (path / "ledger.jsonl").is_file():
            homes[site] = SiteHome.open(path)
        else:
            budget = LedgerBudget(
                epsilon=epsilon_by_site[site] or UNLIMITED_EPSILON, delta=dp_sgd.delta if dp_sgd else 1e-5
            )
            homes[site] = SiteHome.create(path, site, f"{site}:{study.data.name}", unit, budget)
    return homes


def open_countersigner(folder: Path) -> tuple[str, LedgerCountersigner]:
    """Public key and countersigner of the coordinator, one for all runs that share the site homes."""
    path = folder / "key.pem"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        keys.save_key(keys.generate_key(), path)
    key = keys.load_key(path)
    return keys.public_hex(key), LedgerCountersigner(folder / "receipts", key)


def _records_of(privacy_plans: Mapping[SiteId, PrivacyPlan]) -> dict[SiteId, PrivacyPlanRecord]:
    return {site: privacy_plan.to_record() for site, privacy_plan in privacy_plans.items()}


def describe_privacy(
    study: Study,
    sites: Sequence[SiteId],
    privacy_plans: Mapping[SiteId, PrivacyPlanRecord],
    secure_aggregation: SecureAggregationSetup | None,
) -> PrivacyRecord:
    """The guarantees, fixed before training."""
    return PrivacyRecord(
        dp_sgd=privacy_plans,
        client_level_dp=_describe_client_level_dp(study, study.privacy.client_level_dp, sites, secure_aggregation),
        secure_aggregation=_describe_secure_aggregation(study, sites, secure_aggregation),
    )


def _describe_secure_aggregation(
    study: Study, sites: Sequence[SiteId], secure_aggregation: SecureAggregationSetup | None
) -> SecureAggregationRecord | None:
    if secure_aggregation is None:
        return None
    layout = secure_aggregation.update_layout
    num_clients = num_sampled_clients(len(sites), study.client_sampling.fraction)
    return SecureAggregationRecord(
        num_sampled_clients=num_clients,
        threshold=reconstruction_threshold(num_clients),
        max_update_norm=layout.max_update_norm,
        bits=layout.grid.num_bits,
        step=layout.grid.step_size,
        fingerprints={s: keys.fingerprint(k) for s, k in secure_aggregation.public_keys.items()},
    )


def _describe_client_level_dp(
    study: Study,
    client_level_dp: ClientLevelDpConfig | None,
    sites: Sequence[SiteId],
    secure_aggregation: SecureAggregationSetup | None,
) -> ClientLevelDpRecord | None:
    if client_level_dp is None:
        return None
    num_rounds = max(max_participations(study, sites, site) for site in sites)
    noise_multiplier = client_level_dp.noise_multiplier or calibrate_noise_multiplier(
        client_level_dp.epsilon or 0.0, client_level_dp.delta, 1.0, num_rounds
    )
    spent = compute_privacy_spent([DpEvent(noise_multiplier, 1.0, num_rounds)], client_level_dp.delta)
    max_norm = (
        client_level_dp.max_update_norm
        if secure_aggregation is None
        else secure_aggregation.update_layout.grid.max_rounded_norm
    )
    return ClientLevelDpRecord(
        noise_multiplier=noise_multiplier,
        max_update_norm=client_level_dp.max_update_norm,
        sensitivity=max_norm,
        delta=client_level_dp.delta,
        epsilon=spent.epsilon,
        accountant=spent.accountant,
        rounds=num_rounds,
        sites=len(sites),
        num_sampled_clients=num_sampled_clients(len(sites), study.client_sampling.fraction),
    )


def create_client_level_dp(privacy_record: PrivacyRecord) -> AggregationRule | None:
    record = privacy_record.client_level_dp
    if record is None:
        return None
    return ClientLevelDpMean(
        max_update_norm=record.max_update_norm,
        noise_multiplier=record.noise_multiplier,
        sensitivity=record.sensitivity,
        num_sampled_clients=record.num_sampled_clients,
    )
