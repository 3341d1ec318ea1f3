"""What a reader should know before relying on a run's privacy promise, with the run's numbers."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.aggregation.client_level_dp import MIN_USEFUL_SITES
from pipeline.study.schema import Study
from privacy.audit.facts import AuditFacts
from privacy.audit.interpretation import group_privacy, max_group_size

WEAK_ODDS_RATIO = 20.0  # e^epsilon above which the bound on odds is weak by itself


def list_warnings(study: Study, facts: AuditFacts) -> list[str]:
    return [*_unit_warnings(facts), *_site_warnings(study, facts), *_coordinator_warnings(facts), *_run_warnings(facts)]


def _unit_warnings(facts: AuditFacts) -> Iterator[str]:
    headline = facts.headline
    if not headline:
        return
    if headline.unit == "example":
        yield describe_image_unit(facts)
    elif headline.unit != "patient":
        unit = headline.unit
        yield f"The privacy unit is the {unit}: a person with several {unit}s has weaker protection than stated."
    min_units = min((plan.num_units for plan in facts.privacy_plans), default=0)
    if headline.spent.delta * min_units > 0.1:
        yield (
            f"Delta is {headline.spent.delta:g} and the smallest site has {min_units} {headline.unit}s: even a mechanism that "
            "publishes the images of one of them could satisfy this delta. Delta should be far below one over the number of units."
        )


def describe_image_unit(facts: AuditFacts) -> str:
    """What a promise to single images means for a person with several images."""
    assert facts.headline is not None
    person = facts.data_subject
    epsilon, delta = facts.headline.spent.epsilon, facts.headline.spent.delta
    max_images = max_group_size(epsilon, delta)
    if person is None:
        several_text = (
            f"For a person with more than {max_images} images"
            if max_images > 1
            else "For a person with two or more images"
        )
        return f"The privacy unit is the single image, not the person. {several_text} nothing is promised."
    images_per_unit = max(2, round(person.examples / max(person.units, 1)))
    group_epsilon, group_delta = group_privacy(epsilon, delta, images_per_unit)
    delta_text = "at delta 1, which promises nothing" if group_delta >= 1 else f"at delta {group_delta:.1g}"
    return (
        f"The privacy unit is the single image, not the {person.unit}. A {person.unit} has about {images_per_unit} images here "
        f"({person.examples:,} images of {person.units:,} {person.unit}s in the {person.split} split); for all of them "
        f"together the bound is epsilon {group_epsilon:.1f} {delta_text}."
    )


def _site_warnings(study: Study, facts: AuditFacts) -> Iterator[str]:
    if not facts.headline:
        return
    if study.strategy.personalized or study.strategy.result_in_client_states:
        yield (
            "Sites are evaluated with personalized models, which they may train without noise. The scores of these models may "
            "reveal training data that the privacy promise does not cover, so such a model must not be given to others."
        )
    if not facts.coordinator.shared_homes:
        yield (
            "The ledgers of this run started with it: runs on the same data in other run folders are not counted. "
            "Use one --site-homes folder for all studies on the same data to count them."
        )


def _coordinator_warnings(facts: AuditFacts) -> Iterator[str]:
    client_level_dp = facts.protection.client_level_dp
    if client_level_dp and client_level_dp.sites < MIN_USEFUL_SITES:
        yield (
            f"Client-level differential privacy hides one site among {client_level_dp.sites}; below {MIN_USEFUL_SITES} sites "
            "a model is rarely useful at a small epsilon."
        )


def _run_warnings(facts: AuditFacts) -> Iterator[str]:
    if facts.attacks and facts.attacks.inversion and facts.attacks.inversion.image:
        yield "The figure of the inversion attack in this report shows a training image: share the report with care."
    if facts.released is None:
        yield f"The run has not finished: it is at round {facts.rounds} of {facts.planned}, and more epsilon may be spent."
