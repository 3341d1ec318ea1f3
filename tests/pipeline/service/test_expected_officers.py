"""A hospital lost its officer's key: the coordinator countersigns the new ledger once it knows the new fingerprint."""

import json
import shutil

import pytest

from pipeline.cli.commands.coordinator import expect_officer_command
from pipeline.core.errors import KeyFileError, LedgerError, ServiceError
from pipeline.service.runtime.receipts import countersign_request
from pipeline.service.storage.backup import backup_home, restore_home
from privacy.ledger.keys import generate_key, public_hex
from privacy.ledger.receipts import create_receipt_request
from privacy.ledger.records import LedgerBudget
from privacy.ledger.signatures import fingerprint_of
from sites.governance.home import SiteHome
from sites.governance.ledger_recovery import recover_ledger

SITE = "st-anne"


@pytest.fixture
def site_path(service, tmp_path):
    """A hospital's home, whose ledger has a receipt of the coordinator."""
    service.enrol_site(SITE)
    SiteHome.create(tmp_path / "site", SITE, "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))
    assert "receipt" in request_receipt(service, tmp_path / "site")
    return tmp_path / "site"


def request_receipt(service, path):
    home = SiteHome.open(path)
    request = create_receipt_request(home.ledger, home.agent_key, public_hex(service.home.signing_key))
    answer = json.loads(countersign_request(service.home.path, SITE, request.model_dump_json()))
    return answer


def continue_ledger(service, path):
    """Opens a new ledger with a new officer's key, after what the coordinator knows of the old one."""
    home, new_officer = SiteHome.open(path), generate_key()
    recover_ledger(path, new_officer, ledger_id=home.ledger.id)
    return fingerprint_of(public_hex(new_officer))


def test_ledger_with_a_new_officer_is_countersigned_after_its_fingerprint_is_recorded(service, site_path, capsys):
    new_fingerprint = continue_ledger(service, site_path)
    refused = request_receipt(service, site_path)["refused"]
    assert f"officer has key {new_fingerprint}" in refused
    assert "hemofed coordinator expect-officer" in refused
    expect_officer_command(service.home.path, SITE, fingerprint_of(public_hex(generate_key())), False)
    assert "refused" in request_receipt(service, site_path)
    expect_officer_command(service.home.path, SITE, f" {new_fingerprint.upper()}\n", False)
    assert f"{SITE}: a new ledger is countersigned if its officer has key {new_fingerprint}" in capsys.readouterr().out
    assert request_receipt(service, site_path)["receipt"]["site"] == SITE
    event = service.store.list_events()[-1]
    assert (event.action, event.details["fingerprint"]) == ("officer's key expected", new_fingerprint)


def test_recorded_fingerprint_holds_for_the_first_contact_too(service, tmp_path):
    service.enrol_site(SITE)
    home = SiteHome.create(tmp_path / "site", SITE, "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))
    expect_officer_command(service.home.path, SITE, fingerprint_of(public_hex(generate_key())), True)
    assert "which is not the expected one" in request_receipt(service, home.path)["refused"]
    expect_officer_command(service.home.path, SITE, fingerprint_of(home.ledger.state.keys.officer_key), True)
    assert "receipt" in request_receipt(service, home.path)


def test_backup_contains_the_fingerprints(service, site_path, tmp_path):
    new_fingerprint = continue_ledger(service, site_path)
    expect_officer_command(service.home.path, SITE, new_fingerprint, True)
    backup_home(service.home.path, tmp_path / "backup.tar", None)
    shutil.rmtree(service.home.path)
    restore_home(tmp_path / "backup.tar", service.home.path)
    assert "receipt" in request_receipt(service, site_path)


def test_wrong_fingerprints_and_sites_are_refused(service, site_path):
    fingerprint = fingerprint_of(public_hex(generate_key()))
    with pytest.raises(KeyFileError, match="is not a fingerprint; have the officer read it out"):
        expect_officer_command(service.home.path, SITE, fingerprint[:-1], False)
    with pytest.raises(ServiceError, match="st-ann is not enrolled; enrolled sites: st-anne"):
        expect_officer_command(service.home.path, "st-ann", fingerprint, False)
    (service.home.path / "officers.json").write_text("[]")
    with pytest.raises(LedgerError, match="is damaged"):
        expect_officer_command(service.home.path, SITE, fingerprint, False)
    assert "is damaged" in request_receipt(service, site_path)["refused"]
