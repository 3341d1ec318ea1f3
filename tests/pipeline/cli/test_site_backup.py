"""Backup, restore, continued ledgers and keys, as they are typed."""

import json

import pytest

from pipeline.cli.commands.site.backup import (
    backup_command,
    continue_command,
    new_key_command,
    officer_command,
    restore_command,
)
from pipeline.core.errors import BadKey, BadLedger, BadRun
from pipeline.ops.encrypted_archive import is_sealed
from privacy.ledger.keys import load, public_hex
from privacy.ledger.records import Budget
from privacy.ledger.signatures import show
from sites.governance.home import Home
from tests.support.hospital import Hospital
from tests.support.ledger_factory import charge, commit


@pytest.fixture
def hospital(tmp_path):
    return Hospital(tmp_path)


def test_there_and_back_under_a_passphrase(hospital, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "horse")
    backup_command(hospital.path, tmp_path / "copy", True, True)
    made = json.loads(capsys.readouterr().out)
    assert (made["site"], made["encrypted"], is_sealed(tmp_path / "copy")) == ("st-anne", True, True)
    restore_command(tmp_path / "copy", tmp_path / "new", True)
    assert json.loads(capsys.readouterr().out)["kept_ledger"] is False
    assert Home.open(tmp_path / "new").ledger.id == hospital.home.ledger.id
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "cow")
    with pytest.raises(BadRun, match="passphrase is wrong") as told:
        restore_command(tmp_path / "copy", tmp_path / "third", False)
    assert "cow" not in str(told.value)


def test_a_passphrase_is_typed_twice(hospital, tmp_path, monkeypatch):
    monkeypatch.delenv("HEMOFED_PASSPHRASE", raising=False)
    typed = iter(["one", "another", "", "same", "same"])
    monkeypatch.setattr("getpass.getpass", lambda prompt: next(typed))
    with pytest.raises(BadKey, match="differently the second time"):
        backup_command(hospital.path, tmp_path / "copy", True, False)
    with pytest.raises(BadKey, match="protects nothing"):
        backup_command(hospital.path, tmp_path / "copy", True, False)
    backup_command(hospital.path, tmp_path / "copy", True, False)
    assert is_sealed(tmp_path / "copy")


def test_in_the_clear_it_is_said(hospital, tmp_path, capsys):
    backup_command(hospital.path, tmp_path / "copy", False, False)
    assert "private keys in the clear" in " ".join(capsys.readouterr().out.split())
    restore_command(tmp_path / "copy", hospital.path, False)
    assert "is newer, and stays" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(BadRun, match="there is no backup"):
        restore_command(tmp_path / "none", hospital.path, False)


def test_continuing(hospital, tmp_path, capsys):
    ledger = hospital.home.ledger
    ledger.append(commit())
    ledger.append(charge(0, 0.2))
    officer = tmp_path / "officer.pem"
    with pytest.raises(BadRun, match="--index and --head go together"):
        continue_command(hospital.path, officer, None, 3, None, None, 0.0, False, False)
    continue_command(hospital.path, officer, ledger.id, 6, "ab" * 32, None, 0.0, False, False)
    out = " ".join(capsys.readouterr().out.split())
    assert "6 entries cannot be read; 3 charges are reckoned for what may be in them; spent in all now epsilon" in out
    assert "Approvals are not carried over" in out
    assert hospital.home.ledger.standing.opening.continues.index == 6
    continue_command(hospital.path, officer, None, None, None, 0, 0.0, False, True)
    assert json.loads(capsys.readouterr().out)["reckoned"] == 0


def test_a_new_officer(hospital, tmp_path, capsys):
    old, new = tmp_path / "officer.pem", tmp_path / "new.pem"
    officer_command(hospital.path, old, new)
    public = public_hex(load(new))
    assert show(public) in capsys.readouterr().out
    ledger = hospital.home.ledger
    assert ledger.standing.keys.officer == public
    with pytest.raises(BadLedger, match="is decided with key"):
        ledger.append(Budget(epsilon=9.0, delta=1e-5), hospital.officer)
    ledger.append(Budget(epsilon=9.0, delta=1e-5), load(new))
    with pytest.raises(BadLedger):  # the old one says nothing more
        officer_command(hospital.path, old, tmp_path / "newer.pem")
    assert not (tmp_path / "newer.pem").exists()


def test_a_new_key(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "horse")
    new_key_command(tmp_path / "k.pem", True, True)
    made = json.loads(capsys.readouterr().out)
    assert made["public"] == public_hex(load(tmp_path / "k.pem", "horse"))
    assert (tmp_path / "k.pem").stat().st_mode & 0o777 == 0o600
    with pytest.raises(BadKey, match="not overwritten"):
        new_key_command(tmp_path / "k.pem", False, False)
