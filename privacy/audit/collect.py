"""Collects the privacy facts of a run.

`problems` make an audit fail: a ledger that does not verify, an exceeded budget, an epsilon that cannot be recomputed, a
round without a charge.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import PROFILE_FILE_NAME
from pipeline.core.errors import RunFolderError
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
    PrivacyPlanFacts,
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
    results = _read_json_object(folder, "results.json")
    site_data = _read_json_object(folder, "sites.json")
    privacy_record = _read_json_object(folder, "privacy.json")
    study_hash = str(results.get("study_hash") or study.hash)
    homes_folder = _site_homes_folder(folder)
    coordinator_receipts = CoordinatorReceipts.load(
        folder.path / "coordinator" if homes_folder == folder.path / "homes" else homes_folder / ".coordinator"
    )
    privacy_plans = {
        site: PrivacyPlanFacts.model_validate(plan) for site, plan in (privacy_record.get("dp_sgd") or {}).items()
    }
    site_names = list(dict.fromkeys([*(site_data.get("sites") or {}), *privacy_plans]))
    sites = {
        site: collect_site_facts(
            homes_folder / quote(site, safe=""),
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
        study=_study_facts(study, study_hash, site_data, results, (folder.path / PROFILE_FILE_NAME).exists()),
        rounds=max((int(line["round"]) for line in rounds), default=0),
        planned=study.rounds,
        released=_released_model(results),
        protection=ProtectionFacts(
            dp_sgd=bool(privacy_plans),
            client_level_dp=_client_level_dp_facts(privacy_record.get("client_level_dp"), rounds),
            secure_aggregation=privacy_record.get("secure_aggregation"),
        ),
        data_subject=_data_subject_facts(privacy_plans.values(), results, site_data),
        sites=sites,
        headline=_headline_facts(sites) if privacy_plans else None,
        coordinator=CoordinatorFacts(
            key=coordinator_receipts.public_key,
            receipts=len(coordinator_receipts.receipts),
            shared_homes=homes_folder.parent != folder.path,
        ),
        attacks=AttackFindings.load(folder),
        software=SoftwareFacts(run=results.get("software") or {}, audit=_software_versions()),
        data=DataFacts(fingerprint=site_data.get("fingerprint"), examples_by_site=site_data.get("sites") or {}),
    )
    return facts.model_copy(
        update={
            "disclosures": list_run_disclosures(study, facts, list(results.get("baselines") or ())),
            "warnings": tuple(list_warnings(study, facts)),
            "problems": tuple(_find_problems(facts, coordinator_receipts)),
        }
    )


def _read_json_object(folder: RunFolder, name: str) -> dict[str, Any]:
    if not (folder.path / name).exists():
        return {}
    content = folder.read_json(name)
    if not isinstance(content, dict):
        raise RunFolderError(f"{folder.path / name} is not a JSON object; restore the file that the run wrote")
    return content


def _site_homes_folder(folder: RunFolder) -> Path:
    file = folder.path / "homes.json"
    return Path(json.loads(file.read_text("utf-8"))) if file.exists() else folder.path / "homes"


def _study_facts(
    study: Study, study_hash: str, site_data: Mapping[str, Any], results: Mapping[str, Any], profiled: bool
) -> StudyFacts:
    return StudyFacts(
        name=study.name,
        description=study.description,
        hash=study_hash,
        strategy=study.strategy.name,
        model=study.model.name,
        num_parameters=results.get("num_parameters"),
        data=study.data.name,
        classes=site_data.get("classes") or (),
        weighting=study.weighting,
        privacy=study.privacy.model_dump(mode="json", exclude_none=True),
        splits=study.evaluation.splits,
        evaluate_at=study.evaluation.evaluate_at,
        profiled=profiled,
    )


def _released_model(results: Mapping[str, Any]) -> ReleasedModel | None:
    """The final model, if the run has one."""
    if not results:
        return None
    return ReleasedModel(
        round=results.get("best_round"),
        selected_by=results.get("selected_by"),
        stop_reason=results.get("stop_reason"),
    )


def _client_level_dp_facts(
    client_level_dp: Mapping[str, Any] | None, rounds: list[dict[str, Any]]
) -> ClientLevelDpFacts | None:
    """The content of privacy.json, and the epsilon of the actual releases: a repeated round counts again, with new noise."""
    if client_level_dp is None:
        return None
    num_requests: dict[str, int] = {}
    for line in rounds:
        for site in line.get("sampled_clients") or ():
            num_requests[site] = num_requests.get(site, 0) + 1 + int(line.get("attempt") or 0)
    releases = max(num_requests.values(), default=0)
    epsilons = epsilon_by_accountant(
        [DpEvent(client_level_dp["noise_multiplier"], 1.0, releases)], client_level_dp["delta"]
    )
    tightest_epsilon = min(epsilons.rdp, epsilons.pld)
    return ClientLevelDpFacts(
        **client_level_dp,
        releases=releases,
        recomputed=epsilons,
        spent=_interpret(tightest_epsilon, client_level_dp["delta"]),
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
    privacy_plans: Iterable[PrivacyPlanFacts], results: Mapping[str, Any], site_data: Mapping[str, Any]
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
    intervals = results.get("intervals") or {}
    if not intervals or intervals.get("unit") == "example":
        return None
    examples = sum(sum(counts.get("test") or ()) for counts in (site_data.get("sites") or {}).values())
    return DataSubjectFacts(unit=intervals["unit"], units=intervals["units"], examples=examples, split="test")


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
