"""Stores the offers of a heartbeat reply in HOME/offers, if they are addressed to this site."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from importlib.metadata import version

from pipeline.core.files import write_atomically
from pipeline.study.offer import StudyOffer
from privacy.ledger.signatures import fingerprint_of
from sites.agent.coordinator_client import HeartbeatReply
from sites.agent.enrolment import SiteMembership
from sites.agent.event_log import AgentLog
from sites.governance.approvals import check_approval, recorded_approvals
from sites.governance.home import SiteHome

MAX_CLOCK_SKEW = timedelta(minutes=5)


@dataclass(frozen=True)
class OfferSyncResult:
    pending_offers: tuple[dict[str, str], ...]  # for the officer
    warnings: tuple[str, ...]


def sync_offers(
    home: SiteHome, membership: SiteMembership, reply: HeartbeatReply, local_time: datetime, agent_log: AgentLog
) -> OfferSyncResult:
    """`local_time`: of this machine when the reply was sent."""
    warnings, pending_offers = list(_reply_warnings(reply, local_time)), []
    for offer in reply.offers:
        if (problem := find_addressing_problem(home, membership, offer)) is not None:
            agent_log.announce_once(("foreign", offer.digest), f"ignored an offer of {offer.run}: {problem}", "warning")
            continue
        _store_offer(home, offer, agent_log)
        status = check_approval(home, offer)
        if status.state == "refused":
            warnings.append(status.reason)
        elif not status.is_approved:
            pending_offers.append({"run": offer.run, "offer": offer.digest, "state": status.state})
            hint = f"review it with `hemofed site approve {home.path} {offer.run}`"
            agent_log.announce_once(
                ("waiting", offer.digest, status.state), f"{offer.run} is offered, approval {status.state}; {hint}"
            )
    _delete_stale_offers(home, {offer.digest for offer in reply.offers})
    return OfferSyncResult(tuple(pending_offers), tuple(warnings))


def find_addressing_problem(home: SiteHome, membership: SiteMembership, offer: StudyOffer) -> str | None:
    """Why the offer is not for this site or not from its coordinator; None if it is."""
    if membership.site not in offer.site_keys:
        return f"it does not name {membership.site}"
    if offer.site_keys[membership.site] != home.ledger.state.keys.agent_key:
        return f"it has another key of {membership.site}; ask the lead to offer it again after this site has enrolled with its present key"
    if offer.coordinator_key != membership.coordinator.key:
        return f"it names the coordinator {fingerprint_of(offer.coordinator_key)}, and this site's is {fingerprint_of(membership.coordinator.key)}"
    return None


def _reply_warnings(reply: HeartbeatReply, local_time: datetime) -> Iterator[str]:
    if abs(clock_offset := reply.coordinator_time - local_time) > MAX_CLOCK_SKEW:
        yield (
            f"this machine's clock and the coordinator's are {abs(clock_offset).total_seconds() / 60:.0f} minutes apart; set "
            "the clock (NTP), because approvals expire by it"
        )
    for run, required_version in reply.unreadable_offers:
        yield f"hemofed {version('hemofed')} cannot read the offer of {run}; install hemofed=={required_version}"


def _store_offer(home: SiteHome, offer: StudyOffer, agent_log: AgentLog) -> None:
    file = home.path / "offers" / f"{offer.digest}.json"
    if not file.exists():
        write_atomically(file, offer.model_dump_json().encode())
        agent_log.log_event("new offer", run=offer.run, offer=offer.digest, version=offer.version)


def _delete_stale_offers(home: SiteHome, offered_digests: set[str]) -> None:
    """Deletes offers that the coordinator withdrew and the officer never approved, so that offers cannot fill the disk."""
    kept_digests = offered_digests | {approval.terms.offer for approval in recorded_approvals(home.ledger)}
    for file in (home.path / "offers").glob("*.json"):
        if file.stem not in kept_digests:
            file.unlink()
