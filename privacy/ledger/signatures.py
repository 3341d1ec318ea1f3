"""The required signatures of each entry, and the keys in force.

The agent's key signs every entry except a revocation, which the officer's key signs. An officer's decision is an
additional signature on an entry. Entries also change keys: the old key (routine) or the officer (lost) replaces an
agent's key, the old key replaces an officer's. A policy may require a cosigner's consent to approvals. A key that was
replaced never returns, so an old decision cannot be replayed to bring a thief's key back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from privacy.ledger.entry import GENESIS_HASH, LedgerEntry, decision_payload
from privacy.ledger.keys import fingerprint, is_valid_signature, public_hex, sign
from privacy.ledger.records import (
    AgentKeyRevoked,
    AgentKeyRotated,
    CarriedCharges,
    CosignerConsent,
    CosignerPolicy,
    LedgerBudget,
    LedgerOpened,
    LedgerRecord,
    OfficerKeyRotated,
    StudyApproved,
)

OFFICER_DECIDED_RECORDS = (LedgerOpened, CarriedCharges, StudyApproved, LedgerBudget, CosignerPolicy, OfficerKeyRotated)
KEY_CHANGE_KINDS = tuple(r.kind for r in (LedgerOpened, AgentKeyRotated, OfficerKeyRotated, AgentKeyRevoked))


@dataclass(frozen=True)
class KeyHistory:
    ledger_id: str  # hash of the first entry
    agent_keys: tuple[str, ...]  # public keys; the last one is in force
    officer_keys: tuple[str, ...]
    is_agent_revoked: bool = False  # until the agent's key is replaced

    @property
    def agent_key(self) -> str:
        return self.agent_keys[-1]

    @property
    def officer_key(self) -> str:
        return self.officer_keys[-1]


def fingerprint_of(public_key: str) -> str:
    return fingerprint(bytes.fromhex(public_key))


def routine_rotation(keys: KeyHistory, old_key: Ed25519PrivateKey, new_key: Ed25519PrivateKey) -> AgentKeyRotated:
    proof = sign(new_key, "possession", _possession_payload(keys, public_hex(old_key), public_hex(new_key)))
    return AgentKeyRotated(agent_key=public_hex(new_key), reason="routine", possession_proof=proof)


def lost_key_rotation(new_key: Ed25519PrivateKey) -> AgentKeyRotated:
    return AgentKeyRotated(agent_key=public_hex(new_key), reason="lost")


def officer_key_rotation(keys: KeyHistory, new_key: Ed25519PrivateKey) -> OfficerKeyRotated:
    public_key = public_hex(new_key)
    return OfficerKeyRotated(
        officer_key=public_key,
        possession_proof=sign(new_key, "possession", _possession_payload(keys, keys.officer_key, public_key)),
    )


def sign_consent(
    cosigner_key: Ed25519PrivateKey, record: StudyApproved | CosignerPolicy, ledger_id: str, seen_head: str
) -> CosignerConsent:
    """`ledger_id` is the hash of the first entry, `seen_head` the ledger's head."""
    return CosignerConsent(
        seen_head=seen_head, signature=sign(cosigner_key, "decision", _consent_payload(record, ledger_id, seen_head))
    )


def is_consent_valid(cosigner_key: str, record: StudyApproved | CosignerPolicy, ledger_id: str) -> bool:
    consent = record.consent
    return consent is not None and is_valid_signature(
        cosigner_key, "decision", _consent_payload(record, ledger_id, consent.seen_head), consent.signature
    )


def _consent_payload(record: StudyApproved | CosignerPolicy, ledger_id: str, seen_head: str) -> dict[str, Any]:
    """The officer's decision without the consent itself."""
    return decision_payload(record.kind, record.model_dump(mode="json", exclude={"consent"}), ledger_id, seen_head)


def _possession_payload(keys: KeyHistory, old_key: str, new_key: str) -> dict[str, str]:
    return {"ledger_id": keys.ledger_id, "old_key": old_key, "new_key": new_key}


