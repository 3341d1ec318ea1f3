"""What a reader should know before relying on a run's promise, each in a sentence with the run's own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.aggregation.client_level_dp import MIN_USEFUL_SITES
from pipeline.study.schema import Study
from privacy.audit import interpretation as meaning

Json = Mapping[str, Any]
WEAK_ODDS_RATIO = 20.0  # e^epsilon from which a bound on odds says little by itself


def list_warnings(study: Study, facts: Json) -> list[str]:
    return [*_unit_warnings(facts), *_site_warnings(study, facts), *_coordinator_warnings(facts), *_run_warnings(facts)]


def _unit_warnings(facts: Json) -> Iterator[str]:
    headline = facts["headline"]
    if not headline:
        return
    if headline["unit"] == "example":
        yield describe_image_unit(facts)
    elif headline["unit"] != "patient":
        yield f"The unit is the {headline['unit']}: a person with several {headline['unit']}s is promised less than one of them."
    min_units = min(
        (site_facts["promise"]["units"] for site_facts in facts["sites"].values() if site_facts["promise"]), default=0
    )
    if headline["delta"] * min_units > 0.1:
        yield (
            f"Delta is {headline['delta']:g} and the smallest site has {min_units} {headline['unit']}s: a mechanism that gives away "
            "somebody's images whole could keep such a promise. Delta should be far below one over the number of units."
        )


def describe_image_unit(facts: Json) -> str:
    """What a promise to single images does not promise to people."""
    headline, person = facts["headline"], facts["person"]
    epsilon, delta = headline["epsilon"], headline["delta"]
    max_images = meaning.max_group_size(epsilon, delta)
    if person is None:
        several_text = (
            f"Of a person with more than {max_images} of them"
            if max_images > 1
            else "Of a person with two of them or more"
        )
        return f"The unit is the single image, not the person. {several_text} nothing is promised."
    images_per_unit = max(2, round(person["examples"] / max(person["units"], 1)))
    group_epsilon, group_delta = meaning.group_privacy(epsilon, delta, images_per_unit)
    delta_text = "at delta 1, which promises nothing" if group_delta >= 1 else f"at delta {group_delta:.1g}"
    return (
        f"The unit is the single image, not the {person['unit']}. A {person['unit']} has about {images_per_unit} images here "
        f"({person['examples']:,} images of {person['units']:,} {person['unit']}s in the {person['split']} split); for all of them "
        f"together the bound is epsilon {group_epsilon:.1f} {delta_text}."
    )


def _site_warnings(study: Study, facts: Json) -> Iterator[str]:
    if not facts["headline"]:
        return
    if study.strategy.personalized or study.strategy.stateful_clients:
        yield (
            "Sites are judged with models of their own, which they may adapt without noise. Their scores may tell of "
            "training data that the promise does not cover, and such a model must not be given away as if it were."
        )
    if not facts["coordinator"]["shared_homes"]:
        yield (
            "The ledgers of this run began with it: trials on the same data in other run folders are not counted. "
            "Run studies on the same data with one --site-homes folder to count them."
        )


def _coordinator_warnings(facts: Json) -> Iterator[str]:
    client_level_dp = facts["protection"]["client_level_dp"]
    if client_level_dp and client_level_dp["sites"] < MIN_USEFUL_SITES:
        yield f"Noise at the coordinator hides one site among {client_level_dp['sites']}; below {MIN_USEFUL_SITES} sites a useful model and a small epsilon rarely go together."


def _run_warnings(facts: Json) -> Iterator[str]:
    if ((facts["attacks"] or {}).get("inversion") or {}).get("picture"):
        yield "The pictures of the inversion attack in this report show an image that was trained on: hand it on with care."
    if facts["released"] is None:
        yield f"The run has no result yet: it stands at round {facts['rounds']} of {facts['planned']}. More may be spent."
