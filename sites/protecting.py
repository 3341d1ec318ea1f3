"""What a study's `[privacy]` means at one real site: its ledger is asked, its answers are masked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipeline.blueprint import Blueprint
from pipeline.messages import SiteId
from pipeline.offers import Offer
from pipeline.protected import as_committed, masking_of, note_data, promise_for, without_withdrawn
from privacy.bodies import Receipt
from privacy.receipts import Request
from sites.build import Population
from sites.desk import Desk
from sites.guard import Guard
from sites.home import Home
from sites.promises import Promise
from sites.trainers.base import Recipe


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
