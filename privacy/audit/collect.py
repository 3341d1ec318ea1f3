"""The facts of a run for whoever has to answer for its patients: one dict that JSON can hold, and no opinion in it.

`problems` are what makes an audit fail: a ledger that does not verify, a budget overspent, a sum that comes out
differently, a round that nobody paid for. `cautions` are what a reader should know before relying on the promise.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.coordinator.run_folder import RunFolder
from pipeline.coordinator.validation_profile import FILE as PROFILE
from pipeline.core.errors import BadRun
from pipeline.study.schema import Study
from privacy.accounting.accountant import Event
from privacy.audit import interpretation as meaning
from privacy.audit.disclosures import disclosures
from privacy.audit.document.attack_chapter import refuted
from privacy.audit.recompute_epsilon import OTHERS, agree, by_all
from privacy.audit.site_facts import Office, part_in, site_facts
from privacy.audit.warnings import cautions

FORMAT = "hemofed-audit/1"
PRIOR = 0.01  # the belief, and the rate of false alarms, that worked sentences start from
PACKAGES = ("hemofed", "torch", "opacus", "dp-accounting", "cryptography", "numpy")


def collect(folder: RunFolder, now: datetime | None = None) -> dict[str, Any]:
    study, rounds = folder.study(), folder.rounds()
    results = _part(folder, "results.json")
    held = _part(folder, "sites.json")
    told = _part(folder, "privacy.json")
    plan = str(results.get("hash") or study.hash)
    homes = _homes(folder)
    office = Office.read(folder.path / "coordinator" if homes == folder.path / "homes" else homes / ".coordinator")
    promises = told.get("at_site") or {}
    names = list(dict.fromkeys([*(held.get("sites") or {}), *promises]))
    sites = {
        site: site_facts(homes / quote(site, safe=""), office, plan, promises.get(site), part_in(rounds, site))
        for site in names
    }
    facts: dict[str, Any] = {
        "format": FORMAT,
        "written": (now or datetime.now(UTC)).isoformat(timespec="seconds"),
        "run": folder.path.resolve().name,
        "study": _study(study, plan, held, results) | {"profiled": (folder.path / PROFILE).exists()},
        "rounds": max((int(line["round"]) for line in rounds), default=0),
        "planned": study.rounds,
        "released": _released(results),
        "protection": {
            "at_site": bool(promises),
            "at_coordinator": _at_coordinator(told.get("at_coordinator"), rounds),
            "secure_sum": told.get("secure_sum"),
        },
        "person": _person(promises, results, held),
        "sites": sites,
        "headline": _headline(sites) if promises else None,
        "coordinator": {
            "key": office.key,
            "receipts": len(office.receipts),
            "shared_homes": homes.parent != folder.path,
        },
        "attacks": _part(folder, "attacks.json") or None,
        "software": {"run": results.get("software") or {}, "audit": _software()},
        "data": {"fingerprint": held.get("fingerprint"), "held": held.get("sites") or {}},
    }
    facts["disclosures"] = disclosures(study, facts, results)
    facts["cautions"] = cautions(study, facts)
    facts["problems"] = _problems(facts, office)
    facts["ok"] = not facts["problems"]
    return facts


def _part(folder: RunFolder, name: str) -> dict[str, Any]:
    if not (folder.path / name).exists():
        return {}
    found = folder.read_json(name)
    if not isinstance(found, dict):
        raise BadRun(f"{folder.path / name} holds no JSON object; restore what the run wrote")
    return found


def _homes(folder: RunFolder) -> Path:
    file = folder.path / "homes.json"
    return Path(json.loads(file.read_text("utf-8"))) if file.exists() else folder.path / "homes"


def _study(study: Study, plan: str, held: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": study.name,
        "about": study.about,
        "hash": plan,
        "strategy": study.strategy.name,
        "model": study.model.name,
        "parameters": results.get("parameters"),
        "data": study.data.name,
        "classes": held.get("classes") or [],
        "weighting": study.weighting,
        "privacy": study.privacy.model_dump(mode="json", exclude_none=True),
        "watch": list(study.evaluation.watch),
        "judged_at": study.evaluation.where,
    }


def _released(results: Mapping[str, Any]) -> dict[str, Any] | None:
    """The model that came out, if one did."""
    if not results:
        return None
    return {
        "round": results.get("best_round"),
        "chosen_by": results.get("chosen_by"),
        "stopped": results.get("stopped"),
    }


def _at_coordinator(made: Mapping[str, Any] | None, rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """With what was really released: a round that was repeated was noised, and counts, again."""
    if made is None:
        return None
    asked: dict[str, int] = {}
    for line in rounds:
        for site in line.get("asked") or ():
            asked[site] = asked.get(site, 0) + 1 + int(line.get("attempt") or 0)
    releases = max(asked.values(), default=0)
    spent = by_all([Event(made["noise"], 1.0, releases)], made["delta"])
    tightest = min(spent["rdp"], spent["pld"])
    return {**made, "releases": releases, "recount": spent, "spent": tightest, **_meaning(tightest, made["delta"])}


def _headline(sites: Mapping[str, Any]) -> dict[str, Any]:
    """Of the site where most was spent, by its ledger or by what the coordinator was told, whichever is more."""

    def spent(found: Mapping[str, Any]) -> float:
        return max(found.get("spent") or 0.0, found["took"]["epsilon"] or 0.0)

    private = {name: found for name, found in sites.items() if found["promise"]}
    worst = max(private, key=lambda name: spent(private[name]))
    promise, epsilon = private[worst]["promise"], spent(private[worst])
    about = {"site": worst, "epsilon": epsilon, "delta": promise["delta"], "unit": promise["unit"]}
    return about | _meaning(epsilon, promise["delta"])


def _meaning(epsilon: float, delta: float) -> dict[str, Any]:
    return {
        "factor": meaning.factor(epsilon),
        "prior": PRIOR,
        "belief": meaning.belief(PRIOR, epsilon),
        "detection": meaning.detection(epsilon, delta, PRIOR),
        "auc": meaning.largest_auc(epsilon, delta),
    }


def _person(promises: Mapping[str, Any], results: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any] | None:
    """How many images one person, or whatever is the data's coarsest key, has."""
    whole = [made for made in promises.values() if made["unit"] != "example"]
    if whole:
        units, examples = (sum(made[part] for made in whole) for part in ("units", "examples"))
        return {"unit": whole[0]["unit"], "units": units, "examples": examples, "split": "train"}
    drawn = results.get("intervals") or {}
    if not drawn or drawn.get("unit") == "example":
        return None
    examples = sum(sum(counts.get("test") or ()) for counts in (held.get("sites") or {}).values())
    return {"unit": drawn["unit"], "units": drawn["units"], "examples": examples, "split": "test"}


def _software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _problems(facts: Mapping[str, Any], office: Office) -> list[str]:
    found = [f"{site}: {text}" for site, about in facts["sites"].items() for text in about["problems"]]
    noised = facts["protection"]["at_coordinator"]
    if noised and noised["spent"] > noised["epsilon"] * (1 + 1e-9):
        found.append(
            f"the coordinator noised {noised['releases']} sums, and promised epsilon {noised['epsilon']:.4f} for "
            f"{noised['turns']}: epsilon {noised['spent']:.4f} was spent"
        )
    if noised and not agree(noised["recount"]["rdp"], noised["recount"]["dp_accounting"], OTHERS):
        found.append("at the coordinator: two implementations of the same accountant differ")
    return [*found, *refuted(facts), *office.problems]
