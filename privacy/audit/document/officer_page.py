"""The page for the data protection officer: what is promised, to whom, under which assumptions, and was it kept?"""

from __future__ import annotations

from collections.abc import Iterator

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
from pipeline.reports.document.page import TableCell
from privacy.audit.attack_findings import AttackFindings
from privacy.audit.disclosures import split_of
from privacy.audit.facts import AuditFacts
from privacy.audit.warnings import WEAK_ODDS_RATIO, describe_image_unit


def build_officer_chapter(facts: AuditFacts) -> ReportChapter:
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


def _officer_tiles(facts: AuditFacts) -> Iterator[tuple[str, TableCell]]:
    protection, headline = facts.protection, facts.headline
    client_level_dp = protection.client_level_dp
    no_dp_text = "cannot be checked" if protection.secure_aggregation else "none made"
    yield "Promise kept", "no" if not facts.ok else "yes" if headline or client_level_dp else no_dp_text
    if headline:
        yield "Privacy unit", facts.privacy_unit_name
        yield "Largest epsilon spent", (format_epsilon(headline.spent.epsilon), f"delta {headline.spent.delta:g}")
    elif client_level_dp:
        yield "Privacy unit", "site"
        yield "Epsilon spent", (format_epsilon(client_level_dp.spent.epsilon), f"delta {client_level_dp.spent.delta:g}")
    else:
        yield "Differential privacy", "none"
    if not headline:
        yield "Secure aggregation", "yes" if protection.secure_aggregation else "no"
    ledgers = [site_facts.ledger for site_facts in facts.sites.values() if site_facts.ledger]
    if ledgers:
        yield "Valid ledgers", f"{sum(ledger.ok for ledger in ledgers)} of {len(ledgers)}"
    yield "Attacks tried", "none" if facts.attacks is None else str(len(facts.attacks.tried))


def _promise_sentences(facts: AuditFacts) -> Iterator[str]:
    protection, headline = facts.protection, facts.headline
    if headline:
        unit = facts.privacy_unit_name
        yield (
            describe_image_unit(facts)
            if unit == "image"
            else f"The unit is the {unit}: all images of one {unit} count as one."
        )
        epsilon_text, delta = format_epsilon(headline.spent.epsilon), headline.spent.delta
        if not headline.spent.epsilon:
            yield "No site has spent any epsilon: no update was sent."
        else:
            yield (
                f"For each {unit} in the training data, the probability of any outcome (the model updates that the sites sent, "
                f"and every model computed from them) with this {unit} in the data is at most e^{epsilon_text} = "
                f"{format_factor(headline.spent.factor)} times the probability without this {unit}, plus {format_chance(delta)}, and "
                f"vice versa (epsilon {epsilon_text} at delta {delta:g}, at {headline.site}, the site with the largest epsilon)."
            )
    if client_level_dp := protection.client_level_dp:
        yield (
            f"{'In addition, with' if headline else 'With'} the site as unit: for each site, the probability of any outcome (every "
            f"model that the coordinator released) is at most e^{format_epsilon(client_level_dp.spent.epsilon)} = "
            f"{format_factor(client_level_dp.spent.factor)} times the probability without this site, plus "
            f"{format_chance(client_level_dp.spent.delta)}. A person is covered as part of a site."
        )
    if secure_aggregation := protection.secure_aggregation:
        yield (
            f"The coordinator learns sums of the updates of at least {secure_aggregation.threshold} of "
            f"{secure_aggregation.num_sampled_clients} sites, and the update of no single site."
        )
    if not headline and not client_level_dp:
        yield (
            "There is no differential privacy: nothing is promised to a patient."
            if secure_aggregation
            else "Nothing is protected: the updates and models of this run have neither noise nor masks, and nothing is promised "
            "to anyone."
        )


