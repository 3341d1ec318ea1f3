"""A summary of an offered study for an officer without knowledge of machine learning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.study.disclosures import Disclosure, list_disclosures
from pipeline.study.offer import StudyOffer
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study
from privacy.ledger.signatures import fingerprint_of
from sites.governance.home import SiteHome
from sites.governance.offers import find_incompatibility, offered_study, requested_epsilon, site_name

NEVER_LEAVES_TEXT = (
    "Images, names, labels of single images, files and this site's stored state of a run never leave this machine. A model "
    "that is trained for this site alone never leaves it either."
)
VISIBILITY_TEXT = {
    "totals": "It needs only sums over sites, but without secure aggregation it receives every site's update and adds them up itself.",
    "groups": "It receives every site's update, and learns the cluster of each site.",
    "each": "It receives, compares and keeps every site's own update.",
}


@dataclass(frozen=True)
class StudySummary:
    title: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]  # shown in red
    facts: tuple[tuple[str, str], ...]
    disclosures: tuple[Disclosure, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"facts": [list(fact) for fact in self.facts]}


def summarize_study(offer: StudyOffer, home: SiteHome, num_weights: int | None = None) -> StudySummary:
    """`num_weights`: of the model; None if unknown, because it depends on the image size and the classes."""
    study, site = offered_study(offer), site_name(home)
    study_epsilon, spent_epsilon = requested_epsilon(offer, site), total_spent_epsilon(home)
    description = (study.description,) if study.description else ()
    return StudySummary(
        title=f"{study.name}, offered as {offer.run} to {site}",
        paragraphs=(*description, _privacy_paragraph(study), NEVER_LEAVES_TEXT),
        warnings=tuple(_iter_warnings(offer, study, home, study_epsilon, spent_epsilon)),
        facts=tuple(_iter_facts(offer, study, home, study_epsilon, spent_epsilon)),
        disclosures=list_disclosures(study, num_weights),
    )


def total_spent_epsilon(home: SiteHome) -> float:
    """Epsilon spent by all studies on the data set."""
    from privacy.accounting.privacy_filter import compute_spent
    from privacy.ledger.spending import charge_history, filter_budget, planned_spending

    ledger = home.ledger
    charges = ledger.list_charges()
    if not charges or not ledger.budget.epsilon:  # the privacy filter needs a positive budget
        return charges[-1].total_epsilon if charges else 0.0
    return compute_spent(charge_history(ledger), planned_spending(ledger), filter_budget(ledger)).epsilon


def _privacy_paragraph(study: Study) -> str:
    privacy = study.privacy
    if privacy == PrivacyConfig():
        return (
            "No formal privacy: this study gives patients no numeric guarantee. No image is sent, but the coordinator, and "
            "everybody who has the models, may infer information on single patients from updates and models."
        )
    sentences = []
    if privacy.dp_sgd:
        sentences.append(
            "Before an update leaves, this site limits the contribution of each patient and adds noise. Epsilon bounds what "
            "anybody can learn about one patient from all updates: smaller is safer. It is charged to this site's ledger, "
            "and when the budget is spent, the site stops by itself. Scores are not covered."
        )
    if privacy.client_level_dp:
        sentences.append(
            "The coordinator adds noise to the sum of updates. That hides the participation of a site from those who see only "
            "the models. It hides nothing from the coordinator."
        )
    if privacy.secure_aggregation:
        sentences.append(
            "Updates are masked: the coordinator learns their sum over sites and no single update. The sum is not "
            "protected, and scores are not masked."
        )
    return " ".join(sentences)


def _iter_facts(
    offer: StudyOffer, study: Study, home: SiteHome, study_epsilon: float | None, spent_epsilon: float
) -> Iterator[tuple[str, str]]:
    ledger_state, site = home.ledger.state, site_name(home)
    yield "Task", _describe_task(study)
    yield "Strategy", f"{study.strategy.name}: {study.strategy.describe_component()}"
    num_sites = len(offer.site_keys)
    num_sampled = num_sampled_clients(num_sites, study.client_sampling.fraction)
    yield (
        "Rounds",
        f"at most {study.rounds}, in each {'all' if num_sampled == num_sites else num_sampled} of {num_sites} sites",
    )
    yield "The coordinator sees", _describe_coordinator_view(offer, study)
    if study.privacy.dp_sgd:
        dp_sgd = study.privacy.dp_sgd
        privacy_unit = ledger_state.opening.privacy_unit if dp_sgd.privacy_unit == "auto" else dp_sgd.privacy_unit
        unit_text = f"for each {privacy_unit}, at delta {dp_sgd.delta:g}"
        epsilon_text = (
            "follows from the study's noise multiplier, once data are read"
            if study_epsilon is None
            else f"{study_epsilon:g}"
        )
        yield "Epsilon asked", f"{epsilon_text}; {unit_text}"
    yield (
        "Epsilon spent so far",
        f"{spent_epsilon:.4g} of a budget of {ledger_state.budget.epsilon:g} at delta {ledger_state.budget.delta:g} per {ledger_state.opening.privacy_unit}",
    )
    if study_epsilon is not None:
        remaining_epsilon = max(0.0, ledger_state.budget.epsilon - spent_epsilon - study_epsilon)
        yield (
            "Left afterwards",
            f"about {remaining_epsilon:.4g}, if both simply add up; the ledger computes the exact value",
        )
    for name, key in offer.site_keys.items():
        yield "This site" if name == site else "Other site", f"{name}, key {fingerprint_of(key)}"
    yield "Coordinator", f"key {fingerprint_of(offer.coordinator_key)}"
    yield "Code", f"hemofed {offer.version}; here {version('hemofed')}"
    yield "Data set", ledger_state.opening.dataset_id
    stored_text = study.strategy.client_state_text
    yield "Stays at this site", "all images" + (f"; {stored_text}" if stored_text != "nothing" else "")
    yield "Offer", offer.digest


def _iter_warnings(
    offer: StudyOffer, study: Study, home: SiteHome, study_epsilon: float | None, spent_epsilon: float
) -> Iterator[str]:
    if incompatibility := find_incompatibility(home, offer):
        yield f"This site will refuse it: {incompatibility}."
    budget, dp_sgd = home.ledger.budget, study.privacy.dp_sgd
    if study_epsilon is not None and spent_epsilon + study_epsilon > budget.epsilon:
        yield (
            f"The study requests epsilon {study_epsilon:g}, and {max(0.0, budget.epsilon - spent_epsilon):.4g} of the budget is left: the site may "
            "have to stop before the end."
        )
    if dp_sgd and dp_sgd.privacy_unit == "example":
        yield "Epsilon is for single images: a patient with many images has almost no protection."
    if home.ledger.state.cosigner_key:
        yield f"Two persons must sign: the officer, and a cosigner with key {fingerprint_of(home.ledger.state.cosigner_key)}."


def _describe_task(study: Study) -> str:
    """The classes and the positive class, as far as the study names them."""
    source = study.data
    classes = getattr(source, "classes", None)
    classes_text = " and ".join(filter(None, (", ".join(classes) if classes else "", str(getattr(source, "task", "")))))
    positive_text = f"; positive class: {study.evaluation.positive_class}" if study.evaluation.positive_class else ""
    return f"classifies images of {source.name}: {classes_text or 'classes as in the data'}{positive_text}; model {study.model.name}"


def _describe_coordinator_view(offer: StudyOffer, study: Study) -> str:
    """Whether the coordinator sees single updates or only their sum."""
    if study.privacy.secure_aggregation:
        from privacy.secure_aggregation.shamir import reconstruction_threshold

        num_sampled = num_sampled_clients(len(offer.site_keys), study.client_sampling.fraction)
        return f"The sum of updates over at least {reconstruction_threshold(num_sampled)} sites, and no single update; scores of every site."
    visibility = (
        "each" if "each" in (study.strategy.visibility, study.aggregation.visibility) else study.strategy.visibility
    )
    return VISIBILITY_TEXT[visibility]
