"""Opening a ledger: once, by agent and officer, read-only without the key."""

import pytest

from pipeline.core.errors import LedgerError
from privacy.ledger.entry import sign_decision
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.ledger import Ledger
from privacy.ledger.verify import verify_ledger
from tests.support.ledger_factory import DATASET, LedgerParties, assert_refused


@pytest.fixture
def parties(tmp_path):
    return LedgerParties(tmp_path)


def test_ledger_is_opened_once(parties):
    parties.create_ledger()
    before = parties.path.read_bytes()
    with pytest.raises(LedgerError, match="opened once"):
        parties.create_ledger()
    assert parties.path.read_bytes() == before


def test_second_opened_record_is_refused(parties):
    ledger = parties.create_ledger()
    assert_refused(ledger, parties.make_opening(), parties.officer, "opens the ledger a second time")


def test_missing_or_empty_file_is_named(parties):
    with pytest.raises(LedgerError, match=r"ledger\.jsonl cannot be opened: No such file"):
        Ledger.open(parties.path)
    parties.path.touch()
    with pytest.raises(LedgerError, match="holds no entry"):
        Ledger.open(parties.path)
    parties.create_ledger()


def test_ledger_is_read_only_without_the_key(parties):
    parties.create_ledger()
    ledger = Ledger.open(parties.path)
    assert_refused(ledger, DATASET, match="opened to read")
    with pytest.raises(LedgerError, match="is written with key"):
        Ledger.open(parties.path, generate_key())


def test_opening_needs_the_officers_decision(parties):
    opening = parties.make_opening()
    with pytest.raises(LedgerError, match="is decided with key"):
        Ledger.create(parties.path, opening, parties.agent, generate_key())
    same_key = parties.make_opening(officer_key=public_hex(parties.agent))
    with pytest.raises(LedgerError, match="need different keys"):
        Ledger.create(parties.path, same_key, parties.agent, parties.agent)
    with pytest.raises(LedgerError, match="is signed by key"):
        Ledger.create(parties.path, opening, generate_key(), parties.officer)
    Ledger.create(parties.path, opening, parties.agent, sign_decision(parties.officer, opening))
    assert verify_ledger(parties.path).is_valid


def test_other_users_may_not_write_the_file(parties):
    parties.create_ledger()
    assert not parties.path.stat().st_mode & 0o027
