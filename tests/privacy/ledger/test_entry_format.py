"""Entries on disk: hash chain, signatures, salts, pseudonyms, and the format version."""

import hashlib
import json
import subprocess
from dataclasses import FrozenInstanceError

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from pydantic import ValidationError

from pipeline.core.errors import LedgerError
from privacy.ledger.entry import parse_entry_line
from privacy.ledger.keys import canonical_json
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import LedgerBudget, UnitWithdrawn, pseudonymize_unit
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import DATASET, LedgerParties, create_long_ledger

VERSION_1_NAMES = {"previous_hash": "before", "key_fingerprint": "key", "officer_decision": "officer"}


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def test_entry_line_by_hand(parties):
    """With hashlib, json and openssl alone: head = SHA-256(previous head || digest), and the signature is of the head."""
    ledger = parties.create_ledger()
    entry = ledger.append(DATASET)
    first, second = (json.loads(line) for line in parties.path.read_bytes().splitlines())
    hashed = {key: value for key, value in second.items() if key not in ("hash", "signature")}
    digest = hashlib.sha256(
        json.dumps(hashed, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    ).digest()
    assert second["previous_hash"] == first["hash"]
    assert (
        second["hash"] == hashlib.sha256(bytes.fromhex(first["hash"]) + digest).hexdigest() == ledger.head == entry.hash
    )
    assert ledger.digests(1) == [digest.hex()]
    message, signature, public = (parties.folder / name for name in ("message", "signature", "public.pem"))
    message.write_bytes(b'hemofed/1/entry\n"' + second["hash"].encode() + b'"')
    signature.write_bytes(bytes.fromhex(second["signature"]))
    public.write_bytes(parties.agent.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    result = subprocess.run(
        ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", public, "-rawin", "-in", message, "-sigfile", signature],
        capture_output=True,
        text=True,
    )
    assert "Verified Successfully" in result.stdout, result


def test_reopened_ledger_equals_the_written_one(parties):
    create_long_ledger(parties)
    ledger = parties.open_ledger()
    assert verify_ledger(parties.path).is_valid
    assert ledger.last_index == 30
    assert ledger.budget == LedgerBudget(epsilon=9.0, delta=1e-5)
    assert [c.total_epsilon for c in ledger.list_charges()] == pytest.approx([0.4, 0.7, 1.0, 1.3, 1.6, 1.9, 2.25, 2.5])
    kinds = ["opened", "dataset", "study_approved", "commitment", "charge", "receipt"]
    assert [e.kind for e in ledger.entries()][:6] == kinds
    assert len(ledger.entries("charge")) == 8


def test_file_holds_pseudonyms_instead_of_patient_ids(parties):
    ledger = parties.create_ledger()
    ledger.append(UnitWithdrawn(unit_pseudonym=pseudonymize_unit(b"salt of 16 bytes", "4711")))
    assert b"4711" not in parties.path.read_bytes()
    assert pseudonymize_unit(b"salt of 16 bytes", "4711") != pseudonymize_unit(b"another 16 bytes", "4711")


def test_pseudonym_is_the_hmac_of_rfc_4231():
    assert (
        pseudonymize_unit(b"\x0b" * 20, "Hi There")
        == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"
    )


def test_equal_records_have_different_salts_and_digests(parties):
    """So a coordinator cannot find an entry's contents by trying digests."""
    ledger = parties.create_ledger()
    entries = [ledger.append(DATASET) for _ in range(2)]
    assert entries[0].salt != entries[1].salt
    assert len(bytes.fromhex(entries[0].salt)) == 16
    assert entries[0].digest != entries[1].digest


def test_entry_is_frozen(parties):
    entry = parties.create_ledger().entries()[0]
    with pytest.raises(FrozenInstanceError):
        entry.index = 3
    with pytest.raises(ValidationError):
        entry.record.site = "elsewhere"


def test_ledger_of_format_version_1_is_refused(parties):
    ledger = parties.create_ledger()
    raw = ledger.entries()[0].to_dict()
    assert raw["body"]["version"] == 2
    old_line = canonical_json({VERSION_1_NAMES.get(name, name): value for name, value in raw.items()})
    parties.path.write_bytes(old_line + b"\n")
    message = "the ledger has format version 1 and this hemofed reads version 2; let the officer open a new ledger"
    with pytest.raises(LedgerError, match=message):
        parse_entry_line(old_line)
    for key in (None, parties.agent):
        with pytest.raises(LedgerError, match=rf"ledger\.jsonl: {message} with the budget that is left$"):
            Ledger.open(parties.path, key)
    (problem,) = verify_ledger(parties.path).problems
    assert problem.startswith(message)
    assert parties.path.read_bytes() == old_line + b"\n"
