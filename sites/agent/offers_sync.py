"""What a beat brings: offers go to HOME/offers, where the officer finds them, if they are meant for this site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import version

from pipeline.core.files import write_atomically
from pipeline.study.offer import Offer
from privacy.ledger.signatures import show
from sites.agent.coordinator_client import Heard
from sites.agent.enrolment import Membership
from sites.agent.event_log import Notes
from sites.governance.approvals import approvals, standing
from sites.governance.home import Home

SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class News:
    waiting: tuple[dict[str, str], ...]  # for the officer
    warnings: tuple[str, ...]


def take(home: Home, member: Membership, heard: Heard, here: datetime, notes: Notes) -> News:
    """`here`: this machine's time when it was heard."""
    warnings, waiting = list(_strange(heard, here)), []
    for offer in heard.offers:
        if (why := foreign(home, member, offer)) is not None:
            notes.once(("foreign", offer.digest), f"an offer of {offer.run} is put aside: {why}", "warning")
            continue
        _store(home, offer, notes)
        verdict = standing(home, offer)
        if verdict.state == "refused":
            warnings.append(verdict.reason)
        elif not verdict.ok:
            waiting.append({"run": offer.run, "offer": offer.digest, "state": verdict.state})
            look = f"look at it with `hemofed site approve {home.path} {offer.run}`"
            notes.once(
                ("waiting", offer.digest, verdict.state), f"{offer.run} is offered, approval {verdict.state}; {look}"
            )
    _clear(home, {offer.digest for offer in heard.offers})
    return News(tuple(waiting), tuple(warnings))


def foreign(home: Home, member: Membership, offer: Offer) -> str | None:
    """Why it is not meant for this site, or not from its coordinator."""
    if member.site not in offer.sites:
        return f"it is not for {member.site}"
    if offer.sites[member.site] != home.ledger.standing.keys.agent:
        return (
            f"it knows {member.site} by another key; the lead offers it again once the site has enrolled with this one"
        )
    if offer.coordinator != member.coordinator.key:
        return f"it names the coordinator {show(offer.coordinator)}, and this site's is {show(member.coordinator.key)}"
    return None


def _strange(heard: Heard, here: datetime) -> Iterator[str]:
    if abs(apart := heard.time - here) > SKEW:
        yield (
            f"this machine's clock and the coordinator's are {abs(apart).total_seconds() / 60:.0f} minutes apart; set it "
            "right (NTP), for approvals end by the clock"
        )
    for run, theirs in heard.unread:
        yield f"{run} is offered in a form that hemofed {version('hemofed')} does not know; install hemofed=={theirs}"


def _store(home: Home, offer: Offer, notes: Notes) -> None:
    file = home.path / "offers" / f"{offer.digest}.json"
    if not file.exists():
        write_atomically(file, offer.model_dump_json().encode())
        notes.note("new offer", run=offer.run, offer=offer.digest, version=offer.version)


def _clear(home: Home, offered: set[str]) -> None:
    """What is no longer offered and was never approved goes; a coordinator cannot fill the disk with offers."""
    kept = offered | {given.terms.offer for given in approvals(home.ledger)}
    for file in (home.path / "offers").glob("*.json"):
        if file.stem not in kept:
            file.unlink()
