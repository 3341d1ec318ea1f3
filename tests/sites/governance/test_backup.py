"""Backups of a home, and what comes back: never an image, never an older ledger over a newer one."""

import json
import os
import shutil

import pytest

from pipeline.core.errors import LedgerError, NoSpaceError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.ops.encrypted_archive import unpack_archive
from privacy.ledger.keys import generate_key, load_key, public_hex, save_key
from privacy.ledger.records import DatasetSnapshot
from privacy.ledger.verify import verify_ledger
from sites.governance.approvals import check_approval
from sites.governance.backup import backup_home, restore_home
from sites.governance.home import SiteHome
from sites.governance.ledger_recovery import recover_ledger
from sites.governance.settings import SiteSettings
from tests.support.hospital import Hospital
from tests.support.ledger_factory import small_disk


@pytest.fixture
def hospital(tmp_path):
    made = Hospital(tmp_path)
    for name, text in {
        "kit/startup/client.key": "secret",
        "kit/local/resources.json": "{}",
        "kit/0815/log.txt": "cache",
        "log/agent.jsonl": "log",
        "runs/run-1/memory.safetensors": "memory",
        "models/run-1/own.safetensors": "model",
        "outbox/update.safetensors": "old answer",
        "images/a.png": "image",
    }.items():
        file = made.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    SiteSettings(data=made.path / "images").save(made.path)
    (made.path / "elsewhere").symlink_to("/etc")
    return made


@pytest.fixture
def copy(hospital, tmp_path):
    backup_home(hospital.path, tmp_path / "copy.tar")
    return tmp_path / "copy.tar"


def grow(hospital, units=7):
    hospital.home.ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=units, num_examples=9))


def ledger(folder):
    return (folder / "ledger.jsonl").read_bytes()


def test_what_is_in_it(hospital, copy, tmp_path):
    about = unpack_archive(copy, tmp_path / "out", None)
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {
        "agent.pem",
        "salt",
        "ledger.jsonl",
        "membership.json",
        "site.toml",
        "kit/startup/client.key",
        "kit/local/resources.json",
        "runs/run-1/memory.safetensors",
        "models/run-1/own.safetensors",
        "outbox/update.safetensors",
    }
    assert (about["kind"], about["site"], about["dataset_id"]) == ("site", "st-anne", "smears-2024")
    assert copy.stat().st_mode & 0o777 == 0o600


def test_on_a_new_machine(hospital, tmp_path):
    offer = hospital.offer()
    hospital.approve(offer)
    file = tmp_path / "copy.tar"
    backup_home(hospital.path, file, "horse")
    new = tmp_path / "machine" / "home"
    made = restore_home(file, new, "horse")
    assert (made.kept_own_ledger, made.last_entry_index, made.problems) == (False, 1, ())
    home = SiteHome.open(new)
    assert check_approval(home, offer).is_approved
    assert (new / "agent.pem").stat().st_mode & 0o777 == 0o600
    assert home.salt == hospital.home.salt
    assert [p.name for p in new.parent.iterdir()] == ["home"]
    with pytest.raises(RunFolderError, match="the passphrase is wrong"):
        restore_home(file, tmp_path / "third", "cow")
    assert not (tmp_path / "third").exists()


def test_an_older_backup_does_not_take_the_ledger_back(hospital, copy):
    grow(hospital)
    (hospital.path / "outbox" / "update.safetensors").write_text("new answer")
    (hospital.path / "site.toml").unlink()
    hospital.home.record_unmasked_round("study", 9)
    before = ledger(hospital.path)
    made = restore_home(copy, hospital.path)
    assert (made.kept_own_ledger, made.last_entry_index) == (True, 1)
    assert ledger(hospital.path) == before
    assert (hospital.path / "outbox" / "update.safetensors").read_text() == "new answer"
    assert hospital.home.unmasked("study") == 9
    assert (hospital.path / "site.toml").exists()


def test_a_newer_backup_brings_its_ledger(hospital, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "older", symlinks=True)
    grow(hospital)
    hospital.home.record_unmasked_round("study", 3)
    backup_home(hospital.path, tmp_path / "newer.tar")
    SiteHome.open(tmp_path / "older").record_unmasked_round("study", 5)
    made = restore_home(tmp_path / "newer.tar", tmp_path / "older")
    assert (made.kept_own_ledger, made.last_entry_index) == (False, 1)
    assert ledger(tmp_path / "older") == ledger(hospital.path)
    assert SiteHome.open(tmp_path / "older").last_unmasked_round("study") == 5


