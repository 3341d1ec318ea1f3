"""What a reader should know before relying on a run's promise, each in a sentence with the run's own numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.aggregation.client_level_dp import FEW
from pipeline.study.schema import Study
from privacy.audit import interpretation as meaning

Json = Mapping[str, Any]
LOOSE = 20.0  # e^epsilon from which a bound on odds says little by itself


def cautions(study: Study, facts: Json) -> list[str]:
    return [*_of_unit(facts), *_of_sites(study, facts), *_of_coordinator(facts), *_of_run(facts)]


def _of_unit(facts: Json) -> Iterator[str]:
    lead = facts["headline"]
    if not lead:
        return
    if lead["unit"] == "example":
        yield example_words(facts)
    elif lead["unit"] != "patient":
        yield f"The unit is the {lead['unit']}: a person with several {lead['unit']}s is promised less than one of them."
    units = min((found["promise"]["units"] for found in facts["sites"].values() if found["promise"]), default=0)
    if lead["delta"] * units > 0.1:
        yield (
            f"Delta is {lead['delta']:g} and the smallest site has {units} {lead['unit']}s: a mechanism that gives away "
            "somebody's images whole could keep such a promise. Delta should be far below one over the number of units."
        )


def example_words(facts: Json) -> str:
    """What a promise to single images does not promise to people."""
    lead, person = facts["headline"], facts["person"]
    epsilon, delta = lead["epsilon"], lead["delta"]
    most = meaning.largest_group(epsilon, delta)
    if person is None:
        several = f"Of a person with more than {most} of them" if most > 1 else "Of a person with two of them or more"
        return f"The unit is the single image, not the person. {several} nothing is promised."
    each = max(2, round(person["examples"] / max(person["units"], 1)))
    group_epsilon, group_delta = meaning.of_group(epsilon, delta, each)
    rest = "at delta 1, which promises nothing" if group_delta >= 1 else f"at delta {group_delta:.1g}"
    return (
        f"The unit is the single image, not the {person['unit']}. A {person['unit']} has about {each} images here "
        f"({person['examples']:,} images of {person['units']:,} {person['unit']}s in the {person['split']} split); for all of them "
        f"together the bound is epsilon {group_epsilon:.1f} {rest}."
    )


def _of_sites(study: Study, facts: Json) -> Iterator[str]:
    if not facts["headline"]:
        return
    if study.strategy.personalised or study.strategy.remembers:
        yield (
            "Sites are judged with models of their own, which they may adapt without noise. Their scores may tell of "
            "training data that the promise does not cover, and such a model must not be given away as if it were."
        )
    if not facts["coordinator"]["shared_homes"]:
        yield (
            "The ledgers of this run began with it: trials on the same data in other run folders are not counted. "
            "Run studies on the same data with one --homes folder to count them."
        )


def _of_coordinator(facts: Json) -> Iterator[str]:
    noised = facts["protection"]["at_coordinator"]
    if noised and noised["sites"] < FEW:
        yield f"Noise at the coordinator hides one site among {noised['sites']}; below {FEW} sites a useful model and a small epsilon rarely go together."


def _of_run(facts: Json) -> Iterator[str]:
    if ((facts["attacks"] or {}).get("inversion") or {}).get("picture"):
        yield "The pictures of the inversion attack in this report show an image that was trained on: hand it on with care."
    if facts["released"] is None:
        yield f"The run has no result yet: it stands at round {facts['rounds']} of {facts['planned']}. More may be spent."
