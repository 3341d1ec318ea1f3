"""The coordinator's side of receipts: it stores the head of every ledger, so that no site can return to an older one.

The coordinator stores one head for each data set of each site. The digests of a request lead from the stored head to
the new one, which is stored first and then signed. The first request for a data set is trusted, unless
`officer_fingerprints` are given. A coordinator that loses this record or restores an old copy would accept an old
ledger: protect the record like the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError

from pipeline.core.errors import LedgerError
from pipeline.core.files import exclusive_lock, write_atomically
from privacy.ledger.entry import GENESIS_HASH, LedgerEntry, LedgerVersionError, chain_hash, parse_entry_line
from privacy.ledger.keys import canonical_json, is_valid_signature, public_hex, sign
from privacy.ledger.ledger import Clock, utc_now
from privacy.ledger.receipts import ReceiptRequest
from privacy.ledger.records import LEDGER_VERSION, LedgerOpened, LedgerReceipt, StrictModel
from privacy.ledger.signatures import KeyHistory, apply_key_change, fingerprint_of, signature_problems


class CountersignedState(StrictModel):
    """The coordinator's stored state of a ledger: the keys in force and the last receipt."""

    version: Literal[2] = LEDGER_VERSION
    keys: KeyHistory
    receipt: LedgerReceipt

    @classmethod
    def load(cls, file: Path) -> CountersignedState:
        data = file.read_bytes()
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            if _is_version_1(data):
                raise LedgerVersionError(
                    f"{file} has format version 1 and this hemofed reads version {LEDGER_VERSION}; move it away, and let "
                    "the site open a new ledger"
                ) from error
            raise LedgerError(f"{file} is damaged; restore its newest copy") from error


def _is_version_1(data: bytes) -> bool:
    """Version 1 had no version field and kept the agent's public keys under `agents`."""
    try:
        return "agents" in json.loads(data)["keys"]
    except (ValueError, KeyError, TypeError):
        return False


