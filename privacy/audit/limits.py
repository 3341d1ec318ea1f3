"""The officer's page, second half: what the promise rests on and leaves out, what a release means, whether it was kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.reports.words import SPLITS, count_of, joined
from privacy.audit.cautions import example_words
from privacy.audit.disclosures import people, unit_of

Json = Mapping[str, Any]


def assumed(facts: Json) -> Iterator[str]:
    if not (facts["headline"] or facts["protection"]["at_coordinator"]):
        return
    unit = unit_of(facts)
    yield f"Neighbouring data differ by one {unit} more or less."
    if facts["headline"]:
        yield f"How many images{'' if unit == 'image' else f' and {unit}s'} a site has is treated as public."
        if unit != "image":
            yield f"A person is one {unit} at one site; for somebody at two sites, or under two names, the epsilons add up."
    yield (
        "Noise and random draws come from AES-256 in counter mode with a key of the operating system; torch's own "
        "generator, which is not cryptographic, makes none of them. Arithmetic is floating point, so attacks on its "
        "rounding (Mironov 2012) are not excluded. Everybody runs this software unchanged."
    )


def left_out(facts: Json) -> Iterator[str]:
    how = facts["protection"]
    if not how["at_site"]:
        against = "" if not how["at_coordinator"] else ", against the coordinator"
        whose = "The sum of the updates" if how["secure_sum"] else "Each site's model updates"
        yield f"{whose}{against or ', and every model made from them'}."
    splits = [row["key"].partition("/")[2] for row in facts["disclosures"] if row["key"].startswith("scores/")]
    if splits:
        yield f"Scores on {joined([SPLITS[split] for split in splits])} images, which leave the sites without noise."
    if "profile" in {row["key"] for row in facts["disclosures"]}:
        yield "The profile of validation images that an exported model carries."
    more = "" if how["secure_sum"] else ", on how many images it trained, and how long that took"
    yield f"That a site took part{more}."
    if "own" in {row["key"] for row in facts["disclosures"]}:
        yield "Models that sites adapt for themselves, and their scores."
    yield (
        "What holds for people in general: if a model learns that a cell means a disease, it says so of patients who "
        "were never in the data."
    )


def released(facts: Json) -> Iterator[str]:
    made, lead = facts["released"], facts["headline"]
    if made is None:
        yield "There is no final model yet."
        return
    if lead or facts["protection"]["at_coordinator"]:
        yield (
            "It cannot be called back, but whatever anybody does with it later, epsilon does not grow: it is already "
            "counted in full. Every further study on the same data adds to it."
        )
    else:
        yield "It cannot be called back, and no bound says what it gives away of those it was trained on."
    if made["chosen_by"] != "last round":
        yield f"Validation {people(facts)} had a say only in which round it is ({made['round']}, by {made['chosen_by']}); that is unprotected."
    yield "Somebody who withdraws later is left out of further training, and cannot be taken out of this model."


def kept(facts: Json) -> Iterator[str]:
    if not facts["ok"]:
        many = len(facts["problems"])
        yield f"No: see the {count_of(many, 'problem')} at the top."
        return
    spending = [found for found in facts["sites"].values() if found.get("charges")]
    if spending:
        anchored = all(found["ledger"]["anchored"] for found in spending)
        yield (
            f"Yes. All {len(spending)} ledgers are whole and signed{', and end where the coordinator last saw them' if anchored else ''}. "
            "Every round that counted was charged before. No site passed its budget. Epsilon recomputed from the charges "
            "agrees with the ledgers, and with an accountant by others."
        )
    elif facts["protection"]["at_coordinator"]:
        yield "Epsilon recomputed from the rounds agrees with what was promised. No ledger is kept of noise at the coordinator."
    elif facts["protection"]["secure_sum"]:
        yield "Masks leave no trace that could be checked afterwards; the study required them in every round."
    elif facts["headline"]:
        yield "Nothing was spent."
    if spent_up := [site for site, found in facts["sites"].items() if found["took"]["sat_out"]]:
        names = joined(spent_up) if len(spent_up) <= 6 else f"{len(spent_up)} sites"
        yield f"{names} sat out what the budget would not cover."


def besides(facts: Json) -> Iterator[str]:
    lead = facts["headline"]
    said = example_words(facts) if lead and lead["unit"] == "example" else ""
    return (text for text in facts["cautions"] if text != said)
