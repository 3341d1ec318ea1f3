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

from pipeline.core.errors import BadLedger
from privacy.ledger.keys import canonical, fingerprint, public_bytes, sign
from privacy.ledger.records import KINDS, Body

START = "0" * 64  # the head before the first entry


@dataclass(frozen=True)
class Mark:
    """Where a ledger stood: the hash of entry `index`."""

    index: int
    head: str


@dataclass(frozen=True)
class Decision:
    """The officer's signature under a body, made when the ledger's head was `seen`, on whatever machine he keeps it."""

    key: str
    seen: str
    signature: str


@dataclass(frozen=True)
class Entry:
    index: int
    kind: str
    time: str  # UTC
    salt: str
    body: Mapping[str, Any]
    before: str
    key: str  # fingerprint of who wrote it
    officer: Decision | None
    hash: str = ""
    signature: str = ""

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(canonical({k: v for k, v in self.raw().items() if k not in SEALS})).hexdigest()

    def raw(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FIELDS} | {"officer": self.officer and asdict(self.officer)}

    def line(self) -> bytes:
        return canonical(self.raw()) + b"\n"

    @cached_property
    def what(self) -> Body:
        """The body as its kind's class."""
        if self.kind not in KINDS:
            raise BadLedger(f"`{self.kind}` is no kind of entry that this version knows; kinds: {', '.join(KINDS)}")
        try:
            return KINDS[self.kind].model_validate_json(canonical(self.body))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "body"
            raise BadLedger(f"its `{self.kind}` is not as it should be: {where}: {first['msg']}") from error


FIELDS = tuple(Entry.__dataclass_fields__)
SEALS = ("hash", "signature")


def chained(before: str, digest: str) -> str:
    return hashlib.sha256(bytes.fromhex(before) + bytes.fromhex(digest)).hexdigest()


def written(
    body: Body, before: Sequence[Entry], key: Ed25519PrivateKey, officer: Decision | None, now: datetime
) -> Entry:
    """The entry that comes after those `before`, signed."""
    last = before[-1].hash if before else START
    said = body.model_dump(mode="json")
    time, salt = now.isoformat(timespec="milliseconds"), secrets.token_hex(16)
    bare = Entry(len(before), body.kind, time, salt, said, last, fingerprint(public_bytes(key)), officer)
    whole = replace(bare, hash=chained(last, bare.digest))
    return replace(whole, signature=sign(key, "entry", whole.hash))


def decide(key: Ed25519PrivateKey, body: Body, ledger: str = START, seen: str = START) -> Decision:
    """`ledger` is the hash of its first entry and `seen` its head; there is neither yet when it is opened."""
    said = decision_on(body.kind, body.model_dump(mode="json"), ledger, seen)
    return Decision(fingerprint(public_bytes(key)), seen, sign(key, "decision", said))


def decision_on(kind: str, body: Mapping[str, Any], ledger: str, seen: str) -> dict[str, Any]:
    """What an officer's signature is under. Bound to one ledger and to all that he knew when he signed."""
    return {"kind": kind, "body": body, "ledger": ledger, "seen": seen}


def read_line(line: bytes) -> Entry:
    """Of a line without its end."""
    return read_entry(read_json(line), line)


def read_entry(raw: Any, line: bytes | None = None) -> Entry:
    if not isinstance(raw, Mapping) or set(raw) != set(FIELDS):
        raise BadLedger("it is no entry: fields are missing or unknown")
    text = all(isinstance(raw[name], str) for name in FIELDS if name not in ("index", "body", "officer"))
    if not text or type(raw["index"]) is not int or not isinstance(raw["body"], dict):
        raise BadLedger("it is no entry: a field is of another type than it should be")
    try:
        if datetime.fromisoformat(raw["time"]).utcoffset() != timedelta(0):
            raise ValueError(raw["time"])
        chained(raw["before"], raw["hash"])
        officer = None if raw["officer"] is None else Decision(**raw["officer"])
        if officer and not all(isinstance(part, str) for part in astuple(officer)):
            raise TypeError(officer)
        spelt = canonical(raw)
    except (ValueError, TypeError, RecursionError) as error:
        raise BadLedger("it is no entry: a time, a hash, a number or the officer's part cannot be read") from error
    if line not in (None, spelt):
        raise BadLedger("it is not spelt the one way an entry is spelt; it was edited")
    return Entry(**{**raw, "officer": officer})


def read_json(text: bytes) -> Any:
    """Refuses what readers of JSON understand differently: keys that stand twice, NaN."""
    try:
        return json.loads(text, object_pairs_hook=_once, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise BadLedger("it is no JSON, or names a thing twice") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) != len(pairs):
        raise ValueError("a key stands twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(constant)
