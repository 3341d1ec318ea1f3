"""The officer's commands: offers, approve, revoke-approval and require-cosigner."""

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
    hospital = Hospital(tmp_path)
    hospital.store_offer(hospital.make_offer("smear-private"))
    return hospital


@pytest.fixture
def officer_path(tmp_path):
    return tmp_path / "officer.pem"


def approve(hospital, run="run-1", **arguments):
    defaults = {
        "officer_key_path": None,
        "cosigner_key_path": None,
        "days": 90,
        "assume_yes": False,
        "json": False,
    }
    approve_command(hospital.path, run, **(defaults | arguments))


def approval_state(hospital):
    return check_approval(hospital.home, hospital.make_offer("smear-private")).state


def test_approve_without_a_key_shows_the_study_and_signs_nothing(hospital, capsys):
    approve(hospital)
    output = capsys.readouterr().out
    for phrase in (
        "smear-private, offered as run-1 to st-anne",
        "Epsilon asked",
        "what leaves this site",
        "charite, key ",
    ):
        assert phrase in output
    assert approval_state(hospital) == "pending"


@pytest.mark.parametrize(("answer", "state"), [("\n", "pending"), ("n\n", "pending"), ("y\n", "approved")])
def test_approve_asks_for_confirmation(hospital, officer_path, monkeypatch, capsys, answer, state):
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    approve(hospital, officer_key_path=officer_path)
    assert approval_state(hospital) == state
    assert ("nothing was signed" in capsys.readouterr().out) == (state == "pending")


def test_approve_with_json_signs_only_with_yes(hospital, officer_path, capsys):
    approve(hospital, officer_key_path=officer_path, json=True)
    result = json.loads(capsys.readouterr().out)
    assert (result["state"], approval_state(hospital)) == ("pending", "pending")
    assert result["words"]["disclosures"][0]["protected_by"] == "unprotected"
    approve(hospital, officer_key_path=officer_path, assume_yes=True, json=True)
    assert json.loads(capsys.readouterr().out)["state"] == "approved"
    approve(hospital, run=None, json=True)
    assert [offer["state"] for offer in json.loads(capsys.readouterr().out)] == ["approved"]


def test_offers_lists_incompatible_and_missing_offers(hospital, tmp_path, capsys):
    offers_command(hospital.path, False)
    output = capsys.readouterr().out
    assert "run-1" in output
    assert "pending" in output
    incompatible_offer = hospital.store_offer(
        hospital.make_offer(run="run-9").model_copy(update={"version": "99.0", "study_toml": 'name = "x"\nnew = 1'})
    )
    offers_command(hospital.path, False)
    assert "refused" in capsys.readouterr().out
    with pytest.raises(IncompatibleStudyError, match=r"run-9 needs hemofed 99\.0"):
        approve(hospital, run=incompatible_offer.digest[:12])
    with pytest.raises(RunFolderError, match="'run-7' is not offered here; offered: "):
        approve(hospital, run="run-7")
    empty_hospital = Hospital(tmp_path / "empty")
    offers_command(empty_hospital.path, False)
    assert "No study is offered" in capsys.readouterr().out


def test_revoke_approval_with_the_site_key_or_the_officer_key(hospital, officer_path, capsys):
    approve(hospital, officer_key_path=officer_path, assume_yes=True)
    revoke_approval_command(hospital.path, "run-1", None, "a doubt", False)
    assert "revoked: from the next message on" in capsys.readouterr().out
    assert approval_state(hospital) == "revoked"
    approve(hospital, officer_key_path=officer_path, assume_yes=True)
    capsys.readouterr()
    revoke_approval_command(hospital.path, "run-1", officer_path, "a doubt", True)
    assert json.loads(capsys.readouterr().out)[0]["reason"] == "a doubt"


def test_require_cosigner_makes_approvals_need_two_signatures(hospital, officer_path, tmp_path, capsys):
    cosigner_key, cosigner_path = generate_key(), tmp_path / "cosigner.pem"
    save_key(cosigner_key, cosigner_path)
    with pytest.raises(KeyFileError, match="neither a public key"):
        require_cosigner_command(hospital.path, officer_path, "no key", None)
    require_cosigner_command(hospital.path, officer_path, public_hex(cosigner_key), None)
    output = " ".join(capsys.readouterr().out.split())  # without the line breaks of a narrow console
    assert "approvals signed by one person are no longer valid" in output
    with pytest.raises(LedgerError, match="needs two signatures"):
        approve(hospital, officer_key_path=officer_path, assume_yes=True)
    approve(hospital, officer_key_path=officer_path, cosigner_key_path=cosigner_path, assume_yes=True)
    assert approval_state(hospital) == "approved"
    with pytest.raises(LedgerError, match="needs two signatures"):
        require_cosigner_command(hospital.path, officer_path, None, None)
    require_cosigner_command(hospital.path, officer_path, None, cosigner_path)
    assert hospital.home.ledger.state.cosigner_key is None
    assert "approvals now need the officer only" in capsys.readouterr().out


def test_officer_key_with_a_passphrase(hospital, tmp_path, monkeypatch):
    encrypted_key_path = tmp_path / "encrypted.pem"
    save_key(hospital.officer, encrypted_key_path, "horse")
    monkeypatch.setattr("getpass.getpass", lambda prompt: "cow")
    with pytest.raises(KeyFileError, match="the passphrase is wrong"):
        approve(hospital, officer_key_path=encrypted_key_path, assume_yes=True)
    monkeypatch.setattr("getpass.getpass", lambda prompt: "horse")
    approve(hospital, officer_key_path=encrypted_key_path, assume_yes=True)
    assert approval_state(hospital) == "approved"