class LedgerCountersigner:
    """`officer_fingerprints`: the officer's fingerprint of each site; sites without one are then refused."""

    def __init__(
        self,
        folder: Path,
        key: Ed25519PrivateKey,
        officer_fingerprints: Mapping[str, str] | None = None,
        clock: Clock = utc_now,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._key, self._officer_fingerprints, self._clock = folder, key, officer_fingerprints, clock

    def countersign(self, request: ReceiptRequest) -> LedgerReceipt:
        """Returns the same receipt again for the same head, because a reply may be lost on its way."""
        with exclusive_lock(self.folder, wait=True):
            remembered = self._load_state(request.site, request.dataset_id)
            is_same_ledger = remembered is not None and remembered.keys.ledger_id == request.ledger_id
            if (
                remembered
                and is_same_ledger
                and (request.index, request.head) == (remembered.receipt.index, remembered.receipt.head)
            ):
                _check_request_signature(request, remembered.keys)
                return remembered.receipt
            keys = self._follow_digests(request, remembered if is_same_ledger else None, remembered)
            _check_request_signature(request, keys)
            receipt = self._sign_receipt(request)
            state_json = CountersignedState(keys=keys, receipt=receipt).model_dump_json(indent=1)
            write_atomically(self._state_path(request.site, request.dataset_id), state_json.encode())
            return receipt

    def last_receipt(self, site: str, dataset_id: str) -> LedgerReceipt | None:
        """The anchor with which an audit finds a cut end."""
        remembered = self._load_state(site, dataset_id)
        return remembered.receipt if remembered else None

    def _follow_digests(
        self, request: ReceiptRequest, state: CountersignedState | None, remembered: CountersignedState | None
    ) -> KeyHistory:
        """The keys in force at the new head, if it follows from the stored one."""
        keys, head, next_index = (
            (state.keys, state.receipt.head, state.receipt.index + 1) if state else (None, GENESIS_HASH, 0)
        )
        if request.since_index > next_index and remembered and not state:
            raise _stale_ledger_error(request, remembered)
        if request.since_index > next_index:
            raise LedgerError(
                f"{_ledger_name(request)}: the coordinator needs the digests since entry {next_index}, not {request.since_index}"
            )
        shown_entries = {entry.index: entry for entry in map(_parse_entry_line, request.key_change_lines)}
        for index, digest in enumerate(request.digests[next_index - request.since_index :], start=next_index):
            previous_hash, head = head, chain_hash(head, digest)
            if (entry := shown_entries.get(index)) is not None:
                if (entry.digest, entry.previous_hash, entry.hash) != (digest, previous_hash, head):
                    raise LedgerError(f"{_ledger_name(request)}: entry {index} as shown is not the one in the ledger")
                keys = self._apply_shown_entry(request, keys, entry, remembered)
        if head != request.head or request.since_index + len(request.digests) != request.index + 1:
            raise (
                _stale_ledger_error(request, remembered)
                if remembered
                else LedgerError(f"{_ledger_name(request)}: the digests do not lead to the head")
            )
        if keys is None or keys.ledger_id != request.ledger_id:
            raise LedgerError(f"{_ledger_name(request)}: the first request must show the entry that opens the ledger")
        return keys

    def _apply_shown_entry(
        self,
        request: ReceiptRequest,
        keys: KeyHistory | None,
        entry: LedgerEntry,
        remembered: CountersignedState | None,
    ) -> KeyHistory | None:
        record = entry.record
        problems = list(signature_problems(keys, entry, record))
        if isinstance(record, LedgerOpened):
            if entry.index or (record.site, record.dataset_id) != (request.site, request.dataset_id):
                problems.append(f"opens a ledger for {record.site}, {record.dataset_id}")
            self._check_opening(request, record, remembered)
        if problems:
            raise LedgerError(f"{_ledger_name(request)}: entry {entry.index} {'; '.join(problems)}")
        return apply_key_change(keys, entry, record)

    def _check_opening(
        self, request: ReceiptRequest, opening: LedgerOpened, remembered: CountersignedState | None
    ) -> None:
        """Checks a new ledger: the expected officer, and if there was an earlier ledger, a valid continuation of it."""
        is_expected_officer = self._officer_fingerprints is not None and self._officer_fingerprints.get(
            request.site
        ) == fingerprint_of(opening.officer_key)
        if remembered is None:
            if self._officer_fingerprints is not None and not is_expected_officer:
                raise LedgerError(
                    f"{_ledger_name(request)}: its officer's key is {fingerprint_of(opening.officer_key)}, which is not the expected "
                    "one; compare the fingerprint with the officer by telephone, and record it with `hemofed coordinator "
                    "expect-officer`"
                )
            return
        last_receipt, previous_ledger = remembered.receipt, opening.previous_ledger
        if previous_ledger is None or (previous_ledger.ledger_id, previous_ledger.index, previous_ledger.head) != (
            remembered.keys.ledger_id,
            last_receipt.index,
            last_receipt.head,
        ):
            raise _stale_ledger_error(request, remembered)
        if opening.officer_key != remembered.keys.officer_key and not is_expected_officer:
            raise LedgerError(
                f"{_ledger_name(request)}: the new ledger's officer has key {fingerprint_of(opening.officer_key)}, the old one's "
                f"{fingerprint_of(remembered.keys.officer_key)}; if the old key is lost, compare the new fingerprint with the "
                "officer by telephone, and record it with `hemofed coordinator expect-officer`"
            )

    def _sign_receipt(self, request: ReceiptRequest) -> LedgerReceipt:
        time = self._clock().isoformat(timespec="milliseconds")
        unsigned = LedgerReceipt(
            site=request.site,
            dataset_id=request.dataset_id,
            index=request.index,
            head=request.head,
            time=time,
            coordinator_key=public_hex(self._key),
            signature="0" * 128,
        )
        return unsigned.model_copy(update={"signature": sign(self._key, "receipt", unsigned.signed_content())})

    def _state_path(self, site: str, dataset_id: str) -> Path:
        return self.folder / f"{hashlib.sha256(canonical_json([site, dataset_id])).hexdigest()[:32]}.json"

    def _load_state(self, site: str, dataset_id: str) -> CountersignedState | None:
        file = self._state_path(site, dataset_id)
        return CountersignedState.load(file) if file.exists() else None


def _parse_entry_line(line: str) -> LedgerEntry:
    return parse_entry_line(line.encode())


def _ledger_name(request: ReceiptRequest) -> str:
    return f"{request.site}, {request.dataset_id}"


def _check_request_signature(request: ReceiptRequest, keys: KeyHistory) -> None:
    if keys.is_agent_revoked:
        raise LedgerError(f"{_ledger_name(request)}: the agent's key is revoked; let the officer replace it first")
    if not is_valid_signature(keys.agent_key, "request", request.signed_content(), request.signature):
        raise LedgerError(
            f"{_ledger_name(request)}: the request is not signed by the agent's key {fingerprint_of(keys.agent_key)}, but by "
            f"{request.agent_fingerprint}"
        )


def _stale_ledger_error(request: ReceiptRequest, remembered: CountersignedState) -> LedgerError:
    last_receipt = remembered.receipt
    return LedgerError(
        f"{_ledger_name(request)}: this ledger, at its entry {request.index}, is older than, or another than, the one receipted "
        f"at entry {last_receipt.index}. A restored backup does not refund what was spent: restore the newest copy. If that "
        f"is lost, the officer opens a new ledger that continues ledger {remembered.keys.ledger_id} from entry "
        f"{last_receipt.index}, head {last_receipt.head}"
    )
