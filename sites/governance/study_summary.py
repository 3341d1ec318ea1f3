"""An offered study in plain words, for an officer who knows medicine and law and no machine learning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from pipeline.aggregation.client_sampling import num_sampled_clients
from pipeline.study.offer import StudyOffer
from pipeline.study.privacy import PrivacyConfig
from pipeline.study.schema import Study
from privacy.ledger.signatures import fingerprint_of
from sites.governance.disclosures import Disclosure, describe_coordinator_view, list_disclosures
from sites.governance.home import SiteHome
from sites.governance.offers import find_incompatibility, offered_study, requested_epsilon, site_name

NEVER_LEAVES_TEXT = (
    "Images, names, labels of single images, files and this site's memory of a run never leave this machine, and nor does "
    "a model that is trained for this site alone."
)
STRATEGY_DESCRIPTIONS = {
    "fedavg": "every site trains the common model on its own images, and the coordinator averages what they changed",
    "fedprox": "as plain averaging, but sites are held near the common model, and may do part of the work",
    "fedpaq": "as plain averaging, but what sites changed is rounded before it is sent",
    "fedsgd": "every site says in which direction the common model should move, once over all its images",
    "fedopt": "as plain averaging, with a smoother step at the coordinator",
    "fednova": "as plain averaging, corrected for sites that do more steps than others",
    "scaffold": "as plain averaging, with a correction that is sent along and evens out differences between sites",
    "qfedavg": "as plain averaging, but sites on which the model does badly count more",
    "fedbn": "the common model is averaged, but for the layers that adapt to a site's images, which stay at the site",
    "fedper": "the common model is averaged, but for its last layer, which stays at the site",
    "fedrep": "the common model is averaged, but for its last layer, which stays at the site",
    "finetune": "the common model is averaged; at the end every site trains it on for itself",
    "perfedavg": "the sites look for a common start from which each reaches a model of its own in a few steps",
    "pfedme": "beside the common model every site keeps one of its own, which is drawn towards it",
    "ditto": "beside the common model every site trains one of its own, which stays at the site",
    "ifca": "there are several models; each site trains the one that fits its images best, and says which",
    "cfl": "sites are sorted into groups by how their changes differ, and each group has a model",
    "similarity_clustering": "sites are sorted into groups by how alike their models are, and each group has a model",
    "demlearn": "sites are sorted into a tree of groups by their models, and each group has a model",
    "fedswap": "between averages sites' models are handed on to other sites, which train them further",
    "local_only": "every site trains alone; only scores leave it",
    "centralized": "pools everybody's images in one place: for simulations; no hospital takes part in that",
}


@dataclass(frozen=True)
class StudySummary:
    title: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]  # that an officer must not overlook
    facts: tuple[tuple[str, str], ...]
    disclosures: tuple[Disclosure, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"facts": [list(fact) for fact in self.facts]}


def summarize_study(offer: StudyOffer, home: SiteHome, num_weights: int | None = None) -> StudySummary:
    """`numbers`: of the model, if they are known; they follow from the images' size and the classes."""
    study, site = offered_study(offer), site_name(home)
    study_epsilon, spent_epsilon = requested_epsilon(offer, site), total_spent_epsilon(home)
    return StudySummary(
        f"{study.name}, offered as {offer.run} to {site}",
        (study.description, _privacy_paragraph(study), NEVER_LEAVES_TEXT)
        if study.description
        else (_privacy_paragraph(study), NEVER_LEAVES_TEXT),
        tuple(_iter_warnings(offer, study, home, study_epsilon, spent_epsilon)),
        tuple(_iter_facts(offer, study, home, study_epsilon, spent_epsilon)),
        tuple(list_disclosures(study, num_weights)),
    )


