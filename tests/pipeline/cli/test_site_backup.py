"""Backup, restore, continued ledgers and keys, as they are typed."""

import json

import pytest

from pipeline.cli.commands.site.backup import (
    backup_command,
    create_key_command,
    recover_command,
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


def test_there_and_back_under_a_passphrase(hospital, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "horse")
    backup_command(hospital.path, tmp_path / "copy", True, True)
    made = json.loads(capsys.readouterr().out)
    assert (made["site"], made["encrypted"], is_encrypted(tmp_path / "copy")) == ("st-anne", True, True)
    restore_command(tmp_path / "copy", tmp_path / "new", True)
    assert json.loads(capsys.readouterr().out)["kept_ledger"] is False
    assert SiteHome.open(tmp_path / "new").ledger.id == hospital.home.ledger.id
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "cow")
    with pytest.raises(RunFolderError, match="passphrase is wrong") as told:
        restore_command(tmp_path / "copy", tmp_path / "third", False)
    assert "cow" not in str(told.value)


def test_a_passphrase_is_typed_twice(hospital, tmp_path, monkeypatch):
    monkeypatch.delenv("HEMOFED_PASSPHRASE", raising=False)
    typed = iter(["one", "another", "", "same", "same"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    with pytest.raises(KeyFileError, match="differently the second time"):
        backup_command(hospital.path, tmp_path / "copy", True, False)
    with pytest.raises(KeyFileError, match="protects nothing"):
        backup_command(hospital.path, tmp_path / "copy", True, False)
    backup_command(hospital.path, tmp_path / "copy", True, False)
    assert is_encrypted(tmp_path / "copy")


def test_in_the_clear_it_is_said(hospital, tmp_path, capsys):
    backup_command(hospital.path, tmp_path / "copy", False, False)
    assert "private keys in the clear" in " ".join(capsys.readouterr().out.split())
    restore_command(tmp_path / "copy", hospital.path, False)
    assert "is newer, and stays" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RunFolderError, match="there is no backup"):
        restore_command(tmp_path / "none", hospital.path, False)


def test_continuing(hospital, tmp_path, capsys):
    ledger = hospital.home.ledger
    ledger.append(make_commitment())
    ledger.append(make_charge(0, 0.2))
    officer = tmp_path / "officer.pem"
    with pytest.raises(RunFolderError, match="--index and --head go together"):
        recover_command(hospital.path, officer, None, 3, None, None, 0.0, False, False)
    recover_command(hospital.path, officer, ledger.id, 6, "ab" * 32, None, 0.0, False, False)
    out = " ".join(capsys.readouterr().out.split())
    assert "6 entries cannot be read; 3 charges are reckoned for what may be in them; spent in all now epsilon" in out
    assert "Approvals are not carried over" in out
    assert hospital.home.ledger.state.opening.previous_ledger.index == 6
    recover_command(hospital.path, officer, None, None, None, 0, 0.0, False, True)
    assert json.loads(capsys.readouterr().out)["reckoned"] == 0


def test_a_new_officer(hospital, tmp_path, capsys):
    old, new = tmp_path / "officer.pem", tmp_path / "new.pem"
    replace_officer_key_command(hospital.path, old, new)
    public = public_hex(load_key(new))
    assert fingerprint_of(public) in capsys.readouterr().out
    ledger = hospital.home.ledger
    assert ledger.state.keys.officer == public
    with pytest.raises(LedgerError, match="is decided with key"):
        ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), hospital.officer)
    ledger.append(LedgerBudget(epsilon=9.0, delta=1e-5), load_key(new))
    with pytest.raises(LedgerError):  # the old one says nothing more
        replace_officer_key_command(hospital.path, old, tmp_path / "newer.pem")
    assert not (tmp_path / "newer.pem").exists()


def test_a_new_key(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "horse")
    create_key_command(tmp_path / "k.pem", True, True)
    made = json.loads(capsys.readouterr().out)
    assert made["public"] == public_hex(load_key(tmp_path / "k.pem", "horse"))
    assert (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(KeyFileError, match="not overwritten"):
        create_key_command(tmp_path / "k.pem", False, False)
