"""Text to carry over into a data protection impact assessment (Art. 35 GDPR) and a record of processing (Art. 30)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.reports.document.blocks import Chapter, Words, answers, eps, share, times
from pipeline.reports.document.formatting import count_of, joined, whole
from privacy.audit.disclosures import mechanism, people, spread, unit_of
from privacy.audit.document.officer_page import attack_words

Json = Mapping[str, Any]
BLANK = "[to be filled in]"


def forms(facts: Json) -> Chapter:
    intro = (
        "The texts below are drafts with this run's own facts, to be carried over and completed; where only the hospital "
        f"knows, they say {BLANK}. They are no legal advice: whether the processing is lawful, and whether the model is "
        "personal data, the controller decides with its data protection officer (for models see EDPB Opinion 28/2024)."
    )
    return Chapter(
        "Text for the impact assessment and the record of processing",
        [
            Words([intro]),
            answers(list(_assessment(facts)), "Art. 35 (7) GDPR", "Data protection impact assessment"),
            answers(list(_record(facts)), "Art. 30 (1) GDPR", "Record of processing activities"),
        ],
        page=True,
    )


def _assessment(facts: Json) -> Iterator[tuple[str, str]]:
    study, sites = facts["study"], count_of(len(facts["sites"]), "site")
    size = f" with {whole(study['parameters'])} parameters" if study["parameters"] else ""
    labels = (
        f" into {count_of(len(study['classes']), 'class').replace('classs', 'classes')}" if study["classes"] else ""
    )
    yield (
        "(a) Description and purposes",
        (
            f"Study {study['name']} trains a classifier ({study['model']}{size}) that sorts images of blood cells{labels}. In "
            f"{count_of(facts['rounds'], 'round')}, {sites} received the common model, trained it on their own images and "
            f"returned what it had changed ({study['strategy']}). Images and labels stay at the site that holds them. What "
            f"leaves it is listed under “What left the sites”. Purpose: {BLANK}. Legal basis (Art. 6 and 9): {BLANK}."
        ),
    )
    yield (
        "(b) Necessity and proportionality",
        (
            f"A model from one site alone would be trained on fewer {people(facts)} and fewer scanners. Sending updates in "
            "place of images gives away less, and the budget of each site limits how much in all. Why the purpose cannot be "
            f"reached with less, and for how long data are needed: {BLANK}. Information of data subjects: {BLANK}."
        ),
    )
    yield "(c) Risks to data subjects", " ".join(_risks(facts))
    yield "(d) Measures", " ".join([*_measures(facts), f"Other measures, residual risk and its acceptance: {BLANK}."])


def _risks(facts: Json) -> Iterator[str]:
    found = facts["headline"] or facts["protection"]["at_coordinator"]
    yield (
        "From updates or models somebody may find out that a person was in the training data (membership), what a person's "
        "image shows (reconstruction), or something about a person that the model has learned of people alike."
    )
    if found and found["factor"] > 1:
        spent = found["epsilon"] if facts["headline"] else found["spent"]
        yield (
            f"For the first two, odds change by at most a factor of {times(found['factor'])} (epsilon {eps(spent)}, delta "
            f"{found['delta']:g}); from {share(found['prior'])}, a belief rises to at most {share(found['belief'])}."
        )
    else:
        yield "No bound limits the first two."
    yield from attack_words(facts)
    if bare := [row["what"] for row in facts["disclosures"] if row["key"].startswith(("scores/", "profile"))]:
        yield f"Unprotected: {'; '.join(bare)}."


def _measures(facts: Json) -> Iterator[str]:
    how = facts["protection"]
    if how["at_site"]:
        budgets = [found["budget"]["epsilon"] for found in facts["sites"].values() if found.get("budget")]
        yield f"Differential privacy at the site, with the {unit_of(facts)} as unit. {mechanism(facts)}."
        if budgets:
            yield (
                f"Each site's budget (epsilon {spread(budgets)}) is set by its officer and kept in a ledger that is signed, "
                "chained, and countersigned by the coordinator before every training; without budget or receipt the site "
                "does not train."
            )
    if noised := how["at_coordinator"]:
        yield (
            f"Differential privacy at the coordinator, with the site as unit: updates are clipped to {noised['clip']:g} and "
            f"Gaussian noise of {noised['noise']:.3g} times that is added to their sum. The coordinator must be trusted."
        )
    if masked := how["secure_sum"]:
        yield (
            f"Secure sums (Bonawitz et al. 2017): the coordinator can read only sums over at least {masked['threshold']} of "
            f"{masked['asked']} sites."
        )
    if not (how["at_site"] or how["at_coordinator"] or how["secure_sum"]):
        yield "Images stay at the sites. Nothing else protects what leaves them: neither noise nor masks."
    yield "Withdrawal: a person who withdraws is left out of all further training and scoring; released models stay as they are."


def _record(facts: Json) -> Iterator[tuple[str, str]]:
    study = facts["study"]
    yield "(a) Controller", f"Controller, joint controllers, representative, data protection officer: {BLANK}."
    yield (
        "(b) Purposes",
        f"Training and evaluation of a classifier of blood cells (study {study['name']}, plan {study['hash'][:16]}). {BLANK}.",
    )
    yield (
        "(c) Data subjects and data",
        (
            f"{people(facts).capitalize()} whose blood smears were imaged: {_numbers(facts)}. Images of cells, their labels"
            f"{' (' + joined(study['classes'][:12]) + ')' if study['classes'] else ''}, and a key that says whose each image is; "
            f"health data in the sense of Art. 9. Further categories: {BLANK}."
        ),
    )
    yield (
        "(d) Recipients",
        (
            f"The coordinator of the study ({BLANK}) and the other sites ({len(facts['sites']) - 1}), who get model updates or "
            f"models and the figures listed under “What left the sites”; those who are given the model: {BLANK}. Images are "
            "given to nobody."
        ),
    )
    yield "(e) Transfers to third countries", f"{BLANK} (depends on where the coordinator and the other sites are)."
    yield (
        "(f) Time limits",
        (
            f"Images: {BLANK}. The last update that a site sent stays in its outbox until the next one replaces it. The ledger "
            "is kept as long as the data set is used, for what was spent cannot be taken back."
        ),
    )
    yield (
        "(g) Technical and organisational measures",
        " ".join([*_measures(facts), f"Transport, access, backups: {BLANK}."]),
    )


def _numbers(facts: Json) -> str:
    """Of every site where they are few, else their span."""
    held = facts["data"]["held"]
    images = {
        site: sum(sum(counts.get(split) or ()) for split in ("train", "val", "test")) for site, counts in held.items()
    }
    units = {site: found["promise"]["units"] for site, found in facts["sites"].items() if found["promise"]}
    if not images:
        return BLANK
    person = (facts["person"] or {}).get("unit")
    known = units if person and facts["headline"] and facts["headline"]["unit"] == person else {}
    if len(images) > 8:
        return f"{spread(list(map(float, images.values())), ',.0f')} images a site"
    return "; ".join(
        f"{site} {images[site]:,} images"
        + (f" (training: {count_of(known[site], str(person))})" if site in known else "")
        for site in images
    )
