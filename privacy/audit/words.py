"""The officer's page: what is promised, to whom, and what it means, in plain words. The rest of it: audit_limits.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.reports.words import count_of
from privacy.audit.blocks import Chapter, Tiles, answers, chance, eps, share, times
from privacy.audit.cautions import LOOSE, example_words
from privacy.audit.disclosures import unit_of
from privacy.audit.limits import assumed, besides, kept, left_out, released

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
