"""Sets up a study's `[privacy]` at one site, real or simulated: its privacy plan, budget guard and update masker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.aggregation.secure_aggregation import SecureAggregationSetup
from pipeline.protocol.messages import SiteId
from pipeline.strategies.dry_run import DryRunRound
from pipeline.study.schema import Study
from sites.governance.home import SiteHome
from sites.population.simulated_sites import FederatedDataset
from sites.privacy.budget_guard import BudgetGuard, CountersignFn
from sites.privacy.plan import build_privacy_plan, exclude_withdrawn, record_data, restore_committed_plan
from sites.privacy.site_privacy import SitePrivacy
from sites.privacy.update_masking import UpdateMasker
from sites.training.base import TrainingConfig


@dataclass(frozen=True)
class RunPrivacy:
    """What all sites of a run have in common.

    run_digest: the study's hash in a simulation, the offer's digest across hospitals. A plan belongs to one run: a second
    run of the same study is charged again.
    """

    study: Study
    run_digest: str
    sites: Sequence[SiteId]  # all, in the study's order
    dry_run_rounds: Sequence[DryRunRound]
    training_config: TrainingConfig
    secure_aggregation: SecureAggregationSetup | None
    countersign: CountersignFn
    coordinator_key: str  # public key, hex


def set_up_site_privacy(
    run_privacy: RunPrivacy, home: SiteHome, site: SiteId, dataset: FederatedDataset
) -> tuple[FederatedDataset, SitePrivacy]:
    """The data set without the site's withdrawn units, and the privacy of the site's task sessions."""
    study = run_privacy.study
    dataset = exclude_withdrawn(dataset, site, home)
    record_data(home, dataset, site)
    budget_guard = None
    if study.privacy.dp_sgd is not None:
        new_plan = build_privacy_plan(
            study=study,
            dp_sgd=study.privacy.dp_sgd,
            dataset=dataset,
            site=site,
            sites=run_privacy.sites,
            dry_run_rounds=run_privacy.dry_run_rounds,
            training_config=run_privacy.training_config,
        )
        budget_guard = BudgetGuard(
            home=home,
            privacy_plan=restore_committed_plan(new_plan, home, run_privacy.run_digest),
            study_name=study.name,
            study_hash=run_privacy.run_digest,
            countersign=run_privacy.countersign,
            coordinator_key=run_privacy.coordinator_key,
        )
    secure_aggregation = run_privacy.secure_aggregation
    masker = UpdateMasker(site, home, secure_aggregation, study.weighting) if secure_aggregation is not None else None
    return dataset, SitePrivacy(budget_guard, masker)
