"""The page for the data protection officer: what is promised, to whom, under which assumptions, and was it kept?"""

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
        ("To whom, and against whom?", " ".join(_scope_sentences(facts))),
        ("What does the promise rest on?", " ".join(_assumption_sentences(facts))),
        ("What is not protected?", " ".join(_unprotected_sentences(facts))),
        ("What does releasing the model mean?", " ".join(_release_sentences(facts))),
        ("Was the promise kept?", " ".join(_compliance_sentences(facts))),
        ("What else is important?", " ".join(_other_warnings(facts))),
    ]
    return ReportChapter(
        "For the data protection officer",
        [
            TileBlock(list(_officer_tiles(facts))),
            question_table([(question, answer) for question, answer in rows if answer]),
        ],
    )


def _officer_tiles(facts: Json) -> Iterator[tuple[str, Any]]:
    protection, headline = facts["protection"], facts["headline"]
    client_level_dp = protection["client_level_dp"]
    no_dp_text = "cannot be checked" if protection["secure_aggregation"] else "none made"
    yield "Promise kept", "no" if not facts["ok"] else "yes" if headline or client_level_dp else no_dp_text
    if headline:
        yield "Privacy unit", privacy_unit_name(facts)
        yield "Largest epsilon spent", (format_epsilon(headline["epsilon"]), f"delta {headline['delta']:g}")
    elif client_level_dp:
        yield "Privacy unit", "site"
        yield "Epsilon spent", (format_epsilon(client_level_dp["spent"]), f"delta {client_level_dp['delta']:g}")
    else:
        yield "Differential privacy", "none"
    if not headline:
        yield "Secure aggregation", "yes" if protection["secure_aggregation"] else "no"
    ledgers = [site_facts["ledger"] for site_facts in facts["sites"].values() if site_facts["ledger"]]
    if ledgers:
        yield "Valid ledgers", f"{sum(ledger['ok'] for ledger in ledgers)} of {len(ledgers)}"
    yield "Attacks tried", "none" if facts["attacks"] is None else str(_num_attacks(facts))


def _num_attacks(facts: Json) -> int:
    return sum(bool((facts["attacks"] or {}).get(name)) for name in ("membership", "canaries", "inversion"))


def _promise_sentences(facts: Json) -> Iterator[str]:
    protection, headline = facts["protection"], facts["headline"]
    if headline:
        unit = privacy_unit_name(facts)
        yield (
            describe_image_unit(facts)
            if unit == "image"
            else f"The unit is the {unit}: all images of one {unit} count as one."
        )
        epsilon_text, delta = format_epsilon(headline["epsilon"]), headline["delta"]
        if not headline["epsilon"]:
            yield "No site has spent any epsilon: no update was sent."
        else:
            yield (
                f"For each {unit} in the training data, the probability of any outcome (the model updates that the sites sent, "
                f"and every model computed from them) with this {unit} in the data is at most e^{epsilon_text} = "
                f"{format_factor(headline['factor'])} times the probability without this {unit}, plus {format_chance(delta)}, and "
                f"vice versa (epsilon {epsilon_text} at delta {delta:g}, at {headline['site']}, the site with the largest epsilon)."
            )
    if client_level_dp := protection["client_level_dp"]:
        yield (
            f"{'In addition, with' if headline else 'With'} the site as unit: for each site, the probability of any outcome (every "
            f"model that the coordinator released) is at most e^{format_epsilon(client_level_dp['spent'])} = "
            f"{format_factor(client_level_dp['factor'])} times the probability without this site, plus "
            f"{format_chance(client_level_dp['delta'])}. A person is covered as part of a site."
        )
    if secure_aggregation := protection["secure_aggregation"]:
        yield (
            f"The coordinator learns sums of the updates of at least {secure_aggregation['threshold']} of "
            f"{secure_aggregation['num_sampled_clients']} sites, and the update of no single site."
        )
    if not headline and not client_level_dp:
        yield (
            "There is no differential privacy: nothing is promised to a patient."
            if secure_aggregation
            else "Nothing is protected: the updates and models of this run have neither noise nor masks, and nothing is promised "
            "to anyone."
        )