def signature_problems(keys: KeyHistory | None, entry: LedgerEntry, record: LedgerRecord) -> Iterator[str]:
    """Problems with the signatures of an entry while `keys` are in force."""
    if isinstance(record, LedgerOpened):
        keys = KeyHistory(GENESIS_HASH, (record.agent_key,), (record.officer_key,))
    if keys is None:
        return
    role, public_key = _required_signer(keys, record)
    if entry.key_fingerprint != fingerprint_of(public_key):
        yield f"is signed by key {entry.key_fingerprint}, and {role}'s key is {fingerprint_of(public_key)}"
    elif not is_valid_signature(public_key, "entry", entry.hash, entry.signature):
        yield f"the signature of {role} is not valid"
    if entry.officer_decision is not None:
        payload = decision_payload(entry.kind, entry.body, keys.ledger_id, entry.officer_decision.seen_head)
        if entry.officer_decision.key_fingerprint != fingerprint_of(keys.officer_key):
            yield (
                f"is decided with key {entry.officer_decision.key_fingerprint}, and the officer's key is "
                f"{fingerprint_of(keys.officer_key)}"
            )
        elif not is_valid_signature(keys.officer_key, "decision", payload, entry.officer_decision.signature):
            yield "the officer's signature is not valid"
    elif isinstance(record, OFFICER_DECIDED_RECORDS) or (
        isinstance(record, AgentKeyRotated) and record.reason == "lost"
    ):
        yield f"`{entry.kind}` is for the officer to decide, and the officer's signature is missing"
    yield from _key_change_problems(keys, record)


def _required_signer(keys: KeyHistory, record: LedgerRecord) -> tuple[str, str]:
    match record:
        case AgentKeyRevoked():
            return "the officer", keys.officer_key
        case AgentKeyRotated(reason="lost"):
            return "the new agent", record.agent_key
        case _:
            return "the agent", keys.agent_key


def _key_change_problems(keys: KeyHistory, record: LedgerRecord) -> Iterator[str]:
    """Key changes that are not allowed."""
    used_keys = {*keys.agent_keys, *keys.officer_keys}
    match record:
        case LedgerOpened():
            if record.agent_key == record.officer_key:
                yield "the agent and the officer need different keys"
        case AgentKeyRotated(reason="routine"):
            if not is_valid_signature(
                record.agent_key,
                "possession",
                _possession_payload(keys, keys.agent_key, record.agent_key),
                record.possession_proof or "",
            ):
                yield "the agent has not proven possession of its new key"
        case OfficerKeyRotated():
            if not is_valid_signature(
                record.officer_key,
                "possession",
                _possession_payload(keys, keys.officer_key, record.officer_key),
                record.possession_proof,
            ):
                yield "the officer has not proven possession of the new key"
        case AgentKeyRevoked():
            if record.agent_key not in keys.agent_keys:
                yield f"revokes {fingerprint_of(record.agent_key)}, which never was the agent's key"
    if (isinstance(record, AgentKeyRotated) and record.agent_key in used_keys) or (
        isinstance(record, OfficerKeyRotated) and record.officer_key in used_keys
    ):
        yield "rotates to a key that was used before; make a new one"
    if keys.is_agent_revoked and not (
        isinstance(record, AgentKeyRevoked) or (isinstance(record, AgentKeyRotated) and record.reason == "lost")
    ):
        yield "comes after a revocation; the next entry must replace the agent's key, signed by the officer"


def apply_key_change(keys: KeyHistory | None, entry: LedgerEntry, record: LedgerRecord) -> KeyHistory | None:
    match record:
        case LedgerOpened() if keys is None:
            return KeyHistory(entry.hash, (record.agent_key,), (record.officer_key,))
        case AgentKeyRotated() if keys:
            return replace(keys, agent_keys=(*keys.agent_keys, record.agent_key), is_agent_revoked=False)
        case OfficerKeyRotated() if keys:
            return replace(keys, officer_keys=(*keys.officer_keys, record.officer_key))
        case AgentKeyRevoked() if keys:
            return replace(keys, is_agent_revoked=True)
        case _:
            return keys
