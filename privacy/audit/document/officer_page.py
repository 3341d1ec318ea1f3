"""The officer's page: what is promised, to whom, and what it means, in plain words. The rest of it: audit_limits.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.reports.document.blocks import Chapter, Tiles, answers, chance, eps, share, times
from pipeline.reports.document.formatting import SPLITS, count_of, joined
from privacy.audit.disclosures import people, unit_of
from privacy.audit.warnings import LOOSE, example_words

Json = Mapping[str, Any]


def officer(facts: Json) -> Chapter:
    rows = [
        ("What is promised?", " ".join(_promised(facts))),
        ("What does that mean?", " ".join(_meant(facts))),
        ("To whom, against whom?", " ".join(_whom(facts))),
        ("What does it rest on?", " ".join(assumed(facts))),
        ("What is not protected?", " ".join(left_out(facts))),
        ("What does releasing the model mean?", " ".join(released(facts))),
        ("Was it kept?", " ".join(kept(facts))),
        ("What else to know?", " ".join(besides(facts))),
    ]
    return Chapter("For the data protection officer", [Tiles(list(_tiles(facts))), answers([r for r in rows if r[1]])])


def _tiles(facts: Json) -> Iterator[tuple[str, Any]]:
    how, lead = facts["protection"], facts["headline"]
    noised = how["at_coordinator"]
    kept_words = "not checkable" if how["secure_sum"] else "none made"
    yield "Promise kept", "no" if not facts["ok"] else "yes" if lead or noised else kept_words
    if lead:
        yield "Unit of the promise", unit_of(facts)
        yield "Most epsilon spent", (eps(lead["epsilon"]), f"delta {lead['delta']:g}")
    elif noised:
        yield "Unit of the promise", "site"
        yield "Epsilon spent", (eps(noised["spent"]), f"delta {noised['delta']:g}")
    else:
        yield "Differential privacy", "none"
    if not lead:
        yield "Secure sums", "yes" if how["secure_sum"] else "no"
    known = [found["ledger"] for found in facts["sites"].values() if found["ledger"]]
    if known:
        yield "Ledgers that verify", f"{sum(ledger['ok'] for ledger in known)} of {len(known)}"
    yield "Attacks tried", "none" if facts["attacks"] is None else str(len(attacks_in(facts)))


def attacks_in(facts: Json) -> list[str]:
    return [name for name in ("membership", "canaries", "inversion") if (facts["attacks"] or {}).get(name)]


def _promised(facts: Json) -> Iterator[str]:
    how, lead = facts["protection"], facts["headline"]
    if lead:
        unit = unit_of(facts)
        yield (
            example_words(facts)
            if unit == "image"
            else f"The unit is the {unit}: all images of one {unit} count as one."
        )
        if not lead["epsilon"]:
            yield "No site spent anything: no update was sent."
        else:
            yield (
                f"For each {unit} that was trained on, the chance of whatever the sites sent as model updates, and of "
                f"every model made from it, is with this {unit} at most e^{eps(lead['epsilon'])} = {times(lead['factor'])} "
                f"times what it is without, plus {chance(lead['delta'])}, and the other way round (epsilon {eps(lead['epsilon'])} at delta "
                f"{lead['delta']:g}; that is {lead['site']}, where most was spent)."
            )
    if noised := how["at_coordinator"]:
        yield (
            f"{'Also, with' if lead else 'With'} the site as unit: for each site, the chance of every model that came out is "
            f"at most e^{eps(noised['spent'])} = {times(noised['factor'])} times what it is without the site, plus "
            f"{chance(noised['delta'])}. A person is covered as part of a site."
        )
    if masked := how["secure_sum"]:
        yield (
            f"The coordinator learns sums of the updates of at least {masked['threshold']} of {masked['asked']} sites, "
            "and no single site's."
        )
    if not lead and not noised:
        yield (
            "No differential privacy: nothing is promised to a patient." if masked else
            "Nothing is protected: updates and models of this run carry neither noise nor masks, and nothing is promised "
            "to anybody."
        )  # fmt: skip


def _meant(facts: Json) -> Iterator[str]:
    found = facts["headline"] or facts["protection"]["at_coordinator"]
    if not found or found["factor"] == 1:
        if not found:
            yield (
                "Whoever sees the models may try to find out whether a given patient's images were trained on, or what "
                "they looked like, and no bound says how well that can succeed."
            )
        return
    unit = unit_of(facts)
    yield (
        f"Whoever thinks it {share(found['prior'])} likely that a certain {unit} was in the training can, having seen all "
        f"this, think it at most {share(found['belief'])} likely (delta aside). A test that wrongly names "
        f"{share(found['prior'])} of those who were not in it finds at most {share(found['detection'])} of those who were."
    )
    seen = "update" if facts["headline"] else "model"
    yield f"This is the worst case, of an attacker who knows everything else and sees every {seen} of every round."
    if found["factor"] > LOOSE:
        yield "At this epsilon the bound is weak by itself, so the evidence of attacks belongs beside it."
    yield from attack_words(facts)


def attack_words(facts: Json) -> Iterator[str]:
    tried = facts["attacks"] or {}
    if member := tried.get("membership"):
        span = f"{member['low']:.2f} to {member['high']:.2f}; " if {"low", "high"} <= set(member) else ""
        yield f"Guessing who was trained on reached an AUC of {member['auc']:.2f} ({span}0.5 is chance)."
    if canary := tried.get("canaries"):
        low = float(canary["epsilon_low"])
        yield (
            f"Planted examples show an epsilon of at least {eps(low)}."
            if low > 0
            else "Planted examples could not be told from those left out."
        )
    if not tried:
        yield "No attack has been tried on this run."


def _whom(facts: Json) -> Iterator[str]:
    how, lead = facts["protection"], facts["headline"]
    sites = count_of(len(facts["sites"]), "site")
    if lead:
        made = [found["promise"] for found in facts["sites"].values() if found["promise"]]
        units = count_of(sum(promise["units"] for promise in made), unit_of(facts))
        yield (
            f"To the {units} in the training data of {sites}. Against the coordinator, the other sites and whoever is given "
            "the model, even all in league. Not against the hospital that holds the images."
        )
    if how["at_coordinator"]:
        seen = "the sum of the updates" if how["secure_sum"] else "every update"
        yield (
            f"{'As units, to' if lead else 'To'} the {sites}: against those who see only models. Not against the "
            f"coordinator, which sees {seen} before the noise."
        )
    if masked := how["secure_sum"]:
        n = masked["asked"]
        yield (
            "Masks hold against a coordinator that follows the protocol and reads what it sees, and against one that lies "
            f"as long as fewer than a third of the sites help it; a lying one can shrink the sum below {masked['threshold']} "
            f"sites{' only with help' if n < 10 else ', but without help never to a third of them'}. "
            f"All {n} sites but one in league learn that one's update: only noise helps against this."
        )


# The officer's page, second half: what the promise rests on and leaves out, what a release means, whether it was kept.


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
