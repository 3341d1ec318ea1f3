"""Sets up a study's `[privacy]` at one real site: its privacy plan, budget guard and secure-aggregation client."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.protocol.messages import SiteId
from pipeline.study.offer import StudyOffer
from pipeline.study.run_spec import RunSpec
from privacy.ledger.receipts import ReceiptRequest
from privacy.ledger.records import LedgerReceipt
from sites.governance.home import SiteHome
from sites.population.simulated_sites import FederatedDataset
from sites.privacy.budget_guard import BudgetGuard
from sites.privacy.plan import (
    PrivacyPlan,
    build_privacy_plan,
    create_secure_aggregation,
    exclude_withdrawn,
    record_data,
    restore_committed_plan,
)
from sites.privacy.secure_agg_client import SecureAggClient
from sites.training.base import TrainingConfig


def setup_site_privacy(
    home_path: Path,
    site: SiteId,
    offer: StudyOffer,
    run_spec: RunSpec,
    dataset: FederatedDataset,
    training_config: TrainingConfig,
    countersign: Callable[[ReceiptRequest], LedgerReceipt],
) -> tuple[FederatedDataset, SecureAggClient, PrivacyPlan | None]:
    """The data set without withdrawn units, the client, and the plan if the study has DP-SGD.

    A plan belongs to one run (the offer's digest): a second run of the same study is charged again.
    """
    study, home = run_spec.study, SiteHome.open(home_path)
    dataset = exclude_withdrawn(dataset, {site: home})
    record_data(home, dataset, site)
    dp_sgd = study.privacy.dp_sgd
    privacy_plan, budget_guard = None, None
    if dp_sgd is not None:
        new_plan = build_privacy_plan(
            study=study,
            dp_sgd=dp_sgd,
            dataset=dataset,
            site=site,
            sites=list(offer.site_keys),
            dry_run_rounds=run_spec.dry_run_rounds,
            training_config=training_config,
        )
        privacy_plan = restore_committed_plan(new_plan, home, offer.digest)
        budget_guard = BudgetGuard(home, privacy_plan, study.name, offer.digest, countersign, offer.coordinator_key)
    public_keys = {name: bytes.fromhex(key) for name, key in offer.site_keys.items()}
    secure_aggregation = create_secure_aggregation(study, public_keys, run_spec.dry_run_rounds, offer.digest)
    return dataset, SecureAggClient(site, home, budget_guard, secure_aggregation, study.weighting), privacy_plan