def _meaning_sentences(facts: Json) -> Iterator[str]:
    promise = facts["headline"] or facts["protection"]["client_level_dp"]
    if not promise or promise["factor"] == 1:
        if not promise:
            yield (
                "Anyone who sees the models may try to find out whether a given patient's images were in the training data, or "
                "what they looked like, and no bound limits how well that can succeed."
            )
        return
    unit, prior_text = privacy_unit_name(facts), format_share(promise["prior"])
    yield (
        f"Someone who considers it {prior_text} likely that a certain {unit} was in the training data can, after seeing all of "
        f"this, consider it at most {format_share(promise['belief'])} likely (leaving delta aside). A test that wrongly names "
        f"{prior_text} of those who were not in the training data identifies at most {format_share(promise['detection'])} of "
        "those who were."
    )
    visible = "update" if facts["headline"] else "model"
    yield f"This is the worst case: an attacker who knows everything else and sees every {visible} of every round."
    if promise["factor"] > WEAK_ODDS_RATIO:
        yield "At this epsilon the bound by itself is weak, so consider it together with the results of attacks."
    yield from attack_sentences(facts)


def attack_sentences(facts: Json) -> Iterator[str]:
    """What the attacks found, one sentence each."""
    attack_results = facts["attacks"] or {}
    if membership := attack_results.get("membership"):
        interval_text = (
            f"{membership['auc_low']:.2f} to {membership['auc_high']:.2f}; "
            if {"auc_low", "auc_high"} <= set(membership)
            else ""
        )
        yield (
            f"An attack that guesses who was in the training data reached an AUC of {membership['auc']:.2f} ({interval_text}0.5 "
            "is chance)."
        )
    if canaries := attack_results.get("canaries"):
        low = float(canaries["epsilon_low"])
        yield (
            f"An attack with planted examples (canaries) shows an epsilon of at least {format_epsilon(low)}."
            if low > 0
            else "Planted examples (canaries) could not be distinguished from those left out."
        )
    if not attack_results:
        yield "No attack has been tried on this run."


def _scope_sentences(facts: Json) -> Iterator[str]:
    protection, headline = facts["protection"], facts["headline"]
    sites_text = format_count(len(facts["sites"]), "site")
    if headline:
        privacy_plans = [
            site_facts["privacy_plan"] for site_facts in facts["sites"].values() if site_facts["privacy_plan"]
        ]
        units_text = format_count(
            sum(privacy_plan["num_units"] for privacy_plan in privacy_plans), privacy_unit_name(facts)
        )
        yield (
            f"To the {units_text} in the training data of {sites_text}. Against the coordinator, the other sites and anyone who "
            "receives the model, even if all of them collude. Not against the hospital that holds the images."
        )
    if protection["client_level_dp"]:
        visible = "the sum of the updates" if protection["secure_aggregation"] else "every update"
        yield (
            f"{'With the site as unit, to' if headline else 'To'} the {sites_text}: against those who see only models. Not against "
            f"the coordinator, which sees {visible} before the noise is added."
        )
    if secure_aggregation := protection["secure_aggregation"]:
        num_sites, threshold = secure_aggregation["num_sampled_clients"], secure_aggregation["threshold"]
        yield (
            "The masks protect against a coordinator that follows the protocol and reads what it sees, and, as long as fewer than "
            "a third of the sites collude with it, against one that deviates from the protocol. Such a coordinator can reduce the "
            f"sum to fewer than {threshold} sites"
            f"{', but only if sites collude with it' if num_sites < 10 else ', but without colluding sites always to more than a third of them'}. "
            f"If all {num_sites} sites except one collude, they learn the update of that one: only noise protects against this."
        )


def _assumption_sentences(facts: Json) -> Iterator[str]:
    if not (facts["headline"] or facts["protection"]["client_level_dp"]):
        return
    unit = privacy_unit_name(facts)
    yield f"Neighbouring data sets differ by one {unit}, added or removed."
    if facts["headline"]:
        yield f"The number of images{'' if unit == 'image' else f' and of {unit}s'} at a site is treated as public."
        if unit != "image":
            yield f"A person is one {unit} at one site; for a person at two sites, or under two names, the epsilons add up."
    yield (
        "Noise and random samples come from AES-256 in counter mode with a key from the operating system; torch's own "
        "generator, which is not cryptographic, makes none of them. Arithmetic is floating-point, so attacks on its "
        "rounding (Mironov 2012) are not excluded. All participants are assumed to run this software unchanged."
    )


