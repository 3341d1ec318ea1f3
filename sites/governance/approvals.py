"""What an officer has allowed: approvals of offers in the site's ledger, their end, and whether one stands now.

An approval names all that it was given for: the offer (the study, its plan's hash, every site's key, the coordinator's
key, the version), the data set, the budget, the epsilon asked, and when it ends. If anything of that is different now,
it does not stand. The officer signs it, with a second person where the ledger's `policy` says so. To withdraw is easier
than to approve: the agent's key is enough, for it can only make the site do less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import AwareDatetime, ValidationError

from pipeline.core.errors import BadRun, HemofedError, Refused
from pipeline.study.offer import Offer
from privacy.ledger.entry import Entry
from privacy.ledger.keys import canonical
from privacy.ledger.ledger import Ledger, utc_now
from privacy.ledger.records import Approve, Budget, Commit, Digest, Strict, Text, Withdraw
from privacy.ledger.signatures import consent, show
from sites.governance.home import Home
from sites.governance.offers import epsilon_asked, site_of, unfit

State = Literal["approved", "pending", "expired", "withdrawn", "refused"]
ROUNDING = 1e-3  # of an epsilon that was solved for
LOOK = "let the officer look at it: `hemofed site approve`"
AGAIN = LOOK.replace("it:", "it again:")


class Terms(Strict):
    """What was approved, as it stands in the ledger."""

    offer: Digest
    run: Text
    dataset_id: Text
    budget: Budget  # as it was
    asked: float | None  # epsilon of this study at this site; none if it follows from noise, or there is none
    sites: dict[Text, Text]  # fingerprints
    coordinator: Text  # likewise
    version: Text
    expires: AwareDatetime


@dataclass(frozen=True)
class Verdict:
    state: State
    reason: str = ""  # with the cure, unless approved
    terms: Terms | None = None

    @property
    def ok(self) -> bool:
        return self.state == "approved"


@dataclass(frozen=True)
class Given:
    """An approval in the ledger, and what withdrew it."""

    entry: Entry
    body: Approve
    terms: Terms
    withdrawn: Entry | None


def approve(
    home: Home,
    offer: Offer,
    officer: Ed25519PrivateKey,
    expires: datetime,
    second: Ed25519PrivateKey | None = None,
    now: datetime | None = None,
) -> Entry:
    """Signed by the officer, and by the second person if the site's policy names one."""
    home.ledger.refresh()
    if (why := unfit(home, offer)) is not None:
        raise Refused(f"{offer.run} cannot be approved: {why}")
    if expires <= (now or utc_now()):
        raise Refused(f"an approval that ends at {expires:%Y-%m-%d %H:%M} would never stand; let it end later")
    ledger = home.ledger
    terms = Terms(
        offer=offer.digest,
        run=offer.run,
        dataset_id=ledger.standing.opening.dataset_id,
        budget=ledger.budget,
        asked=epsilon_asked(offer, site_of(home)),
        sites={name: show(key) for name, key in offer.sites.items()},
        coordinator=show(offer.coordinator),
        version=offer.version,
        expires=expires.astimezone(UTC).replace(microsecond=0),
    )
    body = Approve(plan=offer.plan, terms=terms.model_dump(mode="json"))
    if second is not None:
        body = body.model_copy(update={"consent": consent(second, body, ledger.id, ledger.head)})
    return ledger.append(body, officer)


def withdraw(home: Home, what: str, officer: Ed25519PrivateKey | None = None, reason: str = "") -> list[Entry]:
    """`what`: a run, or an offer's digest. Without the officer's key the agent's own does. From the next message on."""
    home.ledger.refresh()
    standing_ones = [given for given in approvals(home.ledger) if given.withdrawn is None]
    named = {g.terms.offer: g for g in standing_ones if what in (g.terms.run, g.terms.offer)}
    if not named:
        known = ", ".join(sorted({g.terms.run for g in standing_ones})) or "none"
        raise BadRun(f"{home.path}: no approval of {what!r} stands; approved runs: {known}")
    return [
        home.ledger.append(
            Withdraw(plan=g.body.plan, terms={"offer": digest, "run": g.terms.run, "reason": reason}), officer
        )
        for digest, g in named.items()
    ]


