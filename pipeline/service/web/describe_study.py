"""Describes the study of a run for readers who do not know TOML: in sentences, and by what leaves the sites."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pipeline.core.errors import StudyError
from pipeline.study.disclosures import PROTECTION_LABELS, Disclosure, list_disclosures
from pipeline.study.schema import Study
from pipeline.study.toml_file import parse_study


def describe_study_file(study_toml: str) -> dict[str, Any]:
    """`study_summary` and `disclosures` of the API's run."""
    try:
        study = parse_study(study_toml, "the study", {})
    except StudyError as error:  # of another version, or of a plugin that is gone
        return {"study_summary": [f"This version of hemofed cannot read the study: {error}"], "disclosures": []}
    return {
        "study_summary": list(_describe_study(study)),
        "disclosures": [_to_row(disclosure) for disclosure in list_disclosures(study)],
    }


def _to_row(disclosure: Disclosure) -> dict[str, str]:
    return asdict(disclosure) | {"protection": PROTECTION_LABELS[disclosure.protected_by]}


def _describe_study(study: Study) -> Iterator[str]:
    local, fraction = study.local, study.client_sampling.fraction
    work_text = f"{local.steps} steps" if local.steps else "1 epoch" if local.epochs == 1 else f"{local.epochs} epochs"
    sites_text = "every site" if fraction == 1.0 else f"{fraction:.0%} of the sites"
    if study.description:
        yield study.description
    yield f"Sites train a {study.model.name} network on {study.data.name} data; no image leaves a site."
    yield f"{study.strategy.name}: {study.strategy.describe_component()}."
    yield f"{study.rounds} rounds: each asks {sites_text} for {work_text} of training."
    if study.privacy.secure_aggregation:
        yield "The coordinator sees only sums over sites."
    if not study.privacy.dp_sgd and not study.privacy.client_level_dp:
        yield "No privacy budget is set: updates are not noised."