def _unprotected_sentences(facts: Json) -> Iterator[str]:
    protection = facts["protection"]
    if not protection["dp_sgd"]:
        adversary = "" if not protection["client_level_dp"] else ", against the coordinator"
        subject = "The sum of the updates" if protection["secure_aggregation"] else "Each site's model updates"
        yield f"{subject}{adversary or ', and every model computed from them'}."
    splits = [row["key"].partition("/")[2] for row in facts["disclosures"] if row["key"].startswith("scores/")]
    if splits:
        yield f"Scores on {join_names([SPLIT_LABELS[split] for split in splits])} images, which leave the sites without noise."
    if "profile" in {row["key"] for row in facts["disclosures"]}:
        yield "The profile of validation images that an exported model contains."
    work_text = "" if protection["secure_aggregation"] else ", on how many images it trained, and how long this took"
    yield f"That a site took part{work_text}."
    if "own" in {row["key"] for row in facts["disclosures"]}:
        yield "Personalized models, which sites adapt for themselves, and their scores."
    yield (
        "Statements about people in general: a model that has learned that a cell indicates a disease also says so about "
        "patients who were never in the data."
    )


def _release_sentences(facts: Json) -> Iterator[str]:
    released_model, headline = facts["released"], facts["headline"]
    if released_model is None:
        yield "There is no final model yet."
        return
    if headline or facts["protection"]["client_level_dp"]:
        yield (
            "It cannot be recalled, but nothing that anyone does with it later increases epsilon: its release is already "
            "counted in full. Every further study on the same data adds to epsilon."
        )
    else:
        yield "It cannot be recalled, and no bound limits what it reveals about those on whose images it was trained."
    if released_model["selected_by"] != "last round":
        yield (
            f"Validation {data_subjects(facts)} influenced only the choice of its round (round {released_model['round']}, by "
            f"{released_model['selected_by']}); that is unprotected."
        )
    yield "A person who withdraws later is excluded from further training, but cannot be removed from this model."


def _compliance_sentences(facts: Json) -> Iterator[str]:
    if not facts["ok"]:
        num_problems = len(facts["problems"])
        yield f"No: see the {format_count(num_problems, 'problem')} at the top of this report."
        return
    spending_sites = [site_facts for site_facts in facts["sites"].values() if site_facts.get("charges")]
    if spending_sites:
        is_anchored = all(site_facts["ledger"]["anchored"] for site_facts in spending_sites)
        anchored_text = ", and they end where the coordinator last countersigned them" if is_anchored else ""
        yield (
            f"Yes. All {len(spending_sites)} ledgers are intact and signed{anchored_text}. Every round in which a site's update "
            "counted had been charged beforehand. No site exceeded its budget. Epsilon recomputed from the charges agrees with the ledgers, "
            "and with an accountant by other authors."
        )
    elif facts["protection"]["client_level_dp"]:
        yield (
            "Epsilon recomputed from the rounds agrees with what was promised. There is no ledger of the noise at the coordinator."
        )
    elif facts["protection"]["secure_aggregation"]:
        yield "Masks leave no trace that can be checked afterwards; the study required them in every round."
    elif facts["headline"]:
        yield "No epsilon was spent."
    if exhausted_sites := [
        site for site, site_facts in facts["sites"].items() if site_facts["participation"]["out_of_budget"]
    ]:
        names = join_names(exhausted_sites) if len(exhausted_sites) <= 6 else f"{len(exhausted_sites)} sites"
        yield f"{names} declined the rounds that their budgets would not have covered."


def _other_warnings(facts: Json) -> Iterator[str]:
    headline = facts["headline"]
    unit_text = describe_image_unit(facts) if headline and headline["unit"] == "example" else ""
    return (warning for warning in facts["warnings"] if warning != unit_text)
