"""An offered study in plain words, for an officer who knows medicine and law and no machine learning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from pipeline.aggregation.client_sampling import how_many
from pipeline.study.offer import Offer
from pipeline.study.privacy import Privacy
from pipeline.study.schema import Study
from privacy.ledger.signatures import show
from sites.governance.disclosures import Leaving, leaves, seen
from sites.governance.home import Home
from sites.governance.offers import epsilon_asked, site_of, study_of, unfit

NEVER = (
    "Images, names, labels of single images, files and this site's memory of a run never leave this machine, and nor does "
    "a model that is trained for this site alone."
)
DOES = {
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
    "similarity": "sites are sorted into groups by how alike their models are, and each group has a model",
    "demlearn": "sites are sorted into a tree of groups by their models, and each group has a model",
    "fedswap": "between averages sites' models are handed on to other sites, which train them further",
    "local": "every site trains alone; only scores leave it",
    "central": "pools everybody's images in one place: for simulations; no hospital takes part in that",
}


@dataclass(frozen=True)
class Words:
    title: str
    paragraphs: tuple[str, ...]
    warnings: tuple[str, ...]  # that an officer must not overlook
    facts: tuple[tuple[str, str], ...]
    leaves: tuple[Leaving, ...]

    def dump(self) -> dict[str, Any]:
        return asdict(self) | {"facts": [list(fact) for fact in self.facts]}


def describe(offer: Offer, home: Home, numbers: int | None = None) -> Words:
    """`numbers`: of the model, if they are known; they follow from the images' size and the classes."""
    study, site = study_of(offer), site_of(home)
    asked, spent = epsilon_asked(offer, site), spent_so_far(home)
    return Words(
        f"{study.name}, offered as {offer.run} to {site}",
        (study.about, _privacy(study), NEVER) if study.about else (_privacy(study), NEVER),
        tuple(_warnings(offer, study, home, asked, spent)),
        tuple(_facts(offer, study, home, asked, spent)),
        tuple(leaves(study, numbers)),
    )


def spent_so_far(home: Home) -> float:
    """Epsilon, over all studies on the data set."""
    from privacy.accounting.privacy_filter import spent
    from sites.privacy.budget_guard import allowance, commitments, history

    ledger = home.ledger
    charges = ledger.spent_events()
    if not charges or not ledger.budget.epsilon:  # a budget of nothing is no budget to reckon with
        return charges[-1].epsilon if charges else 0.0
    return spent(history(ledger), commitments(ledger), allowance(ledger)).epsilon


def _privacy(study: Study) -> str:
    p = study.privacy
    if p == Privacy():
        return (
            "No formal privacy: this study promises patients nothing in numbers. What is sent is no image, but from updates "
            "and models something of single patients may be inferred, by the coordinator and by whoever has the models."
        )
    told = []
    if p.at_site:
        told.append(
            "Before an update leaves, this site limits what each patient can add to it and adds noise. Epsilon bounds what "
            "anybody can learn of one patient from all updates: smaller is safer. It is charged to this site's ledger, "
            "and when the budget is spent, the site stops by itself. Scores are outside of it."
        )
    if p.at_coordinator:
        told.append(
            "The coordinator adds noise to the sum of updates. That hides a site from those who see the models only, and "
            "nothing from the coordinator."
        )
    if p.secure_sum:
        told.append(
            "Updates are masked, so that the coordinator learns their sum over sites and none by itself. The sum is not "
            "protected, and scores are not masked."
        )
    return " ".join(told)


def _facts(offer: Offer, study: Study, home: Home, asked: float | None, spent: float) -> Iterator[tuple[str, str]]:
    own, site = home.ledger.standing, site_of(home)
    yield "Task", _task(study)
    yield "Strategy", f"{study.strategy.name}: {_does(study)}"
    m, everybody = how_many(len(offer.sites), study.selection.fraction), len(offer.sites)
    yield "Rounds", f"at most {study.rounds}, in each {'all' if m == everybody else m} of {everybody} sites"
    yield "The coordinator sees", seen(offer, study)
    if study.privacy.at_site:
        unit, delta = own.opening.unit, study.privacy.at_site.delta
        each = f"for each {unit if study.privacy.at_site.unit == 'auto' else study.privacy.at_site.unit}, at delta {delta:g}"
        shown = "follows from the noise that the study names, once data are read" if asked is None else f"{asked:g}"
        yield "Epsilon asked", f"{shown}; {each}"
    yield (
        "Epsilon spent so far",
        f"{spent:.4g} of a budget of {own.budget.epsilon:g} at delta {own.budget.delta:g} per {own.opening.unit}",
    )
    if asked is not None:
        rest = max(0.0, own.budget.epsilon - spent - asked)
        yield "Left afterwards", f"about {rest:.4g}, if both just add up; the ledger reckons exactly"
    for name, key in offer.sites.items():
        yield "This site" if name == site else "Other site", f"{name}, key {show(key)}"
    yield "Coordinator", f"key {show(offer.coordinator)}"
    yield "Code", f"hemofed {offer.version}; here {version('hemofed')}"
    yield "Data set", own.opening.dataset_id
    kept = study.strategy.remembered
    yield "Stays at this site", "all images" + (f"; {kept}" if kept != "nothing" else "")
    yield "Offer", offer.digest


def _warnings(offer: Offer, study: Study, home: Home, asked: float | None, spent: float) -> Iterator[str]:
    if why := unfit(home, offer):
        yield f"This site will refuse it: {why}."
    budget, at_site = home.ledger.budget, study.privacy.at_site
    if asked is not None and spent + asked > budget.epsilon:
        yield (
            f"It asks for epsilon {asked:g}, and {max(0.0, budget.epsilon - spent):.4g} of the budget is left: the site may "
            "have to stop before the end."
        )
    if at_site and at_site.unit == "example":
        yield "Epsilon is for single images: a patient with many images is promised next to nothing."
    if home.ledger.standing.second:
        yield f"Two persons must sign: beside the officer the key {show(home.ledger.standing.second)}."


def _task(study: Study) -> str:
    """What is told apart, as far as the study itself says."""
    source = study.data
    classes = getattr(source, "classes", None)
    what = " and ".join(filter(None, (", ".join(classes) if classes else "", str(getattr(source, "task", "")))))
    positive = f"; what matters is {study.evaluation.positive}" if study.evaluation.positive else ""
    return (
        f"tells images of {source.name} apart: {what or 'classes as in the data'}{positive}; model {study.model.name}"
    )


def _does(study: Study) -> str:
    """Of a plugin its own first line."""
    strategy = study.strategy
    own = (sys.modules[type(strategy).__module__].__doc__ or "a strategy without words of its own").strip()
    return DOES.get(strategy.name) or own.splitlines()[0]
