"""Who must have signed what, and which keys are in force.

The agent's key signs every entry. The officer's word is a decision beside it; only a revocation is written by the
officer himself. Keys change by entries: an agent's by its old key (routine) or by the officer (lost), an officer's by
his old key. A policy may ask for a second person's consent to approvals. No key comes back, so an old decision cannot be used again to bring back a thief.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.ledger.entry import START, Entry, decision_on
from privacy.ledger.keys import fingerprint, public_hex, sign, verified
from privacy.ledger.records import Approve, Body, Budget, Carried, Consent, Officer, Open, Policy, Revoke, Rotate

DECIDED = (Open, Carried, Approve, Budget, Policy, Officer)
CHANGES_KEYS = ("open", "rotate", "officer", "revoke")


@dataclass(frozen=True)
class Keys:
    ledger: str  # hash of its first entry
    agents: tuple[str, ...]  # public keys; the last one is in force
    officers: tuple[str, ...]
    revoked: bool = False  # the agent's; until it is replaced

    @property
    def agent(self) -> str:
        return self.agents[-1]

    @property
    def officer(self) -> str:
        return self.officers[-1]


def show(public: str) -> str:
    return fingerprint(bytes.fromhex(public))


def routine(keys: Keys, old: Ed25519PrivateKey, new: Ed25519PrivateKey) -> Rotate:
    proof = sign(new, "possession", _hand_over(keys, public_hex(old), public_hex(new)))
    return Rotate(agent=public_hex(new), reason="routine", proof=proof)


def lost(new: Ed25519PrivateKey) -> Rotate:
    return Rotate(agent=public_hex(new), reason="lost")


def new_officer(keys: Keys, new: Ed25519PrivateKey) -> Officer:
    public = public_hex(new)
    return Officer(officer=public, proof=sign(new, "possession", _hand_over(keys, keys.officer, public)))


def consent(second: Ed25519PrivateKey, body: Approve | Policy, ledger: str, seen: str) -> Consent:
    """The second person's. `ledger` is the hash of its first entry and `seen` its head."""
    return Consent(seen=seen, signature=sign(second, "decision", _consented(body, ledger, seen)))


def consented(second: str, body: Approve | Policy, ledger: str) -> bool:
    given = body.consent
    return given is not None and verified(second, "decision", _consented(body, ledger, given.seen), given.signature)


def _consented(body: Approve | Policy, ledger: str, seen: str) -> dict[str, Any]:
    """What the officer decides, without the consent itself."""
    return decision_on(body.kind, body.model_dump(mode="json", exclude={"consent"}), ledger, seen)


def _hand_over(keys: Keys, old: str, new: str) -> dict[str, str]:
    return {"ledger": keys.ledger, "from": old, "to": new}


def missing(keys: Keys | None, entry: Entry, body: Body) -> Iterator[str]:
    """What is wrong with the signatures of an entry that comes when `keys` are in force."""
    if isinstance(body, Open):
        keys = Keys(START, (body.agent,), (body.officer,))
    if keys is None:
        return
    role, public = _writer(keys, body)
    if entry.key != show(public):
        yield f"is signed by key {entry.key}, and {role}'s key is {show(public)}"
    elif not verified(public, "entry", entry.hash, entry.signature):
        yield f"the signature of {role} does not fit it"
    if entry.officer is not None:
        said = decision_on(entry.kind, entry.body, keys.ledger, entry.officer.seen)
        if entry.officer.key != show(keys.officer):
            yield f"is decided with key {entry.officer.key}, and the officer's key is {show(keys.officer)}"
        elif not verified(keys.officer, "decision", said, entry.officer.signature):
            yield "the officer's signature does not fit it"
    elif isinstance(body, DECIDED) or (isinstance(body, Rotate) and body.reason == "lost"):
        yield f"`{entry.kind}` is for the officer to decide, and his signature is missing"
    yield from _wrong_change(keys, body)


def _writer(keys: Keys, body: Body) -> tuple[str, str]:
    match body:
        case Revoke():
            return "the officer", keys.officer
        case Rotate(reason="lost"):
            return "the new agent", body.agent
        case _:
            return "the agent", keys.agent


def _wrong_change(keys: Keys, body: Body) -> Iterator[str]:
    """A change of keys that may not be."""
    known = {*keys.agents, *keys.officers}
    match body:
        case Open():
            if body.agent == body.officer:
                yield "the agent and the officer need keys of their own"
        case Rotate(reason="routine"):
            if not verified(body.agent, "possession", _hand_over(keys, keys.agent, body.agent), body.proof or ""):
                yield "the new agent's key is not proven to be in the agent's hands"
        case Officer():
            if not verified(body.officer, "possession", _hand_over(keys, keys.officer, body.officer), body.proof):
                yield "the new officer's key is not proven to be in the officer's hands"
        case Revoke():
            if body.agent not in keys.agents:
                yield f"revokes {show(body.agent)}, which never was the agent's key"
    if (isinstance(body, Rotate) and body.agent in known) or (isinstance(body, Officer) and body.officer in known):
        yield "brings a key into force that was used before; make a new one"
    if keys.revoked and not (isinstance(body, Revoke) or (isinstance(body, Rotate) and body.reason == "lost")):
        yield "comes after a revocation, where only a rotation of the lost key may; the officer signs that"


def after(keys: Keys | None, entry: Entry, body: Body) -> Keys | None:
    match body:
        case Open() if keys is None:
            return Keys(entry.hash, (body.agent,), (body.officer,))
        case Rotate() if keys:
            return replace(keys, agents=(*keys.agents, body.agent), revoked=False)
        case Officer() if keys:
            return replace(keys, officers=(*keys.officers, body.officer))
        case Revoke() if keys:
            return replace(keys, revoked=True)
        case _:
            return keys