def total_spent_epsilon(home: SiteHome) -> float:
    """Epsilon, over all studies on the data set."""
    from privacy.accounting.privacy_filter import compute_spent
    from privacy.ledger.summary import charge_history, filter_budget, planned_spending

    ledger = home.ledger
    charges = ledger.list_charges()
    if not charges or not ledger.budget.epsilon:  # a budget of nothing is no budget to reckon with
        return charges[-1].total_epsilon if charges else 0.0
    return compute_spent(charge_history(ledger), planned_spending(ledger), filter_budget(ledger)).epsilon


def _privacy_paragraph(study: Study) -> str:
    privacy = study.privacy
    if privacy == PrivacyConfig():
        return (
            "No formal privacy: this study promises patients nothing in numbers. What is sent is no image, but from updates "
            "and models something of single patients may be inferred, by the coordinator and by whoever has the models."
        )
    sentences = []
    if privacy.dp_sgd:
        sentences.append(
            "Before an update leaves, this site limits what each patient can add to it and adds noise. Epsilon bounds what "
            "anybody can learn of one patient from all updates: smaller is safer. It is charged to this site's ledger, "
            "and when the budget is spent, the site stops by itself. Scores are outside of it."
        )
    if privacy.client_level_dp:
        sentences.append(
            "The coordinator adds noise to the sum of updates. That hides a site from those who see the models only, and "
            "nothing from the coordinator."
        )
    if privacy.secure_aggregation:
        sentences.append(
            "Updates are masked, so that the coordinator learns their sum over sites and none by itself. The sum is not "
            "protected, and scores are not masked."
        )
    return " ".join(sentences)


def _iter_facts(
    offer: StudyOffer, study: Study, home: SiteHome, study_epsilon: float | None, spent_epsilon: float
) -> Iterator[tuple[str, str]]:
    ledger_state, site = home.ledger.state, site_name(home)
    yield "Task", _describe_task(study)
    yield "Strategy", f"{study.strategy.name}: {_describe_strategy(study)}"
    num_sampled, num_sites = (
        num_sampled_clients(len(offer.site_keys), study.client_sampling.fraction),
        len(offer.site_keys),
    )
    yield (
        "Rounds",
        f"at most {study.rounds}, in each {'all' if num_sampled == num_sites else num_sampled} of {num_sites} sites",
    )
    yield "The coordinator sees", describe_coordinator_view(offer, study)
    if study.privacy.dp_sgd:
        privacy_unit, delta = ledger_state.opening.privacy_unit, study.privacy.dp_sgd.delta
        unit_text = f"for each {privacy_unit if study.privacy.dp_sgd.privacy_unit == 'auto' else study.privacy.dp_sgd.privacy_unit}, at delta {delta:g}"
        epsilon_text = (
            "follows from the noise that the study names, once data are read"
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
        yield "Left afterwards", f"about {remaining_epsilon:.4g}, if both just add up; the ledger reckons exactly"
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
            f"It asks for epsilon {study_epsilon:g}, and {max(0.0, budget.epsilon - spent_epsilon):.4g} of the budget is left: the site may "
            "have to stop before the end."
        )
    if dp_sgd and dp_sgd.privacy_unit == "example":
        yield "Epsilon is for single images: a patient with many images is promised next to nothing."
    if home.ledger.state.cosigner_key:
        yield f"Two persons must sign: beside the officer the key {fingerprint_of(home.ledger.state.cosigner_key)}."


def _describe_task(study: Study) -> str:
    """What is told apart, as far as the study itself says."""
    source = study.data
    classes = getattr(source, "classes", None)
    classes_text = " and ".join(filter(None, (", ".join(classes) if classes else "", str(getattr(source, "task", "")))))
    positive_text = f"; what matters is {study.evaluation.positive_class}" if study.evaluation.positive_class else ""
    return f"tells images of {source.name} apart: {classes_text or 'classes as in the data'}{positive_text}; model {study.model.name}"


def _describe_strategy(study: Study) -> str:
    """Of a plugin its own first line."""
    strategy = study.strategy
    docstring = (sys.modules[type(strategy).__module__].__doc__ or "a strategy without words of its own").strip()
    return STRATEGY_DESCRIPTIONS.get(strategy.name) or docstring.splitlines()[0]
