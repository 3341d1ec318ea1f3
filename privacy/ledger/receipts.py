"""Receipts at the site: the coordinator countersigns the ledger's head before the site trains.

A request holds the digests of the entries since the coordinator's last receipt; the coordinator recomputes the head
from them without seeing the entries. Only entries that change keys are sent in full: they show whose signature a
request needs, and contain nothing about patients.
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
    """Digests of the entries `since_index` to `index`, and the full lines of those that change keys."""

    site: NonEmptyStr
    dataset_id: NonEmptyStr
    ledger_id: HexDigest  # hash of the first entry
    since_index: NonNegativeInt
    index: NonNegativeInt
    head: HexDigest
    digests: tuple[HexDigest, ...]
    key_change_lines: tuple[str, ...]
    agent_fingerprint: NonEmptyStr
    signature: HexSignature

    def signed_content(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude={"signature"})


def create_receipt_request(
    ledger: Ledger, key: Ed25519PrivateKey, coordinator_key: str, since_index: int | None = None
) -> ReceiptRequest:
    """For the ledger's head.

    `coordinator_key`: public key. `since_index`: by default the entry after this coordinator's last receipt.
    """
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
    """Raises unless the receipt is valid for this ledger; the site calls it before it appends the receipt."""
    if receipt.coordinator_key != coordinator_key:
        raise LedgerError(
            f"the receipt is by {fingerprint_of(receipt.coordinator_key)}, and the coordinator's key is "
            f"{fingerprint_of(coordinator_key)}"
        )
    if problems := list(receipt_problems(ledger.state.opening, ledger.entries(), receipt)):
        raise LedgerError(f"the coordinator's receipt is not for {ledger.path}: {'; '.join(problems)}; request another")


def read_receipt(reply: str) -> LedgerReceipt:
    try:
        content = json.loads(reply)
        if "refused" in content:
            raise LedgerError(f"the coordinator refuses its receipt: {content['refused']}")
        return LedgerReceipt.model_validate_json(json.dumps(content["receipt"]))
    except (ValueError, KeyError, TypeError, ValidationError) as error:
        raise LedgerError("the coordinator's reply is not a receipt; is it of the same version?") from error
