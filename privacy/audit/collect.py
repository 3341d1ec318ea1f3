"""Collects the privacy facts of a run as one JSON-serializable dict.

`problems` make an audit fail: a ledger that does not verify, an exceeded budget, an epsilon that cannot be recomputed, a
round without a charge. `warnings` are what a reader should know before relying on the privacy promise.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import PROFILE_FILE_NAME
from pipeline.core.errors import RunFolderError
from pipeline.records.privacy_record import ClientLevelDpRecord, PrivacyPlanRecord, PrivacyRecord
from pipeline.records.round_record import RoundRecord
from pipeline.records.run_results import RunResults
from pipeline.records.site_homes import SiteHomes
from pipeline.records.sites_record import ExampleCounts, SitesRecord
from pipeline.study.schema import Study
from privacy.accounting.accountant import DpEvent
from privacy.audit.disclosures import list_disclosures
from privacy.audit.document.attack_chapter import refuted_promises
from privacy.audit.interpretation import auc_bound, odds_ratio, posterior_bound, tpr_bound
from privacy.audit.recompute_epsilon import OTHER_ACCOUNTANT_TOLERANCE, are_epsilons_equal, epsilon_by_accountant
from privacy.audit.site_facts import CoordinatorReceipts, collect_site_facts, participation_facts
from privacy.audit.warnings import list_warnings

AUDIT_FORMAT = "hemofed-audit/2"
PRIOR_BELIEF = 0.01  # prior belief and false positive rate of the worked examples
AUDITED_PACKAGES = ("hemofed", "torch", "opacus", "dp-accounting", "cryptography", "numpy")


def collect_facts(folder: RunFolder, now: datetime | None = None) -> dict[str, Any]:
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
    facts: dict[str, Any] = {
        "format": AUDIT_FORMAT,
        "written": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "run": folder.path.resolve().name,
        "study": _study_facts(study, study_hash, sites_record, results)
        | {"profiled": (folder.path / PROFILE_FILE_NAME).exists()},
        "rounds": max((record.round for record in rounds), default=0),
        "planned": study.rounds,
        "released": _released_model(results),
        "protection": {
            "dp_sgd": bool(privacy_plans),
            "client_level_dp": _client_level_dp_facts(privacy_record.client_level_dp, rounds),
            "secure_aggregation": privacy_record.secure_aggregation and privacy_record.secure_aggregation.to_dict(),
        },
        "data_subject": _data_subject_facts(privacy_plans, results, counts_by_site),
        "sites": sites,
        "headline": _headline_facts(sites) if privacy_plans else None,
        "coordinator": {
            "key": coordinator_receipts.public_key,
            "receipts": len(coordinator_receipts.receipts),
            "shared_homes": site_homes.is_shared,
        },
        "attacks": _read_json_object(folder, "attacks.json") or None,
        "software": {"run": dict(results.software) if results else {}, "audit": _software_versions()},
        "data": {
            "fingerprint": sites_record and sites_record.fingerprint,
            "examples_by_site": sites_record.to_dict()["sites"] if sites_record else {},
        },
    }
    facts["disclosures"] = list_disclosures(study, facts, results.to_dict() if results else {})
    facts["warnings"] = list_warnings(study, facts)
    facts["problems"] = _find_problems(facts, coordinator_receipts)
    facts["ok"] = not facts["problems"]
    return facts


def _read_json_object(folder: RunFolder, name: str) -> dict[str, Any]:
    if not (folder.path / name).exists():
        return {}
    content = folder.read_json(name)
    if not isinstance(content, dict):
        raise RunFolderError(f"{folder.path / name} is not a JSON object; restore the file that the run wrote")
    return content


def _study_facts(
    study: Study, study_hash: str, sites_record: SitesRecord | None, results: RunResults | None
) -> dict[str, Any]:
    return {
        "name": study.name,
        "description": study.description,
        "hash": study_hash,
        "strategy": study.strategy.name,
        "model": study.model.name,
        "num_parameters": results and results.num_parameters,
        "data": study.data.name,
        "classes": list(sites_record.classes) if sites_record else [],
        "weighting": study.weighting,
        "privacy": study.privacy.model_dump(mode="json", exclude_none=True),
        "splits": list(study.evaluation.splits),
        "evaluate_at": study.evaluation.evaluate_at,
    }


def _released_model(results: RunResults | None) -> dict[str, Any] | None:
    """The final model, if the run has one."""
    if results is None:
        return None
    return {"round": results.best_round, "selected_by": results.selected_by, "stop_reason": results.stop_reason}


def _client_level_dp_facts(
    client_level_dp: ClientLevelDpRecord | None, rounds: Sequence[RoundRecord]
) -> dict[str, Any] | None:
    """The content of privacy.json, and the epsilon of the actual releases: a repeated round counts again, with new noise."""
    if client_level_dp is None:
        return None
    num_requests: dict[str, int] = {}
    for record in rounds:
        for site in record.sampled_clients:
            num_requests[site] = num_requests.get(site, 0) + 1 + (record.attempt or 0)
    releases = max(num_requests.values(), default=0)
    epsilons = epsilon_by_accountant([DpEvent(client_level_dp.noise_multiplier, 1.0, releases)], client_level_dp.delta)
    tightest_epsilon = min(epsilons["rdp"], epsilons["pld"])
    return {
        **client_level_dp.to_dict(),
        "releases": releases,
        "recomputed": epsilons,
        "spent": tightest_epsilon,
        **_interpret_epsilon(tightest_epsilon, client_level_dp.delta),
    }


def _headline_facts(sites: Mapping[str, Any]) -> dict[str, Any]:
    """The site with the largest epsilon, by its ledger or its reports to the coordinator, whichever is larger."""

    def max_epsilon(site_facts: Mapping[str, Any]) -> float:
        return max(site_facts.get("spent") or 0.0, site_facts["participation"]["epsilon"] or 0.0)

    private_sites = {name: site_facts for name, site_facts in sites.items() if site_facts["privacy_plan"]}
    worst_site = max(private_sites, key=lambda name: max_epsilon(private_sites[name]))
    privacy_plan, epsilon = private_sites[worst_site]["privacy_plan"], max_epsilon(private_sites[worst_site])
    headline = {
        "site": worst_site,
        "epsilon": epsilon,
        "delta": privacy_plan["delta"],
        "unit": privacy_plan["privacy_unit"],
    }
    return headline | _interpret_epsilon(epsilon, privacy_plan["delta"])


def _interpret_epsilon(epsilon: float, delta: float) -> dict[str, Any]:
    return {
        "factor": odds_ratio(epsilon),
        "prior": PRIOR_BELIEF,
        "belief": posterior_bound(PRIOR_BELIEF, epsilon),
        "detection": tpr_bound(epsilon, delta, PRIOR_BELIEF),
        "auc": auc_bound(epsilon, delta),
    }


def _data_subject_facts(
    privacy_plans: Mapping[str, PrivacyPlanRecord],
    results: RunResults | None,
    counts_by_site: Mapping[str, ExampleCounts],
) -> dict[str, Any] | None:
    """How many images belong to how many persons, or units of the data's coarsest key; None if neither is known."""
    unit_plans = [privacy_plan for privacy_plan in privacy_plans.values() if privacy_plan.privacy_unit != "example"]
    if unit_plans:
        units = sum(privacy_plan.num_units for privacy_plan in unit_plans)
        examples = sum(privacy_plan.num_examples for privacy_plan in unit_plans)
        return {"unit": unit_plans[0].privacy_unit, "units": units, "examples": examples, "split": "train"}
    intervals = results and results.intervals
    if not intervals or intervals.privacy_unit == "example":
        return None
    examples = sum(sum(counts.get("test", ())) for counts in counts_by_site.values())
    return {"unit": intervals.privacy_unit, "units": intervals.num_units, "examples": examples, "split": "test"}


def _software_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in AUDITED_PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _find_problems(facts: Mapping[str, Any], coordinator_receipts: CoordinatorReceipts) -> list[str]:
    problems = [
        f"{site}: {problem}" for site, site_facts in facts["sites"].items() for problem in site_facts["problems"]
    ]
    client_level_dp = facts["protection"]["client_level_dp"]
    if client_level_dp and client_level_dp["spent"] > client_level_dp["epsilon"] * (1 + 1e-9):
        problems.append(
            f"the coordinator released {client_level_dp['releases']} noised sums, but its epsilon {client_level_dp['epsilon']:.4f} "
            f"is for {client_level_dp['rounds']}: it has spent epsilon {client_level_dp['spent']:.4f}"
        )
    if client_level_dp and not are_epsilons_equal(
        client_level_dp["recomputed"]["rdp"], client_level_dp["recomputed"]["dp_accounting"], OTHER_ACCOUNTANT_TOLERANCE
    ):
        problems.append("at the coordinator: two implementations of the same accountant give different epsilons")
    return [*problems, *refuted_promises(facts), *coordinator_receipts.problems]
