"""What the officer types: looks, says yes or no, withdraws, and asks for a second person."""

import io
import json

import pytest

from pipeline.cli.commands.site.approve import (
    approve_command,
    offers_command,
    require_cosigner_command,
    revoke_approval_command,
)
from pipeline.core.errors import IncompatibleStudyError, KeyFileError, LedgerError, RunFolderError
from privacy.ledger.keys import generate_key, public_hex, save_key
from sites.governance.approvals import check_approval
from tests.support.hospital import Hospital


@pytest.fixture
def hospital(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    made = Hospital(tmp_path)
    made.store_offer(made.make_offer("smear-private"))
    return made


@pytest.fixture
def officer(tmp_path):
    return tmp_path / "officer.pem"


def said(monkeypatch, text):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def state(hospital):
    return check_approval(hospital.home, hospital.make_offer("smear-private")).state


def test_looking_signs_nothing(hospital, capsys):
    approve_command(hospital.path, "run-1", None, None, 90, False, False)
    out = capsys.readouterr().out
    for words in (
        "smear-private, offered as run-1 to st-anne",
        "Epsilon asked",
        "what leaves this site",
        "charite, key ",
    ):
        assert words in out
    assert state(hospital) == "pending"


@pytest.mark.parametrize(("answer", "then"), [("\n", "pending"), ("n\n", "pending"), ("y\n", "approved")])
def test_yes_or_no(hospital, officer, monkeypatch, capsys, answer, then):
    said(monkeypatch, answer)
    approve_command(hospital.path, "run-1", officer, None, 90, False, False)
    assert state(hospital) == then
    assert ("nothing was signed" in capsys.readouterr().out) == (then == "pending")


def test_json(hospital, officer, capsys):
    approve_command(hospital.path, "run-1", officer, None, 90, False, True)
    shown = json.loads(capsys.readouterr().out)
    assert (shown["state"], state(hospital)) == ("pending", "pending")
    assert shown["words"]["leaves"][0]["protection"] == "none"
    approve_command(hospital.path, "run-1", officer, None, 90, True, True)
    assert json.loads(capsys.readouterr().out)["state"] == "approved"
    approve_command(hospital.path, None, None, None, 90, False, True)
    assert [offer["state"] for offer in json.loads(capsys.readouterr().out)] == ["approved"]


def test_the_list(hospital, tmp_path, capsys):
    offers_command(hospital.path, False)
    out = capsys.readouterr().out
    assert "run-1" in out
    assert "pending" in out
    other = hospital.store_offer(
        hospital.make_offer(run="run-9").model_copy(update={"version": "99.0", "study": 'name = "x"\nnew = 1'})
    )
    offers_command(hospital.path, False)
    assert "refused" in capsys.readouterr().out
    with pytest.raises(IncompatibleStudyError, match=r"run-9 needs hemofed 99\.0"):
        approve_command(hospital.path, other.digest[:12], None, None, 90, False, False)
    with pytest.raises(RunFolderError, match="'run-7' is not offered here; offered: "):
        approve_command(hospital.path, "run-7", None, None, 90, False, False)
    empty = Hospital(tmp_path / "empty")
    offers_command(empty.path, False)
    assert "Nothing is offered" in capsys.readouterr().out


def test_withdrawing(hospital, officer, capsys):
    approve_command(hospital.path, "run-1", officer, None, 90, True, False)
    revoke_approval_command(hospital.path, "run-1", None, "a doubt", False)
    assert "from the next message on" in capsys.readouterr().out
    assert state(hospital) == "withdrawn"
    approve_command(hospital.path, "run-1", officer, None, 90, True, False)
    capsys.readouterr()
    revoke_approval_command(hospital.path, "run-1", officer, "a doubt", True)
    assert json.loads(capsys.readouterr().out)[0]["reason"] == "a doubt"


def test_a_second_person(hospital, officer, tmp_path, capsys):
    second, file = generate_key(), tmp_path / "second.pem"
    save_key(second, file)
    with pytest.raises(KeyFileError, match="neither a public key"):
        require_cosigner_command(hospital.path, officer, "no key", None)
    require_cosigner_command(hospital.path, officer, public_hex(second), None)
    assert "approvals by one person no longer stand" in capsys.readouterr().out
    with pytest.raises(LedgerError, match="needs two signatures"):
        approve_command(hospital.path, "run-1", officer, None, 90, True, False)
    approve_command(hospital.path, "run-1", officer, file, 90, True, False)
    assert state(hospital) == "approved"
    with pytest.raises(LedgerError, match="needs two signatures"):
        require_cosigner_command(hospital.path, officer, None, None)
    require_cosigner_command(hospital.path, officer, None, file)
    assert hospital.home.ledger.state.second is None


def test_an_officers_key_with_a_passphrase(hospital, tmp_path, monkeypatch):
    locked = tmp_path / "locked.pem"
    save_key(hospital.officer, locked, "horse")
    monkeypatch.setattr("getpass.getpass", lambda prompt: "cow")
    with pytest.raises(KeyFileError, match="the passphrase is wrong"):
        approve_command(hospital.path, "run-1", locked, None, 90, True, False)
    monkeypatch.setattr("getpass.getpass", lambda prompt: "horse")
    approve_command(hospital.path, "run-1", locked, None, 90, True, False)
    assert state(hospital) == "approved"
