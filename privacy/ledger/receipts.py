"""Receipts at the site: a coordinator countersigns the ledger's head, and training waits for it.

A request sends the digests of the entries since the coordinator's last receipt, from which it recomputes the head
without seeing them. In full it sends only the entries that change keys: they say who may ask, and hold nothing about
patients.
"""

from __future__ import annotations

import json
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import NonNegativeInt, ValidationError

from pipeline.core.errors import LedgerError
from privacy.ledger.keys import public_hex, sign
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import HexDigest, HexSignature, LedgerReceipt, NonEmptyStr, StrictModel
from privacy.ledger.signatures import KEY_CHANGE_KINDS, fingerprint_of
from privacy.ledger.validation import receipt_problems


class ReceiptRequest(StrictModel):
    """Digests of the entries `since` ... `index`, and in full, as lines, those of them that change keys."""

    site: NonEmptyStr
    dataset_id: NonEmptyStr
    ledger_id: HexDigest  # hash of its first entry
    since_index: NonNegativeInt
    index: NonNegativeInt
    head: HexDigest
    digests: tuple[HexDigest, ...]
    key_change_lines: tuple[str, ...]
    agent_fingerprint: NonEmptyStr  # the agent's fingerprint
    signature: HexSignature

    def signed_content(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"signature"})


def create_receipt_request(
    ledger: Ledger, key: Ed25519PrivateKey, coordinator_key: str, since_index: int | None = None
) -> ReceiptRequest:
    """For the ledger's head, since the last receipt of this coordinator (its public key), or since an entry it asks for."""
    if since_index is None:
        since_index = 1 + max(
            (r.index for r in ledger.state.receipts if r.coordinator_key == coordinator_key), default=-1
        )
    unsigned = ReceiptRequest(
        site=ledger.state.opening.site,
        dataset_id=ledger.state.opening.dataset_id,
        ledger_id=ledger.id,
        since_index=since_index,
        index=ledger.last_index,
        head=ledger.head,
        digests=tuple(ledger.digests(since_index)),
        key_change_lines=tuple(
            e.to_line().decode().strip() for e in ledger.entries()[since_index:] if e.kind in KEY_CHANGE_KINDS
        ),
        agent_fingerprint=fingerprint_of(public_hex(key)),
        signature="0" * 128,
    )
    return unsigned.model_copy(update={"signature": sign(key, "request", unsigned.signed_content())})


def check_receipt(receipt: LedgerReceipt, ledger: Ledger, coordinator_key: str) -> None:
    """At the site, before the receipt is appended."""
    if receipt.coordinator_key != coordinator_key:
        raise LedgerError(
            f"the receipt is by {fingerprint_of(receipt.coordinator_key)}, and the coordinator's key is {fingerprint_of(coordinator_key)}"
        )
    if problems := list(receipt_problems(ledger.state.opening, ledger.entries(), receipt)):
        raise LedgerError(f"the coordinator's receipt is not for {ledger.path}: {'; '.join(problems)}; ask for another")


def read_receipt(reply: str) -> LedgerReceipt:
    try:
        content = json.loads(reply)
        if "refused" in content:
            raise LedgerError(f"the coordinator refuses its receipt: {content['refused']}")
        return LedgerReceipt.model_validate_json(json.dumps(content["receipt"]))
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise LedgerError("the coordinator's answer is no receipt; is it of the same version?") from error
