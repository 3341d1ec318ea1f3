"""Collects the privacy facts of a run.

`problems` make an audit fail: a ledger that does not verify, an exceeded budget, an epsilon that cannot be recomputed, a
round without a charge.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import PROFILE_FILE_NAME
from pipeline.records.privacy_record import ClientLevelDpRecord, PrivacyPlanRecord, PrivacyRecord
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import RunResults
from pipeline.records.site_homes import SiteHomes
from pipeline.records.sites_record import ExampleCounts, SitesRecord
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent
from privacy.audit.attack_findings import AttackFindings
from privacy.audit.disclosures import list_run_disclosures
from privacy.audit.document.attack_chapter import refuted_promises
from privacy.audit.facts import (
    AuditFacts,
    ClientLevelDpFacts,
    CoordinatorFacts,
    DataFacts,
    DataSubjectFacts,
    HeadlineFacts,
    ProtectionFacts,
    ReleasedModel,
    SiteFacts,
    SoftwareFacts,
    SpentEpsilon,
    StudyFacts,
)
from privacy.audit.interpretation import auc_bound, odds_ratio, posterior_bound, tpr_bound
from privacy.audit.recompute_epsilon import do_implementations_agree, epsilon_by_accountant
from privacy.audit.site_facts import CoordinatorReceipts, collect_site_facts, participation_facts
from privacy.audit.warnings import list_warnings

PRIOR_BELIEF = 0.01  # prior belief and false positive rate of the worked examples
AUDITED_PACKAGES = ("hemofed", "torch", "opacus", "dp-accounting", "cryptography", "numpy")


def collect_facts(folder: RunFolder, now: datetime | None = None) -> AuditFacts:
    """The content of audit.json. `now`: time of the audit, by default the current time."""
    study, rounds = folder.load_study(), folder.load_rounds()
    results, sites_record = RunResults.read_if_present(folder.path), SitesRecord.read_if_present(folder.path)
    privacy_record = PrivacyRecord.read_if_present(folder.path) or PrivacyRecord()
    study_hash = results.study_hash if results else study.hash
    site_homes = SiteHomes.locate(folder.path)
    coordinator_receipts = CoordinatorReceipts.load(site_homes.coordinator_folder)
    privacy_plans = privacy_record.dp_sgd
    counts_by_site = sites_record.sites if sites_record else {}
    site_names = list(dict.fromkeys([*counts_by_site, *privacy_plans]))
    sites = {
        site: collect_site_facts(
            site_homes.home_path(site),
            coordinator_receipts,
            study_hash,
            privacy_plans.get(site),
            participation_facts(rounds, site),
        )
        for site in site_names
    }
    facts = AuditFacts(
        written=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        run=folder.path.resolve().name,
        study=_study_facts(study, study_hash, sites_record, results, (folder.path / PROFILE_FILE_NAME).exists()),
        rounds=max((record.round for record in rounds), default=0),
        planned=study.rounds,
        released=_released_model(results),
        protection=ProtectionFacts(
            dp_sgd=bool(privacy_plans),
            client_level_dp=_client_level_dp_facts(privacy_record.client_level_dp, rounds),
            secure_aggregation=privacy_record.secure_aggregation,
        ),
        data_subject=_data_subject_facts(privacy_plans.values(), results, counts_by_site),
        sites=sites,
        headline=_headline_facts(sites) if privacy_plans else None,
        coordinator=CoordinatorFacts(
            key=coordinator_receipts.public_key,
            receipts=len(coordinator_receipts.receipts),
            shared_homes=site_homes.is_shared,
        ),
        attacks=AttackFindings.load(folder),
        software=SoftwareFacts(run=dict(results.software) if results else {}, audit=_software_versions()),
        data=DataFacts(fingerprint=sites_record and sites_record.fingerprint, examples_by_site=dict(counts_by_site)),
    )
    return facts.model_copy(
        update={
            "disclosures": list_run_disclosures(study, facts, list(results.baselines) if results else []),
            "warnings": tuple(list_warnings(study, facts)),
            "problems": tuple(_find_problems(facts, coordinator_receipts)),
        }
    )


def _study_facts(
    study: Study, study_hash: str, sites_record: SitesRecord | None, results: RunResults | None, profiled: bool
) -> StudyFacts:
    return StudyFacts(
        name=study.name,
        description=study.description,
        hash=study_hash,
        strategy=study.strategy.name,
        model=study.model.name,
        num_parameters=results and results.num_parameters,
        data=study.data.name,
        classes=sites_record.classes if sites_record else (),
        weighting=study.weighting,
        privacy=study.privacy.model_dump(mode="json", exclude_none=True),
        splits=study.evaluation.splits,
        evaluate_at=study.evaluation.evaluate_at,
        profiled=profiled,
    )


def _released_model(results: RunResults | None) -> ReleasedModel | None:
    """The final model, if the run has one."""
    if results is None:
        return None
    return ReleasedModel(round=results.best_round, selected_by=results.selected_by, stop_reason=results.stop_reason)


def _client_level_dp_facts(
    client_level_dp: ClientLevelDpRecord | None, rounds: Sequence[RoundRecord]
) -> ClientLevelDpFacts | None:
    """The content of privacy.json, and the epsilon of the actual releases: a repeated round counts again, with new noise."""
    if client_level_dp is None:
        return None
    num_requests: dict[str, int] = {}
    for record in rounds:
        for site in record.sampled_clients:
            num_requests[site] = num_requests.get(site, 0) + 1 + (record.attempt or 0)
    releases = max(num_requests.values(), default=0)
    epsilons = epsilon_by_accountant([DpEvent(client_level_dp.noise_multiplier, 1.0, releases)], client_level_dp.delta)
    tightest_epsilon = min(epsilons.rdp, epsilons.pld)
    return ClientLevelDpFacts(
        **client_level_dp.to_dict(),
        releases=releases,
        recomputed=epsilons,
        spent=_interpret(tightest_epsilon, client_level_dp.delta),
    )


def _headline_facts(sites: Mapping[str, SiteFacts]) -> HeadlineFacts:
    """The site with the largest epsilon, by its ledger or its reports to the coordinator, whichever is larger."""
    epsilon_by_site = {
        name: max(site_facts.spending.spent if site_facts.spending else 0.0, site_facts.participation.epsilon or 0.0)
        for name, site_facts in sites.items()
        if site_facts.privacy_plan
    }
    worst_site = max(epsilon_by_site, key=epsilon_by_site.__getitem__)
    privacy_plan, epsilon = sites[worst_site].privacy_plan, epsilon_by_site[worst_site]
    assert privacy_plan is not None  # only sites with a plan are compared
    return HeadlineFacts(site=worst_site, unit=privacy_plan.privacy_unit, spent=_interpret(epsilon, privacy_plan.delta))


def _interpret(epsilon: float, delta: float) -> SpentEpsilon:
    return SpentEpsilon(
        epsilon=epsilon,
        delta=delta,
        factor=odds_ratio(epsilon),
        prior=PRIOR_BELIEF,
        belief=posterior_bound(PRIOR_BELIEF, epsilon),
        detection=tpr_bound(epsilon, delta, PRIOR_BELIEF),
        auc=auc_bound(epsilon, delta),
    )


def _data_subject_facts(
    privacy_plans: Iterable[PrivacyPlanRecord],
    results: RunResults | None,
    counts_by_site: Mapping[str, ExampleCounts],
) -> DataSubjectFacts | None:
    """None if neither the plans nor the results know whose images they are."""
    unit_plans = [plan for plan in privacy_plans if plan.privacy_unit != "example"]
    if unit_plans:
        return DataSubjectFacts(
            unit=unit_plans[0].privacy_unit,
            units=sum(plan.num_units for plan in unit_plans),
            examples=sum(plan.num_examples for plan in unit_plans),
            split="train",
        )
    intervals = results and results.intervals
    if not intervals or intervals.privacy_unit == "example":
        return None
    examples = sum(sum(counts.get("test", ())) for counts in counts_by_site.values())
    return DataSubjectFacts(unit=intervals.privacy_unit, units=intervals.num_units, examples=examples, split="test")


def _software_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in AUDITED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _find_problems(facts: AuditFacts, coordinator_receipts: CoordinatorReceipts) -> Iterator[str]:
    for site, site_facts in facts.sites.items():
        yield from (f"{site}: {problem}" for problem in site_facts.problems)
    client_level_dp = facts.protection.client_level_dp
    if client_level_dp and client_level_dp.spent.epsilon > client_level_dp.epsilon * (1 + 1e-9):
        yield (
            f"the coordinator released {client_level_dp.releases} noised sums, but its epsilon {client_level_dp.epsilon:.4f} "
            f"is for {client_level_dp.rounds}: it has spent epsilon {client_level_dp.spent.epsilon:.4f}"
        )
    if client_level_dp and not do_implementations_agree(client_level_dp.recomputed):
        yield "at the coordinator: two implementations of the same accountant give different epsilons"
    yield from refuted_promises(facts)
    yield from coordinator_receipts.problems
