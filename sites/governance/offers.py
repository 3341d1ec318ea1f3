"""What is offered to a site: the files in HOME/offers, the study in each, and whether it could be run here at all."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from pipeline.core.errors import BadMessage, BadRun, BadStudy
from pipeline.study.offer import Offer, read_offer
from pipeline.study.schema import Study
from pipeline.study.toml_file import read_study
from privacy.ledger.signatures import show
from sites.governance.home import Home


def offers_in(home: Path) -> list[Offer]:
    """The newest last. A file that is no offer is named, not passed over: somebody may wait for it."""
    found = []
    for file in sorted((home / "offers").glob("*.json"), key=lambda f: (f.stat().st_mtime, f.name)):
        try:
            found.append(read_offer(file.read_bytes()))
        except BadMessage as error:
            raise BadMessage(f"{file}: {error}; remove it, and the coordinator offers it again") from error
    return found


def offered(home: Path, what: str) -> Offer:
    """By run, or by digest or its beginning. Of a run that was offered twice the newest."""
    every = offers_in(home)
    fitting = [o for o in every if o.run == what or (len(what) >= 8 and o.digest.startswith(what))]
    if not fitting:
        known = ", ".join(dict.fromkeys(o.run for o in every)) or "nothing yet"
        raise BadRun(f"{home}: {what!r} is not offered here; offered: {known}")
    return fitting[-1]


def unfit(home: Home, offer: Offer) -> str | None:
    """Why this offer could not be taken part in here, whoever approved it."""
    site, own = site_of(home), installed("hemofed")
    if site not in offer.sites:
        return f"{offer.run} is not for {site}: it names {', '.join(offer.sites)}"
    if offer.sites[site] != home.ledger.standing.keys.agent:
        return f"{offer.run} knows {site} by another key; the coordinator must offer it again with the key of today"
    if (known := coordinator_of(home.path)) is None:
        return "this site belongs to no coordinator; join one with `hemofed site join`"
    if offer.coordinator != known:
        return f"{offer.run} is offered by {show(offer.coordinator)}, and this site's coordinator is {show(known)}"
    if offer.version != own:
        return f"{offer.run} needs hemofed {offer.version}, and here is {own}; install that version, or have it offered anew"
    if _plan(offer.study, f"the study of {offer.run}") != offer.plan:
        return f"{offer.run}: the plan's hash is not that of the study; another plugin is installed here, or it was altered"
    return None


def epsilon_asked(offer: Offer, site: str) -> float | None:
    """By this study of each of the site's patients; none where noise is named instead, or nothing is promised."""
    asked = study_of(offer).privacy.at_site
    if asked is None:
        return None
    if not isinstance(asked.epsilon, tuple):
        return asked.epsilon
    if len(asked.epsilon) != len(offer.sites):
        raise BadStudy(
            f"{offer.run} names {len(asked.epsilon)} epsilons for {len(offer.sites)} sites; give one, or one each"
        )
    return asked.epsilon[list(offer.sites).index(site)]


def site_of(home: Home) -> str:
    return home.ledger.standing.opening.site


def study_of(offer: Offer) -> Study:
    return _study(offer.study, f"the study of {offer.run}")


# before every message: what is installed does not change while a process runs
installed = cache(version)


@lru_cache(32)
def _plan(text: str, source: str) -> str:
    return _study(text, source).hash


@lru_cache(32)
def _study(text: str, source: str) -> Study:
    return read_study(text, source, {})


def coordinator_of(home: Path) -> str | None:
    """Its public key, from when the site joined."""
    file = home / "membership.json"
    try:
        return str(json.loads(file.read_text("utf-8"))["coordinator"]["key"]) if file.exists() else None
    except (ValueError, KeyError, TypeError) as error:
        raise BadRun(f"{file} is damaged; restore it from a backup, or join again with `hemofed site join`") from error
