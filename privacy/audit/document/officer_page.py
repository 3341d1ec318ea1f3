"""The officer's page: what is promised, to whom, and what it means, in plain words. The rest of it: audit_limits.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.reports.document.blocks import (
    ReportChapter,
    TileBlock,
    format_chance,
    format_epsilon,
    format_factor,
    format_share,
    question_table,
)
from pipeline.reports.document.formatting import SPLIT_LABELS, format_count, join_names
from privacy.audit.disclosures import data_subjects, privacy_unit_name
from privacy.audit.warnings import WEAK_ODDS_RATIO, describe_image_unit

Json = Mapping[str, Any]


def build_officer_chapter(facts: Json) -> ReportChapter:
    rows = [
        ("What is promised?", " ".join(_promise_sentences(facts))),
        ("What does that mean?", " ".join(_meaning_sentences(facts))),
        ("To whom, against whom?", " ".join(_scope_sentences(facts))),
        ("What does it rest on?", " ".join(assumption_sentences(facts))),
        ("What is not protected?", " ".join(unprotected_sentences(facts))),
        ("What does releasing the model mean?", " ".join(release_sentences(facts))),
        ("Was it kept?", " ".join(compliance_sentences(facts))),
        ("What else to know?", " ".join(other_warnings(facts))),
    ]
    return ReportChapter(
        "For the data protection officer",
        [TileBlock(list(_officer_tiles(facts))), question_table([r for r in rows if r[1]])],
    )


def _officer_tiles(facts: Json) -> Iterator[tuple[str, Any]]:
    protection, headline = facts["protection"], facts["headline"]
    client_level_dp = protection["client_level_dp"]
    kept_text = "not checkable" if protection["secure_aggregation"] else "none made"
    yield "Promise kept", "no" if not facts["ok"] else "yes" if headline or client_level_dp else kept_text
    if headline:
        yield "Unit of the promise", privacy_unit_name(facts)
        yield "Most epsilon spent", (format_epsilon(headline["epsilon"]), f"delta {headline['delta']:g}")
    elif client_level_dp:
        yield "Unit of the promise", "site"
        yield "Epsilon spent", (format_epsilon(client_level_dp["spent"]), f"delta {client_level_dp['delta']:g}")
    else:
        yield "Differential privacy", "none"
    if not headline:
        yield "Secure sums", "yes" if protection["secure_aggregation"] else "no"
    ledgers = [site_facts["ledger"] for site_facts in facts["sites"].values() if site_facts["ledger"]]
    if ledgers:
        yield "Ledgers that verify", f"{sum(ledger['ok'] for ledger in ledgers)} of {len(ledgers)}"
    yield "Attacks tried", "none" if facts["attacks"] is None else str(len(tried_attacks(facts)))


def tried_attacks(facts: Json) -> list[str]:
    return [name for name in ("membership", "canaries", "inversion") if (facts["attacks"] or {}).get(name)]


def _promise_sentences(facts: Json) -> Iterator[str]:
    protection, headline = facts["protection"], facts["headline"]
    if headline:
        unit = privacy_unit_name(facts)
        yield (
            describe_image_unit(facts)
            if unit == "image"
            else f"The unit is the {unit}: all images of one {unit} count as one."
        )
        if not headline["epsilon"]:
            yield "No site spent anything: no update was sent."
        else:
            yield (
                f"For each {unit} that was trained on, the chance of whatever the sites sent as model updates, and of "
                f"every model made from it, is with this {unit} at most e^{format_epsilon(headline['epsilon'])} = {format_factor(headline['factor'])} "
                f"times what it is without, plus {format_chance(headline['delta'])}, and the other way round (epsilon {format_epsilon(headline['epsilon'])} at delta "
                f"{headline['delta']:g}; that is {headline['site']}, where most was spent)."
            )
    if client_level_dp := protection["client_level_dp"]:
        yield (
            f"{'Also, with' if headline else 'With'} the site as unit: for each site, the chance of every model that came out is "
            f"at most e^{format_epsilon(client_level_dp['spent'])} = {format_factor(client_level_dp['factor'])} times what it is without the site, plus "
            f"{format_chance(client_level_dp['delta'])}. A person is covered as part of a site."
        )
    if secure_aggregation := protection["secure_aggregation"]:
        yield (
            f"The coordinator learns sums of the updates of at least {secure_aggregation['threshold']} of {secure_aggregation['asked']} sites, "
            "and no single site's."
        )
    if not headline and not client_level_dp:
        yield (
            "No differential privacy: nothing is promised to a patient."
            if secure_aggregation
            else "Nothing is protected: updates and models of this run carry neither noise nor masks, and nothing is promised "
            "to anybody."
        )


def _meaning_sentences(facts: Json) -> Iterator[str]:
    promise = facts["headline"] or facts["protection"]["client_level_dp"]
    if not promise or promise["factor"] == 1:
        if not promise:
            yield (
                "Whoever sees the models may try to find out whether a given patient's images were trained on, or what "
                "they looked like, and no bound says how well that can succeed."
            )
        return
    unit = privacy_unit_name(facts)
    yield (
        f"Whoever thinks it {format_share(promise['prior'])} likely that a certain {unit} was in the training can, having seen all "
        f"this, think it at most {format_share(promise['belief'])} likely (delta aside). A test that wrongly names "
        f"{format_share(promise['prior'])} of those who were not in it finds at most {format_share(promise['detection'])} of those who were."
    )
    visible = "update" if facts["headline"] else "model"
    yield f"This is the worst case, of an attacker who knows everything else and sees every {visible} of every round."
    if promise["factor"] > WEAK_ODDS_RATIO:
        yield "At this epsilon the bound is weak by itself, so the evidence of attacks belongs beside it."
    yield from attack_sentences(facts)


def attack_sentences(facts: Json) -> Iterator[str]:
    attack_results = facts["attacks"] or {}
    if membership := attack_results.get("membership"):
        interval_text = (
            f"{membership['low']:.2f} to {membership['high']:.2f}; " if {"low", "high"} <= set(membership) else ""
        )
        yield f"Guessing who was trained on reached an AUC of {membership['auc']:.2f} ({interval_text}0.5 is chance)."
    if canaries := attack_results.get("canaries"):
        low = float(canaries["epsilon_low"])
        yield (
            f"Planted examples show an epsilon of at least {format_epsilon(low)}."
            if low > 0
            else "Planted examples could not be told from those left out."
        )
    if not attack_results:
        yield "No attack has been tried on this run."


def _scope_sentences(facts: Json) -> Iterator[str]:
    protection, headline = facts["protection"], facts["headline"]
    sites_text = format_count(len(facts["sites"]), "site")
    if headline:
        privacy_plans = [site_facts["privacy_plan"] for site_facts in facts["sites"].values() if site_facts["privacy_plan"]]
        units_text = format_count(
            sum(privacy_plan["num_units"] for privacy_plan in privacy_plans), privacy_unit_name(facts)
        )
        yield (
            f"To the {units_text} in the training data of {sites_text}. Against the coordinator, the other sites and whoever is given "
            "the model, even all in league. Not against the hospital that holds the images."
        )
    if protection["client_level_dp"]:
        visible = "the sum of the updates" if protection["secure_aggregation"] else "every update"
        yield (
            f"{'As units, to' if headline else 'To'} the {sites_text}: against those who see only models. Not against the "
            f"coordinator, which sees {visible} before the noise."
        )
    if secure_aggregation := protection["secure_aggregation"]:
        num_sites = secure_aggregation["asked"]
        yield (
            "Masks hold against a coordinator that follows the protocol and reads what it sees, and against one that lies "
            f"as long as fewer than a third of the sites help it; a lying one can shrink the sum below {secure_aggregation['threshold']} "
            f"sites{' only with help' if num_sites < 10 else ', but without help never to a third of them'}. "
            f"All {num_sites} sites but one in league learn that one's update: only noise helps against this."
        )


# The officer's page, second half: what the promise rests on and leaves out, what a release means, whether it was kept.


def assumption_sentences(facts: Json) -> Iterator[str]:
    if not (facts["headline"] or facts["protection"]["client_level_dp"]):
        return
    unit = privacy_unit_name(facts)
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


def unprotected_sentences(facts: Json) -> Iterator[str]:
    protection = facts["protection"]
    if not protection["dp_sgd"]:
        adversary = "" if not protection["client_level_dp"] else ", against the coordinator"
        subject = "The sum of the updates" if protection["secure_aggregation"] else "Each site's model updates"
        yield f"{subject}{adversary or ', and every model made from them'}."
    splits = [row["key"].partition("/")[2] for row in facts["disclosures"] if row["key"].startswith("scores/")]
    if splits:
        yield f"Scores on {join_names([SPLIT_LABELS[split] for split in splits])} images, which leave the sites without noise."
    if "profile" in {row["key"] for row in facts["disclosures"]}:
        yield "The profile of validation images that an exported model carries."
    work_text = "" if protection["secure_aggregation"] else ", on how many images it trained, and how long that took"
    yield f"That a site took part{work_text}."
    if "own" in {row["key"] for row in facts["disclosures"]}:
        yield "Models that sites adapt for themselves, and their scores."
    yield (
        "What holds for people in general: if a model learns that a cell means a disease, it says so of patients who "
        "were never in the data."
    )


def release_sentences(facts: Json) -> Iterator[str]:
    released_model, headline = facts["released"], facts["headline"]
    if released_model is None:
        yield "There is no final model yet."
        return
    if headline or facts["protection"]["client_level_dp"]:
        yield (
            "It cannot be called back, but whatever anybody does with it later, epsilon does not grow: it is already "
            "counted in full. Every further study on the same data adds to it."
        )
    else:
        yield "It cannot be called back, and no bound says what it gives away of those it was trained on."
    if released_model["chosen_by"] != "last round":
        yield f"Validation {data_subjects(facts)} had a say only in which round it is ({released_model['round']}, by {released_model['chosen_by']}); that is unprotected."
    yield "Somebody who withdraws later is left out of further training, and cannot be taken out of this model."


def compliance_sentences(facts: Json) -> Iterator[str]:
    if not facts["ok"]:
        num_problems = len(facts["problems"])
        yield f"No: see the {format_count(num_problems, 'problem')} at the top."
        return
    spending_sites = [site_facts for site_facts in facts["sites"].values() if site_facts.get("charges")]
    if spending_sites:
        is_anchored = all(site_facts["ledger"]["anchored"] for site_facts in spending_sites)
        yield (
            f"Yes. All {len(spending_sites)} ledgers are whole and signed{', and end where the coordinator last saw them' if is_anchored else ''}. "
            "Every round that counted was charged before. No site passed its budget. Epsilon recomputed from the charges "
            "agrees with the ledgers, and with an accountant by others."
        )
    elif facts["protection"]["client_level_dp"]:
        yield "Epsilon recomputed from the rounds agrees with what was promised. No ledger is kept of noise at the coordinator."
    elif facts["protection"]["secure_aggregation"]:
        yield "Masks leave no trace that could be checked afterwards; the study required them in every round."
    elif facts["headline"]:
        yield "Nothing was spent."
    if exhausted_sites := [site for site, site_facts in facts["sites"].items() if site_facts["participation"]["out_of_budget"]]:
        names = join_names(exhausted_sites) if len(exhausted_sites) <= 6 else f"{len(exhausted_sites)} sites"
        yield f"{names} sat out what the budget would not cover."


def other_warnings(facts: Json) -> Iterator[str]:
    headline = facts["headline"]
    unit_text = describe_image_unit(facts) if headline and headline["unit"] == "example" else ""
    return (warning for warning in facts["warnings"] if warning != unit_text)