def test_ledgers_that_parted(hospital, copy, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "other", symlinks=True)
    grow(hospital, 1)
    backup_home(hospital.path, tmp_path / "one.tar")
    SiteHome.open(tmp_path / "other").ledger.append(
        DatasetSnapshot(fingerprint="sha256:2", num_units=2, num_examples=2)
    )
    before = ledger(tmp_path / "other")
    with pytest.raises(LedgerError, match="part at entry 1, so neither knows all that was spent"):
        restore_home(tmp_path / "one.tar", tmp_path / "other")
    assert ledger(tmp_path / "other") == before
    foreign = Hospital(tmp_path / "foreign")
    with pytest.raises(RunFolderError, match="is the home of another ledger"):
        restore_home(copy, foreign.path)
    assert foreign.home.ledger.last_index == 0
    assert not list(tmp_path.rglob("*restoring*"))


def test_a_forged_end_is_not_taken(hospital, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "older", symlinks=True)
    grow(hospital)
    whole = ledger(hospital.path)
    (hospital.path / "ledger.jsonl").write_bytes(whole.replace(b'"units":7', b'"units":8'))
    backup_home(hospital.path, tmp_path / "forged.tar")
    with pytest.raises(LedgerError, match="cannot be believed"):
        restore_home(tmp_path / "forged.tar", tmp_path / "older")


def test_whoever_withdrew_stays_withdrawn(hospital, copy, tmp_path):
    hospital.home.withdraw_unit("patient 1")
    backup_home(hospital.path, tmp_path / "two.tar")
    (hospital.path / "forgotten.json").write_text(json.dumps(["ab" * 32]))
    restore_home(tmp_path / "two.tar", hospital.path)
    assert len(json.loads((hospital.path / "forgotten.json").read_text())) == 2
    restore_home(copy, hospital.path)
    assert len(json.loads((hospital.path / "forgotten.json").read_text())) == 2


def test_a_key_that_was_changed_since_stays(hospital, copy):
    home, new = hospital.home, generate_key()
    home.ledger.rotate(new)
    (hospital.path / "agent.pem").unlink()
    save_key(new, hospital.path / "agent.pem")
    restore_home(copy, hospital.path)
    assert public_hex(load_key(hospital.path / "agent.pem")) == public_hex(new)
    assert hospital.home.ledger.index == 1


def test_a_lost_key_comes_back(hospital, copy):
    grow(hospital)
    (hospital.path / "agent.pem").unlink()
    assert restore_home(copy, hospital.path).kept_own_ledger
    grow(hospital)
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid


def test_a_continued_ledger_is_newer_than_what_it_continues(hospital, copy, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "older", symlinks=True)
    recover_ledger(hospital.path, hospital.officer)
    before = ledger(hospital.path)
    assert restore_home(copy, hospital.path).kept_own_ledger
    assert ledger(hospital.path) == before
    backup_home(hospital.path, tmp_path / "newer.tar")
    assert not restore_home(tmp_path / "newer.tar", tmp_path / "older").kept_own_ledger
    assert ledger(tmp_path / "older") == before


def test_a_torn_last_line_is_nobody_s_entry(hospital, copy, tmp_path):
    with (hospital.path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"half": ')
    assert restore_home(copy, hospital.path).kept_own_ledger
    backup_home(hospital.path, tmp_path / "torn.tar")
    assert restore_home(tmp_path / "torn.tar", tmp_path / "new").problems == ()


def test_not_while_the_agent_works(hospital, copy):
    with exclusive_lock(hospital.path), pytest.raises(RunFolderError, match="is being run by another process"):
        restore_home(copy, hospital.path)


def test_what_is_refused(hospital, copy, tmp_path):
    with pytest.raises(RunFolderError, match="is no site's home"):
        backup_home(tmp_path, tmp_path / "x.tar")
    with pytest.raises(RunFolderError, match="lies in the home itself"):
        backup_home(hospital.path, hospital.path / "x.tar")
    SiteSettings(data=hospital.path).save(hospital.path)
    with pytest.raises(RunFolderError, match="backups hold no image"):
        backup_home(hospital.path, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()
    (tmp_path / "cut.tar").write_bytes(copy.read_bytes()[:3000])
    with pytest.raises(RunFolderError, match="use another copy"):
        restore_home(tmp_path / "cut.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_full_disk(hospital, tmp_path):
    (hospital.path / "models" / "large").write_bytes(os.urandom(200_000))
    with small_disk(tmp_path) as disk:
        with pytest.raises(NoSpaceError):
            backup_home(hospital.path, disk / "copy.tar")
        assert list(disk.iterdir()) == []
        backup_home(hospital.path, tmp_path / "copy.tar")
        with pytest.raises(NoSpaceError):
            restore_home(tmp_path / "copy.tar", disk / "home")
        assert list(disk.iterdir()) == []
