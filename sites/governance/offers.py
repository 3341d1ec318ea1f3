"""Offers of studies to a site: the files in HOME/offers, and whether this site can take part."""

from __future__ import annotations

import json
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

from pipeline.core.errors import MessageError, RunFolderError, StudyError
from pipeline.study.offer import StudyOffer, read_offer
from pipeline.study.schema import Study
from pipeline.study.toml_file import parse_study
from privacy.ledger.signatures import fingerprint_of
from sites.governance.home import SiteHome


def list_offers(home: Path) -> list[StudyOffer]:
    """The newest last. A file that cannot be read raises an error, because somebody may wait for that offer."""
    offers = []
    for file in sorted((home / "offers").glob("*.json"), key=lambda f: (f.stat().st_mtime, f.name)):
        try:
            offers.append(read_offer(file.read_bytes()))
        except MessageError as error:
            raise MessageError(f"{file}: {error}; delete it, and the coordinator sends it again") from error
    return offers


def find_offer(home: Path, run_or_digest: str) -> StudyOffer:
    """By run, or by digest (at least 8 digits). The newest if a run was offered twice."""
    offers = list_offers(home)
    matching = [
        o for o in offers if o.run == run_or_digest or (len(run_or_digest) >= 8 and o.digest.startswith(run_or_digest))
    ]
    if not matching:
        offered_runs = ", ".join(dict.fromkeys(o.run for o in offers)) or "nothing yet"
        raise RunFolderError(f"{home}: {run_or_digest!r} is not offered here; offered: {offered_runs}")
    return matching[-1]


def find_incompatibility(home: SiteHome, offer: StudyOffer) -> str | None:
    """Why this site cannot take part, with or without an approval; None if it can."""
    site, own_version = site_name(home), installed_version("hemofed")
    if site not in offer.site_keys:
        return f"{offer.run} is not for {site}: it names {', '.join(offer.site_keys)}"
    if offer.site_keys[site] != home.ledger.state.keys.agent_key:
        return f"{offer.run} has another key of {site}; the coordinator must offer it again with the current key"
    if (own_coordinator_key := load_coordinator_key(home.path)) is None:
        return "this site belongs to no coordinator; join one with `hemofed site join`"
    if offer.coordinator_key != own_coordinator_key:
        return f"{offer.run} is offered by {fingerprint_of(offer.coordinator_key)}, and this site's coordinator is {fingerprint_of(own_coordinator_key)}"
    if offer.version != own_version:
        return f"{offer.run} needs hemofed {offer.version}, and this site has {own_version}; install that version, or ask for a new offer"
    if _study_hash(offer.study_toml, f"the study of {offer.run}") != offer.study_hash:
        return f"{offer.run}: the hash of the study differs; this site has another plugin version, or the offer was altered"
    return None


def requested_epsilon(offer: StudyOffer, site: str) -> float | None:
    """Epsilon of the study at this site; None with a noise multiplier instead, or without differential privacy."""
    dp_sgd = offered_study(offer).privacy.dp_sgd
    if dp_sgd is None:
        return None
    if not isinstance(dp_sgd.epsilon, tuple):
        return dp_sgd.epsilon
    if len(dp_sgd.epsilon) != len(offer.site_keys):
        raise StudyError(
            f"{offer.run} names {len(dp_sgd.epsilon)} epsilons for {len(offer.site_keys)} sites; give one, or one each"
        )
    return dp_sgd.epsilon[list(offer.site_keys).index(site)]


def site_name(home: SiteHome) -> str:
    return home.ledger.state.opening.site


def offered_study(offer: StudyOffer) -> Study:
    return _parse_study(offer.study_toml, f"the study of {offer.run}")


# checked before every message; the installed version does not change while a process runs
installed_version = cache(version)


@lru_cache(32)
def _study_hash(text: str, source: str) -> str:
    return _parse_study(text, source).hash


@lru_cache(32)
def _parse_study(text: str, source: str) -> Study:
    return parse_study(text, source, {})


def load_coordinator_key(home: Path) -> str | None:
    """The coordinator's public key from HOME/membership.json; None before the site has joined."""
    file = home / "membership.json"
    try:
        return str(json.loads(file.read_text("utf-8"))["coordinator"]["key"]) if file.exists() else None
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(
            f"{file} is damaged; restore it from a backup, or join again with `hemofed site join`"
        ) from error
