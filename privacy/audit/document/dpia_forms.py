"""Text to carry over into a data protection impact assessment (Art. 35 GDPR) and a record of processing (Art. 30)."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.reports.document.blocks import (
    ReportChapter,
    TextBlock,
    format_epsilon,
    format_factor,
    format_share,
    question_table,
)
from pipeline.reports.document.formatting import format_count, format_integer, join_names
from privacy.audit.disclosures import describe_mechanism, format_range, split_of
from privacy.audit.document.officer_page import attack_sentences
from privacy.audit.facts import AuditFacts

PLACEHOLDER = "[to be filled in]"


def build_dpia_chapter(facts: AuditFacts) -> ReportChapter:
    intro = (
        "The texts below are drafts with the facts of this run, to be copied and completed; where only the hospital has the "
        f"information, they say {PLACEHOLDER}. They are not legal advice: the controller decides with its data protection officer "
        "whether the processing is lawful, and whether the model is personal data (for models see EDPB Opinion 28/2024)."
    )
    return ReportChapter(
        "Text for the impact assessment and the record of processing",
        [
            TextBlock([intro]),
            question_table(list(_assessment_rows(facts)), "Art. 35 (7) GDPR", "Data protection impact assessment"),
            question_table(list(_processing_record_rows(facts)), "Art. 30 (1) GDPR", "Record of processing activities"),
        ],
        starts_new_page=True,
    )


def _assessment_rows(facts: AuditFacts) -> Iterator[tuple[str, str]]:
    study, sites_text = facts.study, format_count(len(facts.sites), "site")
    size_text = f" with {format_integer(study.num_parameters)} parameters" if study.num_parameters else ""
    classes_text = (
        f" into {format_count(len(study.classes), 'class').replace('classs', 'classes')}" if study.classes else ""
    )
    yield (
        "(a) Description and purposes",
        (
            f"Study {study.name} trains a classifier ({study.model}{size_text}) that sorts images of blood cells{classes_text}. In "
            f"{format_count(facts.rounds, 'round')}, {sites_text} received the global model, trained it on their own images and "
            f"returned model updates ({study.strategy}). Images and labels stay at the site that holds them. What "
            f"leaves it is listed under “What left the sites”. Purpose: {PLACEHOLDER}. Legal basis (Art. 6 and 9): {PLACEHOLDER}."
        ),
    )
    yield (
        "(b) Necessity and proportionality",
        (
            f"A model from one site alone would be trained on fewer {facts.subjects_name} and fewer scanners. Sending updates "
            "instead of images discloses less, and the budget of each site limits the total. Why the purpose cannot be reached "
            f"with less, and how long the data are needed: {PLACEHOLDER}. Information of data subjects: {PLACEHOLDER}."
        ),
    )
    yield "(c) Risks to data subjects", " ".join(_risk_sentences(facts))
    yield (
        "(d) Measures",
        " ".join([*_measure_sentences(facts), f"Other measures, residual risk and its acceptance: {PLACEHOLDER}."]),
    )


def _risk_sentences(facts: AuditFacts) -> Iterator[str]:
    spent = facts.spent
    yield (
        "From updates or models, someone may find out that a person was in the training data (membership), what a person's "
        "image shows (reconstruction), or something about a person that the model has learned about similar people."
    )
    if spent and spent.factor > 1:
        yield (
            f"For the first two, the odds change by at most a factor of {format_factor(spent.factor)} (epsilon {format_epsilon(spent.epsilon)}, delta "
            f"{spent.delta:g}); a belief of {format_share(spent.prior)} rises to at most {format_share(spent.belief)}."
        )
    else:
        yield "No bound limits the first two."
    yield from attack_sentences(facts)
    if unprotected := [row.content for row in facts.disclosures if row.kind == "profile" or split_of(row)]:
        yield f"Unprotected: {'; '.join(unprotected)}."


def _measure_sentences(facts: AuditFacts) -> Iterator[str]:
    protection = facts.protection
    if protection.dp_sgd:
        budgets = [site_facts.budget.epsilon for site_facts in facts.sites.values() if site_facts.budget]
        yield f"Differential privacy at the site, with the {facts.privacy_unit_name} as unit. {describe_mechanism(facts)}."
        if budgets:
            yield (
                f"Each site's budget (epsilon {format_range(budgets)}) is set by its officer and recorded in a ledger that is "
                "signed, chained, and countersigned by the coordinator before every training; without budget or receipt the "
                "site does not train."
            )
    if client_level_dp := protection.client_level_dp:
        yield (
            f"Differential privacy at the coordinator, with the site as unit: updates are clipped to {client_level_dp.max_update_norm:g} and "
            f"Gaussian noise of {client_level_dp.noise_multiplier:.3g} times this bound is added to their sum. The coordinator must be trusted."
        )
    if secure_aggregation := protection.secure_aggregation:
        yield (
            f"Secure aggregation (Bonawitz et al. 2017): the coordinator can read only sums over at least {secure_aggregation.threshold} of "
            f"{secure_aggregation.num_sampled_clients} sites."
        )
    if not (protection.dp_sgd or protection.client_level_dp or protection.secure_aggregation):
        yield "Images stay at the sites. Nothing else protects what leaves them: neither noise nor masks."
    yield (
        "Withdrawal: a person who withdraws is excluded from all further training and evaluation; released models stay as they "
        "are."
    )


def _processing_record_rows(facts: AuditFacts) -> Iterator[tuple[str, str]]:
    study = facts.study
    yield "(a) Controller", f"Controller, joint controllers, representative, data protection officer: {PLACEHOLDER}."
    yield (
        "(b) Purposes",
        f"Training and evaluation of a classifier of blood cells (study {study.name}, hash {study.hash[:16]}). {PLACEHOLDER}.",
    )
    yield (
        "(c) Data subjects and data",
        (
            f"{facts.subjects_name.capitalize()} whose blood smears were imaged: {_describe_amounts(facts)}. Images of cells, their labels"
            f"{' (' + join_names(study.classes[:12]) + ')' if study.classes else ''}, and a key that says whose image each one is; "
            f"health data in the sense of Art. 9. Further categories: {PLACEHOLDER}."
        ),
    )
    yield (
        "(d) Recipients",
        (
            f"The coordinator of the study ({PLACEHOLDER}) and the other sites ({len(facts.sites) - 1}), who receive model updates or "
            f"models and the figures listed under “What left the sites”; those who receive the model: {PLACEHOLDER}. Images are "
            "not given to anyone."
        ),
    )
    yield (
        "(e) Transfers to third countries",
        f"{PLACEHOLDER} (depends on where the coordinator and the other sites are).",
    )
    yield (
        "(f) Time limits",
        (
            f"Images: {PLACEHOLDER}. The last update that a site sent stays in its outbox until the next one replaces it. The ledger "
            "is kept as long as the data set is used, because what was spent cannot be refunded."
        ),
    )
    yield (
        "(g) Technical and organisational measures",
        " ".join([*_measure_sentences(facts), f"Transport, access, backups: {PLACEHOLDER}."]),
    )


def _describe_amounts(facts: AuditFacts) -> str:
    """The images of each site, or for more than 8 sites the range."""
    images = {
        site: sum(facts.data.num_examples(site, split) for split in ("train", "val", "test"))
        for site in facts.data.examples_by_site
    }
    if not images:
        return PLACEHOLDER
    person = facts.data_subject.unit if facts.data_subject else ""
    num_units: dict[str, int] = {}
    if facts.headline and facts.headline.unit == person:
        num_units = {
            site: site_facts.privacy_plan.num_units
            for site, site_facts in facts.sites.items()
            if site_facts.privacy_plan
        }
    if len(images) > 8:
        return f"{format_range(list(map(float, images.values())), ',.0f')} images per site"
    return "; ".join(
        f"{site} {images[site]:,} images"
        + (f" (training: {format_count(num_units[site], person)})" if site in num_units else "")
        for site in images
    )
