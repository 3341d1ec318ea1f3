"""What a study's `[privacy]` means at one real site: its ledger is asked, its answers are masked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.protocol.messages import SiteId
from pipeline.runs.privacy_setup import as_committed, masking_of, note_data, promise_for, without_withdrawn
from pipeline.study.offer import Offer
from pipeline.study.run_spec import Blueprint
from privacy.ledger.receipts import Request
from privacy.ledger.records import Receipt
from sites.governance.home import Home
from sites.population.simulated_sites import Population
from sites.privacy.budget_guard import Guard
from sites.privacy.plan import Promise
from sites.privacy.secure_agg_client import Desk
from sites.training.base import Recipe


def protected_site(
    path: Path,
    site: SiteId,
    offer: Offer,
    drawn_up: Blueprint,
    people: Population,
    recipe: Recipe,
    countersign: Callable[[Request], Receipt],
) -> tuple[Population, Desk, Promise | None]:
    """A run is a plan of its own: the same study run again is charged again."""
    study, home = drawn_up.study, Home.open(path)
    people = without_withdrawn(people, {site: home})
    note_data(home, people, site)
    asked = study.privacy.at_site
    promise, guard = None, None
    if asked is not None:
        wanted = promise_for(study, asked, people, site, list(offer.sites), drawn_up.turns, recipe)
        promise = as_committed(wanted, home, offer.digest)
        guard = Guard(home, promise, study.name, offer.digest, countersign, offer.coordinator)
    roster = {name: bytes.fromhex(key) for name, key in offer.sites.items()}
    masking = masking_of(study, roster, drawn_up.turns, offer.digest)
    return people, Desk(site, home, guard, masking, study.weighting), promise
