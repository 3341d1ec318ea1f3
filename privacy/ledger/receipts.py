"""Receipts at the site: a coordinator countersigns the ledger's head, and training waits for it.

A request sends the digests of the entries since the coordinator's last receipt, from which it recomputes the head
without seeing them. In full it sends only the entries that change keys: they say who may ask, and hold nothing about
patients.
"""

from __future__ import annotations

from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import NonNegativeInt

from pipeline.core.errors import BadLedger
from privacy.ledger.keys import public_hex, sign
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import Digest, Receipt, Signature, Strict, Text
from privacy.ledger.signatures import CHANGES_KEYS, show
from privacy.ledger.validation import bad_receipt


class Request(Strict):
    """Digests of the entries `since` ... `index`, and in full, as lines, those of them that change keys."""

    site: Text
    dataset_id: Text
    ledger: Digest  # hash of its first entry
    since: NonNegativeInt
    index: NonNegativeInt
    head: Digest
    digests: tuple[Digest, ...]
    shown: tuple[str, ...]
    key: Text  # the agent's fingerprint
    signature: Signature

    def statement(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"signature"})


def request(ledger: Ledger, key: Ed25519PrivateKey, coordinator: str, since: int | None = None) -> Request:
    """For the ledger's head, since the last receipt of this coordinator (its public key), or since an entry it asks for."""
    if since is None:
        since = 1 + max((r.index for r in ledger.standing.receipts if r.key == coordinator), default=-1)
    asked = Request(
        site=ledger.standing.opening.site,
        dataset_id=ledger.standing.opening.dataset_id,
        ledger=ledger.id,
        since=since,
        index=ledger.index,
        head=ledger.head,
        digests=tuple(ledger.digests(since)),
        shown=tuple(e.line().decode().strip() for e in ledger.entries()[since:] if e.kind in CHANGES_KEYS),
        key=show(public_hex(key)),
        signature="0" * 128,
    )
    return asked.model_copy(update={"signature": sign(key, "request", asked.statement())})


def check_receipt(receipt: Receipt, ledger: Ledger, coordinator: str) -> None:
    """At the site, before the receipt is appended."""
    if receipt.key != coordinator:
        raise BadLedger(f"the receipt is by {show(receipt.key)}, and the coordinator's key is {show(coordinator)}")
    if wrong := list(bad_receipt(ledger.standing.opening, ledger.entries(), receipt)):
        raise BadLedger(f"the coordinator's receipt is not for {ledger.path}: {'; '.join(wrong)}; ask for another")