def _meaning_sentences(facts: AuditFacts) -> Iterator[str]:
    spent = facts.spent
    if not spent or spent.factor == 1:
        if not spent:
            yield (
                "Anyone who sees the models may try to find out whether a given patient's images were in the training data, or "
                "what they looked like, and no bound limits how well that can succeed."
            )
        return
    unit, prior_text = facts.privacy_unit_name, format_share(spent.prior)
    yield (
        f"Someone who considers it {prior_text} likely that a certain {unit} was in the training data can, after seeing all of "
        f"this, consider it at most {format_share(spent.belief)} likely (leaving delta aside). A test that wrongly names "
        f"{prior_text} of those who were not in the training data identifies at most {format_share(spent.detection)} of "
        "those who were."
    )
    visible = "update" if facts.headline else "model"
    yield f"This is the worst case: an attacker who knows everything else and sees every {visible} of every round."
    if spent.factor > WEAK_ODDS_RATIO:
        yield "At this epsilon the bound by itself is weak, so consider it together with the results of attacks."
    yield from attack_sentences(facts)


def attack_sentences(facts: AuditFacts) -> Iterator[str]:
    """What the attacks found, one sentence each."""
    findings = facts.attacks or AttackFindings()
    if membership := findings.membership:
        interval_text = (
            ""
            if membership.auc_low is None or membership.auc_high is None
            else f"{membership.auc_low:.2f} to {membership.auc_high:.2f}; "
        )
        yield (
            f"An attack that guesses who was in the training data reached an AUC of {membership.auc:.2f} ({interval_text}0.5 "
            "is chance)."
        )
    if canaries := findings.canaries:
        low = canaries.epsilon_low
        yield (
            f"An attack with planted examples (canaries) shows an epsilon of at least {format_epsilon(low)}."
            if low > 0
            else "Planted examples (canaries) could not be distinguished from those left out."
        )
    if not findings.tried:
        yield "No attack has been tried on this run."


def _scope_sentences(facts: AuditFacts) -> Iterator[str]:
    protection, headline = facts.protection, facts.headline
    sites_text = format_count(len(facts.sites), "site")
    if headline:
        units_text = format_count(sum(plan.num_units for plan in facts.privacy_plans), facts.privacy_unit_name)
        yield (
            f"To the {units_text} in the training data of {sites_text}. Against the coordinator, the other sites and anyone who "
            "receives the model, even if all of them collude. Not against the hospital that holds the images."
        )
    if protection.client_level_dp:
        visible = "the sum of the updates" if protection.secure_aggregation else "every update"
        yield (
            f"{'With the site as unit, to' if headline else 'To'} the {sites_text}: against those who see only models. Not against "
            f"the coordinator, which sees {visible} before the noise is added."
        )
    if secure_aggregation := protection.secure_aggregation:
        num_sites, threshold = secure_aggregation.num_sampled_clients, secure_aggregation.threshold
        yield (
            "The masks protect against a coordinator that follows the protocol and reads what it sees, and, as long as fewer than "
            "a third of the sites collude with it, against one that deviates from the protocol. Such a coordinator can reduce the "
            f"sum to fewer than {threshold} sites"
            f"{', but only if sites collude with it' if num_sites < 10 else ', but without colluding sites always to more than a third of them'}. "
            f"If all {num_sites} sites except one collude, they learn the update of that one: only noise protects against this."
        )


def _assumption_sentences(facts: AuditFacts) -> Iterator[str]:
    if not (facts.headline or facts.protection.client_level_dp):
        return
    unit = facts.privacy_unit_name
    yield f"Neighbouring data sets differ by one {unit}, added or removed."
    if facts.headline:
        yield f"The number of images{'' if unit == 'image' else f' and of {unit}s'} at a site is treated as public."
        if unit != "image":
            yield f"A person is one {unit} at one site; for a person at two sites, or under two names, the epsilons add up."
    yield (
        "Noise and random samples come from AES-256 in counter mode with a key from the operating system; torch's own "
        "generator, which is not cryptographic, makes none of them. Arithmetic is floating-point, so attacks on its "
        "rounding (Mironov 2012) are not excluded. All participants are assumed to run this software unchanged."
    )