def standing(home: Home, offer: Offer, now: datetime | None = None) -> Verdict:
    """Whether the offer's approval stands. Sees what other processes have added to the ledger meanwhile."""
    ledger = home.ledger
    ledger.refresh()
    try:
        why = unfit(home, offer)
    except HemofedError as error:
        why = str(error)
    if why is not None:
        return Verdict("refused", why)
    every = list(approvals(ledger))
    mine = [g for g in every if (g.body.plan, g.terms.offer) == (offer.plan, offer.digest)]
    if not mine:
        changed = any(g.terms.run == offer.run for g in every)
        what = f"has changed since it was approved; {AGAIN}" if changed else f"is not approved; {LOOK}"
        return Verdict("pending", f"{offer.run} {what}")
    last = mine[-1]
    # a clock set back brings nothing to life again: the ledger knows how late it has been
    late = max(now or utc_now(), ledger.standing.time)
    if last.withdrawn is not None:
        return Verdict("withdrawn", f"{offer.run}: the approval was withdrawn at {last.withdrawn.time[:19]}; {AGAIN}")
    if late >= last.terms.expires:
        return Verdict(
            "expired", f"{offer.run}: the approval ended at {last.terms.expires:%Y-%m-%d %H:%M} UTC; {AGAIN}"
        )
    problem = next(_outdated(home, offer, last), None)
    return Verdict("approved", "", last.terms) if problem is None else Verdict("refused", f"{problem}; {AGAIN}")


def _outdated(home: Home, offer: Offer, given: Given) -> Iterator[str]:
    """What is different from when the approval was given."""
    terms, ledger = given.terms, home.ledger
    if terms.dataset_id != (now := ledger.standing.opening.dataset_id):
        yield f"{offer.run} was approved for the data set {terms.dataset_id}, and this is {now}"
    if ledger.budget.epsilon < terms.budget.epsilon or ledger.budget.delta < terms.budget.delta:
        yield f"the budget is lower than when {offer.run} was approved: epsilon {ledger.budget.epsilon:g}, was {terms.budget.epsilon:g}"
    if terms.sites != {name: show(key) for name, key in offer.sites.items()}:
        yield f"{offer.run}: the sites, or their keys, are others than those approved"
    if terms.coordinator != show(offer.coordinator) or terms.version != offer.version:
        yield f"{offer.run}: the coordinator's key or the version is another than was approved"
    if ledger.standing.second is not None and given.body.consent is None:
        yield f"{offer.run} was approved by one person, and the site's policy has asked for two since"
    made = [e.what for e in ledger.entries(Commit.kind) if isinstance(e.what, Commit) and e.what.plan == offer.digest]
    if terms.asked is not None and (most := max((m.epsilon for m in made), default=0.0)) > terms.asked * (1 + ROUNDING):
        yield f"{offer.run} has committed to epsilon {most:.4g}, and {terms.asked:.4g} was approved"


def approvals(ledger: Ledger) -> Iterator[Given]:
    """All that ever were, in order, as far as they are of this form."""
    place = {entry.hash: entry.index for entry in ledger.entries()}
    ends = [(entry, entry.what) for entry in ledger.entries(Withdraw.kind)]
    for entry in ledger.entries(Approve.kind):
        body = entry.what
        assert isinstance(body, Approve)
        try:
            terms = Terms.model_validate_json(canonical(body.terms))
        except ValidationError:
            continue
        # signed before a withdrawal, it knew nothing of it, even if it was added after it
        seen = place[entry.officer.seen] if entry.officer else -1
        end = next((e for e, w in ends if e.index > seen and isinstance(w, Withdraw) and _covers(w, body, terms)), None)
        yield Given(entry, body, terms, end)


def _covers(end: Withdraw, body: Approve, terms: Terms) -> bool:
    return end.plan == body.plan and end.terms.get("offer") in (None, terms.offer)


def told(ledger: Ledger) -> dict[str, list[dict[str, Any]]]:
    """For the coordinator, of every offer the last word: approved, or withdrawn. Terms stay here."""
    ledger.refresh()
    last = {g.terms.offer: g for g in approvals(ledger)}
    found: dict[str, list[dict[str, Any]]] = {"approvals": [], "withdrawn": []}
    for digest, given in last.items():
        about = {"run": given.terms.run, "offer": digest}
        if given.withdrawn is not None:
            found["withdrawn"].append(about | {"at": given.withdrawn.time})
        elif given.entry.officer is not None:
            until, officer = given.terms.expires.isoformat(), given.entry.officer.key
            found["approvals"].append(about | {"at": given.entry.time, "expires": until, "officer": officer})
    return found
