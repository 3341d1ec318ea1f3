"""A summary of an offered study for an officer without knowledge of machine learning."""

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
    "Images, names, labels of single images, files and this site's stored state of a run never leave this machine. A model "
    "that is trained for this site alone never leaves it either."
)
STRATEGY_DESCRIPTIONS = {
    "fedavg": "every site trains the global model on its own images, and the coordinator averages the changes",
    "fedprox": "like plain averaging, but sites stay closer to the global model, and may do part of the training",
    "fedpaq": "like plain averaging, but the changes are rounded before they are sent",
    "fedsgd": "every site sends the direction in which the global model should move, computed over all its images",
    "fedopt": "like plain averaging, with a smoother step at the coordinator",
    "fednova": "like plain averaging, corrected for sites that do more steps than others",
    "scaffold": "like plain averaging, with an additional correction for differences between sites",
    "qfedavg": "like plain averaging, but sites where the model performs badly count more",
    "fedbn": "the global model is averaged, except for the layers that adapt to a site's images, which stay at the site",
    "fedper": "the global model is averaged, except for its last layer, which stays at the site",
    "fedrep": "the global model is averaged, except for its last layer, which stays at the site",
    "finetune": "the global model is averaged; at the end every site continues its training for itself",
    "perfedavg": "the sites train a starting point from which each site gets its own model in a few steps",
    "pfedme": "besides the global model every site trains its own model, which stays close to the global one",
    "ditto": "besides the global model every site trains its own model, which stays at the site",
    "ifca": "there are several models; each site trains the one that fits its images best, and reports which",
    "cfl": "sites are clustered by how their changes differ, and each cluster has a model",
    "similarity_clustering": "sites are clustered by how similar their models are, and each cluster has a model",
    "demlearn": "sites are clustered into a tree by their models, and each cluster has a model",
    "fedswap": "between two averages, sites' models go to other sites, which continue their training",
    "local_only": "every site trains alone; only scores leave the site",
    "centralized": "pools the images of all sites: in simulations only, never in hospitals",
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
        disclosures=tuple(list_disclosures(study, num_weights)),
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
    yield "Strategy", f"{study.strategy.name}: {_describe_strategy(study)}"
    num_sites = len(offer.site_keys)
    num_sampled = num_sampled_clients(num_sites, study.client_sampling.fraction)
    yield (
        "Rounds",
        f"at most {study.rounds}, in each {'all' if num_sampled == num_sites else num_sampled} of {num_sites} sites",
    )
    yield "The coordinator sees", describe_coordinator_view(offer, study)
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


def _describe_strategy(study: Study) -> str:
    """For a plugin: the first line of its module's docstring."""
    strategy = study.strategy
    docstring = (sys.modules[type(strategy).__module__].__doc__ or "a strategy without a description").strip()
    return STRATEGY_DESCRIPTIONS.get(strategy.name) or docstring.splitlines()[0]
