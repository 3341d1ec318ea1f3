"""One entry of a ledger and the hash chain of entries: head_i = SHA-256(head_{i-1} || digest_i).

`digest_i` is the SHA-256 of all fields of an entry except `hash` and `signature`. The digests alone are enough to
recompute every head and reveal nothing else, because each entry has a random salt. A line of the file is the entry's
canonical JSON, byte for byte, so each entry has exactly one spelling.
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
from privacy.ledger.records import LEDGER_VERSION, RECORD_TYPES, LedgerRecord

GENESIS_HASH = "0" * 64  # the head before the first entry


@dataclass(frozen=True)
class LedgerPosition:
    """A position in a ledger: the hash `head` of entry `index`."""

    index: int
    head: str


@dataclass(frozen=True)
class OfficerDecision:
    """The officer's signature under a record, made when `seen_head` was the ledger's head, possibly on another machine."""

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
    key_fingerprint: str  # of the key that signed the entry
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
        """The body, parsed as the class of its kind."""
        if self.kind not in RECORD_TYPES:
            raise LedgerError(
                f"`{self.kind}` is not a record kind of ledger version {LEDGER_VERSION}; kinds: {', '.join(RECORD_TYPES)}"
            )
        try:
            return RECORD_TYPES[self.kind].model_validate_json(canonical_json(self.body))
        except ValidationError as error:
            first_error = error.errors()[0]
            location = ".".join(map(str, first_error["loc"])) or "body"
            raise LedgerError(f"its `{self.kind}` record is not valid: {location}: {first_error['msg']}") from error


ENTRY_FIELDS = tuple(LedgerEntry.__dataclass_fields__)
UNHASHED_FIELDS = ("hash", "signature")
VERSION_1_FIELDS = {"index", "kind", "time", "salt", "body", "before", "key", "officer", "hash", "signature"}


class LedgerVersionError(LedgerError):
    """The ledger has an older format version."""


def chain_hash(previous_hash: str, digest: str) -> str:
    return hashlib.sha256(bytes.fromhex(previous_hash) + bytes.fromhex(digest)).hexdigest()


def sign_entry(
    record: LedgerRecord,
    previous_entries: Sequence[LedgerEntry],
    key: Ed25519PrivateKey,
    officer_decision: OfficerDecision | None,
    now: datetime,
) -> LedgerEntry:
    """The signed entry that follows `previous_entries`."""
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
    """`ledger_id` is the hash of the first entry, `seen_head` the head; keep the defaults to open a new ledger."""
    payload = decision_payload(record.kind, record.model_dump(mode="json"), ledger_id, seen_head)
    return OfficerDecision(fingerprint(public_bytes(key)), seen_head, sign(key, "decision", payload))


def decision_payload(kind: str, body: Mapping[str, Any], ledger_id: str, seen_head: str) -> dict[str, Any]:
    """What the officer signs, bound to one ledger and to its state at the time of signing."""
    return {"kind": kind, "body": body, "ledger_id": ledger_id, "seen_head": seen_head}


def parse_entry_line(line: bytes) -> LedgerEntry:
    """`line` has no line break at its end."""
    return parse_entry(parse_strict_json(line), line)


def parse_entry(raw: Any, line: bytes | None = None) -> LedgerEntry:
    if isinstance(raw, Mapping) and set(raw) == VERSION_1_FIELDS:
        raise LedgerVersionError(
            f"the ledger has format version 1 and this hemofed reads version {LEDGER_VERSION}; let the officer open a new "
            "ledger with the budget that is left"
        )
    if not isinstance(raw, Mapping) or set(raw) != set(ENTRY_FIELDS):
        raise LedgerError("it is not an entry: fields are missing or unknown")
    all_strings = all(
        isinstance(raw[name], str) for name in ENTRY_FIELDS if name not in ("index", "body", "officer_decision")
    )
    if not all_strings or type(raw["index"]) is not int or not isinstance(raw["body"], dict):
        raise LedgerError("it is not an entry: a field has the wrong type")
    try:
        if datetime.fromisoformat(raw["time"]).utcoffset() != timedelta(0):
            raise ValueError(raw["time"])
        chain_hash(raw["previous_hash"], raw["hash"])
        officer_decision = None if raw["officer_decision"] is None else OfficerDecision(**raw["officer_decision"])
        if officer_decision and not all(isinstance(part, str) for part in astuple(officer_decision)):
            raise TypeError(officer_decision)
        canonical_line = canonical_json(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise LedgerError(
            "it is not an entry: a time, a hash, a number or the officer's decision cannot be read"
        ) from error
    if line not in (None, canonical_line):
        raise LedgerError("it is not canonical JSON, so it was edited")
    return LedgerEntry(**{**raw, "officer_decision": officer_decision})


def parse_strict_json(text: bytes) -> Any:
    """Refuses what JSON readers interpret differently: duplicate keys and NaN."""
    try:
        return json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=_reject_constant)
    except (ValueError, RecursionError) as error:
        raise LedgerError("it is not JSON, or has a duplicate key") from error


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(result := dict(pairs)) != len(pairs):
        raise ValueError("duplicate key")
    return result


def _reject_constant(constant: str) -> None:
    raise ValueError(constant)
