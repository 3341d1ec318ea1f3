"""What left the sites in a run: the study's disclosures with the run's numbers, the final model, and a simulation's files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeline.protocol.tasks import SCORE_BINS
from pipeline.reports.document.formatting import join_names
from pipeline.study.disclosures import Disclosure, list_disclosures
from pipeline.study.schema import Study
from privacy.audit.facts import AuditFacts, ReleasedModel


def list_run_disclosures(study: Study, facts: AuditFacts, baselines: Sequence[str]) -> tuple[Disclosure, ...]:
    """`baselines`: names of the runs that a simulation compares with."""
    disclosures = list(list_disclosures(study, facts.study.num_parameters, facts.subjects_name))
    in_run = [_with_run_numbers(disclosure, facts) for disclosure in disclosures if _happened(disclosure, study, facts)]
    return (*in_run, *_final_model(disclosures, facts), *_simulation_files(facts, baselines))


def _happened(disclosure: Disclosure, study: Study, facts: AuditFacts) -> bool:
    if disclosure.kind == "profile":
        return facts.study.profiled
    split = split_of(disclosure)
    if split is None:
        return True
    return any(_num_images(facts, split)) and bool(facts.released or split in study.evaluation.splits)


def split_of(disclosure: Disclosure) -> str | None:
    """The split whose scores it is about."""
    return disclosure.kind.removeprefix("scores/") if disclosure.kind.startswith("scores/") else None


def _num_images(facts: AuditFacts, split: str) -> list[int]:
    return [facts.data.num_examples(site, split) for site in facts.data.examples_by_site]


def _with_run_numbers(disclosure: Disclosure, facts: AuditFacts) -> Disclosure:
    split = split_of(disclosure)
    if split is not None and max(sizes := _num_images(facts, split)) < SCORE_BINS:
        sizes_text = format_range(list(map(float, sizes)), ",.0f")
        reason = f"unprotected: a site has {sizes_text} images, so most occupied bins hold a single image"
        return replace(disclosure, reason=reason)
    if disclosure.kind == "update":
        visible_part = (
            f"the sum over at least {facts.protection.secure_aggregation.threshold} sites"
            if facts.protection.secure_aggregation
            else "each site's update"
        )
        receiver = f"the coordinator: {visible_part}; other sites: the models computed from them"
        return replace(disclosure, receiver=receiver, reason=_update_protection(facts))
    return disclosure


def _update_protection(facts: AuditFacts) -> str:
    secure_aggregation, client_level_dp = facts.protection.secure_aggregation, facts.protection.client_level_dp
    masking_text = (
        f"secure aggregation among the {secure_aggregation.num_sampled_clients} sites asked: single updates are hidden, their sum is not"
        if secure_aggregation
        else ""
    )
    if facts.protection.dp_sgd:
        return "; ".join(filter(None, (describe_mechanism(facts), masking_text)))
    if client_level_dp:
        return (
            f"against the coordinator: {masking_text or 'unprotected'}; against those who see only models: updates are clipped to "
            f"{client_level_dp.max_update_norm:g}, and Gaussian noise of {client_level_dp.noise_multiplier:.3g} times this bound is "
            "added to their sum"
        )
    return masking_text or "unprotected"


def describe_mechanism(facts: AuditFacts) -> str:
    """DP-SGD in one sentence, with this run's numbers."""
    plans = facts.privacy_plans
    unit, max_grad_norm = plans[0].privacy_unit, plans[0].max_grad_norm
    noise_text = format_range([plan.noise_multiplier for plan in plans])
    rate_text = format_range([plan.sampling_rate for plan in plans])
    return (
        f"DP-SGD: in each step every {unit} is included with probability {rate_text}, its gradient is clipped to "
        f"{max_grad_norm:g}, and Gaussian noise of {noise_text} times this bound is added to the sum"
    )


def format_range(values: Sequence[float], digits: str = "#.3g") -> str:
    """One number if all are equal after rounding, else `low to high`."""
    low, high = (format(value, digits) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _final_model(disclosures: Sequence[Disclosure], facts: AuditFacts) -> Iterator[Disclosure]:
    (models,) = (disclosure for disclosure in disclosures if disclosure.kind == "model")
    if facts.released is None:
        return
    yield replace(
        models,
        kind="final_model",
        content="Final model",
        detail=f"of round {facts.released.round}, chosen by {facts.released.selected_by}",
        receiver="anyone who receives it",
        subjects=f"training and validation {facts.subjects_name}",
        reason=models.reason + _selection_text(facts.released, facts.subjects_name),
        when="once, at the end",
    )


def _selection_text(released: ReleasedModel, subjects_name: str) -> str:
    if released.selected_by == "last round":
        return ""
    return f"; it depends on validation {subjects_name} only through the choice of its round, which is unprotected"


def _simulation_files(facts: AuditFacts, baselines: Sequence[str]) -> Iterator[Disclosure]:
    run_folder = Disclosure(
        kind="simulation",
        content="Run folder of a simulation",
        detail="class counts of each site, images of cells, the sites' folders and client states",
        receiver="anyone who has the run folder",
        subjects=f"all {facts.subjects_name}",
        protected_by="unprotected",
        reason="unprotected: one machine simulates all sites; in hospitals these stay at the site",
        when="never across hospitals",
    )
    yield run_folder
    if baselines:
        yield replace(
            run_folder,
            kind="baselines",
            content="Baselines, trained for comparison, and their scores",
            detail=join_names(sorted(baselines)),
            receiver="anyone who has access to this machine",
            reason="unprotected; simulation only",
        )
