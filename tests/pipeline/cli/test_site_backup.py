"""The commands `hemofed site backup | restore`, `site ledger recover` and `site key new | officer`."""

import json

import pytest

from pipeline.cli.commands.site.backup import (
    backup_command,
    create_key_command,
    recover_ledger_command,
    replace_officer_key_command,
    restore_command,
)
from pipeline.core.errors import KeyFileError, LedgerError, RunFolderError
from pipeline.ops.encrypted_archive import is_encrypted
from privacy.ledger.keys import load_key, public_hex
from privacy.ledger.records import LedgerBudget
from privacy.ledger.signatures import fingerprint_of
from sites.governance.home import SiteHome
from tests.support.hospital import Hospital
from tests.support.ledger_factory import make_charge, make_commitment


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def recover_ledger(hospital, **arguments):
    defaults = {
        "ledger_id": None,
        "last_index": None,
        "last_hash": None,
        "lost_charges": None,
        "lost_epsilon": 0.0,
        "drop_cosigner": False,
        "json": False,
    }
    recover_ledger_command(hospital.path, hospital.folder / "officer.pem", **(defaults | arguments))


def printed_text(capsys):
    """Without line breaks, which depend on the width of the terminal."""
    return " ".join(capsys.readouterr().out.split())


def test_encrypted_backup_is_restored_with_its_passphrase_only(hospital, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "horse")
    backup_command(hospital.path, tmp_path / "copy", True, True)
    backup_info = json.loads(capsys.readouterr().out)
    assert (backup_info["site"], backup_info["encrypted"]) == ("st-anne", True)
    assert is_encrypted(tmp_path / "copy")
    restore_command(tmp_path / "copy", tmp_path / "new", True)
    assert json.loads(capsys.readouterr().out)["kept_ledger"] is False
    assert SiteHome.open(tmp_path / "new").ledger.id == hospital.home.ledger.id
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "cow")
    with pytest.raises(RunFolderError, match="passphrase is wrong") as raised:
        restore_command(tmp_path / "copy", tmp_path / "third", False)
    assert "cow" not in str(raised.value)


def test_new_passphrase_must_be_typed_twice_and_not_be_empty(hospital, tmp_path, monkeypatch):
    monkeypatch.delenv("HEMOFED_PASSPHRASE", raising=False)
    typed = iter(["one", "another", "", "same", "same"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    with pytest.raises(KeyFileError, match="the two passphrases differ"):
        backup_command(hospital.path, tmp_path / "copy", True, False)
    with pytest.raises(KeyFileError, match="is empty and protects nothing"):
        backup_command(hospital.path, tmp_path / "copy", True, False)
    backup_command(hospital.path, tmp_path / "copy", True, False)
    assert is_encrypted(tmp_path / "copy")


def test_unencrypted_backup_warns_and_restore_keeps_a_newer_ledger(hospital, tmp_path, capsys):
    backup_command(hospital.path, tmp_path / "copy", False, False)
    assert "private keys unencrypted" in printed_text(capsys)
    restore_command(tmp_path / "copy", hospital.path, False)
    assert "the existing ledger is newer and is kept" in printed_text(capsys)
    with pytest.raises(RunFolderError, match="does not exist; name a file that"):
        restore_command(tmp_path / "none", hospital.path, False)


def test_ledger_recover_estimates_lost_charges(hospital, capsys):
    ledger = hospital.home.ledger
    ledger.append(make_commitment())
    ledger.append(make_charge(0, 0.2))
    with pytest.raises(RunFolderError, match="--index and --head go together"):
        recover_ledger(hospital, last_index=3)
    recover_ledger(hospital, ledger_id=ledger.id, last_index=6, last_hash="ab" * 32)
    output = printed_text(capsys)
    assert "missing entries: 6; charges estimated for them: 3; total spent epsilon: " in output
    assert "Approvals are not carried over" in output
    assert hospital.home.ledger.state.opening.previous_ledger.index == 6
    recover_ledger(hospital, lost_charges=0, json=True)
    assert json.loads(capsys.readouterr().out)["reckoned"] == 0


def test_key_officer_replaces_the_officer_key(hospital, tmp_path, capsys):
    old_path, new_path = tmp_path / "officer.pem", tmp_path / "new.pem"
    replace_officer_key_command(hospital.path, old_path, new_path)
    new_public_key = public_hex(load_key(new_path))
    assert fingerprint_of(new_public_key) in capsys.readouterr().out
    ledger = hospital.home.ledger
    assert ledger.state.keys.officer_key == new_public_key
    with pytest.raises(LedgerError, match="is decided with key"):
        ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), hospital.officer)
    ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), load_key(new_path))
    with pytest.raises(LedgerError):  # the old key is no longer accepted
        replace_officer_key_command(hospital.path, old_path, tmp_path / "newer.pem")
    assert not (tmp_path / "newer.pem").exists()


def test_key_new_encrypts_and_never_overwrites(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "horse")
    create_key_command(tmp_path / "k.pem", True, True)
    assert json.loads(capsys.readouterr().out)["public"] == public_hex(load_key(tmp_path / "k.pem", "horse"))
    assert (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyFileError, match="not overwritten"):
        create_key_command(tmp_path / "k.pem", False, False)