def _unprotected_sentences(facts: AuditFacts) -> Iterator[str]:
    protection = facts.protection
    if not protection.dp_sgd:
        adversary = "" if not protection.client_level_dp else ", against the coordinator"
        subject = "The sum of the updates" if protection.secure_aggregation else "Each site's model updates"
        yield f"{subject}{adversary or ', and every model computed from them'}."
    splits = [split for disclosure in facts.disclosures if (split := split_of(disclosure))]
    kinds = {disclosure.kind for disclosure in facts.disclosures}
    if splits:
        yield f"Scores on {join_names([SPLIT_LABELS[split] for split in splits])} images, which leave the sites without noise."
    if "profile" in kinds:
        yield "The profile of validation images that an exported model contains."
    work_text = "" if protection.secure_aggregation else ", on how many images it trained, and how long this took"
    yield f"That a site took part{work_text}."
    if "personal_scores" in kinds:
        yield "Personalized models, which sites adapt for themselves, and their scores."
    yield (
        "Statements about people in general: a model that has learned that a cell indicates a disease also says so about "
        "patients who were never in the data."
    )


def _release_sentences(facts: AuditFacts) -> Iterator[str]:
    released_model, headline = facts.released, facts.headline
    if released_model is None:
        yield "There is no final model yet."
        return
    if headline or facts.protection.client_level_dp:
        yield (
            "It cannot be recalled, but nothing that anyone does with it later increases epsilon: its release is already "
            "counted in full. Every further study on the same data adds to epsilon."
        )
    else:
        yield "It cannot be recalled, and no bound limits what it reveals about those on whose images it was trained."
    if released_model.selected_by != "last round":
        yield (
            f"Validation {facts.subjects_name} influenced only the choice of its round (round {released_model.round}, by "
            f"{released_model.selected_by}); that is unprotected."
        )
    yield "A person who withdraws later is excluded from further training, but cannot be removed from this model."


def _compliance_sentences(facts: AuditFacts) -> Iterator[str]:
    if not facts.ok:
        num_problems = len(facts.problems)
        yield f"No: see the {format_count(num_problems, 'problem')} at the top of this report."
        return
    charged_ledgers = [
        site_facts.ledger
        for site_facts in facts.sites.values()
        if site_facts.ledger and site_facts.spending and site_facts.spending.charges
    ]
    if charged_ledgers:
        is_anchored = all(ledger.anchored for ledger in charged_ledgers)
        anchored_text = ", and they end where the coordinator last countersigned them" if is_anchored else ""
        yield (
            f"Yes. All {len(charged_ledgers)} ledgers are intact and signed{anchored_text}. Every round in which a site's update "
            "counted had been charged beforehand. No site exceeded its budget. Epsilon recomputed from the charges agrees with the ledgers, "
            "and with an accountant by other authors."
        )
    elif facts.protection.client_level_dp:
        yield (
            "Epsilon recomputed from the rounds agrees with what was promised. There is no ledger of the noise at the coordinator."
        )
    elif facts.protection.secure_aggregation:
        yield "Masks leave no trace that can be checked afterwards; the study required them in every round."
    elif facts.headline:
        yield "No epsilon was spent."
    if exhausted_sites := [site for site, site_facts in facts.sites.items() if site_facts.participation.out_of_budget]:
        names = join_names(exhausted_sites) if len(exhausted_sites) <= 6 else f"{len(exhausted_sites)} sites"
        yield f"{names} declined the rounds that their budgets would not have covered."


def _other_warnings(facts: AuditFacts) -> Iterator[str]:
    headline = facts.headline
    unit_text = describe_image_unit(facts) if headline and headline.unit == "example" else ""
    return (warning for warning in facts.warnings if warning != unit_text)
