"""One entry of a ledger, and how entries chain: head_i = SHA-256(head_{i-1} || digest_i).

`digest_i` is the SHA-256 of all that an entry says, without `hash` and `signature`. Whoever holds only the digests can
recompute every head, and learns nothing else: each entry has a random salt. A line of the file is the entry's
canonical JSON, byte for byte, so there are no two ways to write the same entry.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from pipeline.core.errors import LedgerError
from privacy.ledger.keys import canonical_json, fingerprint, public_bytes, sign
from privacy.ledger.records import RECORD_TYPES, LedgerRecord

GENESIS_HASH = "0" * 64  # the head before the first entry


@dataclass(frozen=True)
class LedgerPosition:
    """Where a ledger stood: the hash of entry `index`."""

    index: int
    head: str


@dataclass(frozen=True)
class OfficerDecision:
    """The officer's signature under a body, made when the ledger's head was `seen`, on whatever machine he keeps it."""

    key_fingerprint: str
    seen_head: str
    signature: str


@dataclass(frozen=True)
class LedgerEntry:
    index: int
    kind: str
    time: str  # UTC
    salt: str
    body: Mapping[str, Any]
    previous_hash: str
    key_fingerprint: str  # fingerprint of who wrote it
    officer_decision: OfficerDecision | None
    hash: str = ""
    signature: str = ""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(
            canonical_json({k: v for k, v in self.to_dict().items() if k not in UNHASHED_FIELDS})
        ).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ENTRY_FIELDS} | {
            "officer_decision": self.officer_decision and asdict(self.officer_decision)
        }

    def to_line(self) -> bytes:
        return canonical_json(self.to_dict()) + b"\n"

    @cached_property
    def record(self) -> LedgerRecord:
        """The body as its kind's class."""
        if self.kind not in RECORD_TYPES:
            raise LedgerError(
                f"`{self.kind}` is no kind of entry that this version knows; kinds: {', '.join(RECORD_TYPES)}"
            )
        try:
            return RECORD_TYPES[self.kind].model_validate_json(canonical_json(self.body))
        except ValidationError as error:
            first_error = error.errors()[0]
            location = ".".join(map(str, first_error["loc"])) or "body"
            raise LedgerError(f"its `{self.kind}` is not as it should be: {location}: {first_error['msg']}") from error


ENTRY_FIELDS = tuple(LedgerEntry.__dataclass_fields__)
UNHASHED_FIELDS = ("hash", "signature")


def chain_hash(previous_hash: str, digest: str) -> str:
    return hashlib.sha256(bytes.fromhex(previous_hash) + bytes.fromhex(digest)).hexdigest()


def sign_entry(
    record: LedgerRecord,
    previous_entries: Sequence[LedgerEntry],
    key: Ed25519PrivateKey,
    officer_decision: OfficerDecision | None,
    now: datetime,
) -> LedgerEntry:
    """The entry that comes after those `before`, signed."""
    previous_hash = previous_entries[-1].hash if previous_entries else GENESIS_HASH
    body = record.model_dump(mode="json")
    time, salt = now.isoformat(timespec="milliseconds"), secrets.token_hex(16)
    unsealed = LedgerEntry(
        index=len(previous_entries),
        kind=record.kind,
        time=time,
        salt=salt,
        body=body,
        previous_hash=previous_hash,
        key_fingerprint=fingerprint(public_bytes(key)),
        officer_decision=officer_decision,
    )
    hashed = replace(unsealed, hash=chain_hash(previous_hash, unsealed.digest))
    return replace(hashed, signature=sign(key, "entry", hashed.hash))


def sign_decision(
    key: Ed25519PrivateKey, record: LedgerRecord, ledger_id: str = GENESIS_HASH, seen_head: str = GENESIS_HASH
) -> OfficerDecision:
    """`ledger` is the hash of its first entry and `seen` its head; there is neither yet when it is opened."""
    payload = decision_payload(record.kind, record.model_dump(mode="json"), ledger_id, seen_head)
    return OfficerDecision(fingerprint(public_bytes(key)), seen_head, sign(key, "decision", payload))


def decision_payload(kind: str, body: Mapping[str, Any], ledger_id: str, seen_head: str) -> dict[str, Any]:
    """What an officer's signature is under. Bound to one ledger and to all that he knew when he signed."""
    return {"kind": kind, "body": body, "ledger": ledger_id, "seen": seen_head}


def parse_entry_line(line: bytes) -> LedgerEntry:
    """Of a line without its end."""
    return parse_entry(parse_strict_json(line), line)


def parse_entry(raw: Any, line: bytes | None = None) -> LedgerEntry:
    if not isinstance(raw, Mapping) or set(raw) != set(ENTRY_FIELDS):
        raise LedgerError("it is no entry: fields are missing or unknown")
    all_strings = all(
        isinstance(raw[name], str) for name in ENTRY_FIELDS if name not in ("index", "body", "officer_decision")
    )
    if not all_strings or type(raw["index"]) is not int or not isinstance(raw["body"], dict):
        raise LedgerError("it is no entry: a field is of another type than it should be")
    try:
        if datetime.fromisoformat(raw["time"]).utcoffset() != timedelta(0):
            raise ValueError(raw["time"])
        chain_hash(raw["previous_hash"], raw["hash"])
        officer_decision = None if raw["officer_decision"] is None else OfficerDecision(**raw["officer_decision"])
        if officer_decision and not all(isinstance(part, str) for part in astuple(officer_decision)):
            raise TypeError(officer_decision)
        canonical_line = canonical_json(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise LedgerError("it is no entry: a time, a hash, a number or the officer's part cannot be read") from error
    if line not in (None, canonical_line):
        raise LedgerError("it is not spelt the one way an entry is spelt; it was edited")
    return LedgerEntry(**{**raw, "officer_decision": officer_decision})


def parse_strict_json(text: bytes) -> Any:
    """Refuses what readers of JSON understand differently: keys that stand twice, NaN."""
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise LedgerError("it is no JSON, or names a thing twice") from error


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(result := dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)
