"""Backup and restore of a home: no images, and no older ledger over a newer one."""

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
from sites.governance.withdrawn_units import WITHDRAWN_UNITS_FILE
from tests.support.hospital import Hospital
from tests.support.machine import mount_small_disk


@pytest.fixture
def hospital(tmp_path):
    hospital = Hospital(tmp_path)
    for name, text in {
        "kit/startup/client.key": "secret",
        "kit/local/resources.json": "{}",
        "kit/0815/log.txt": "cache",
        "log/agent.jsonl": "log",
        "runs/run-1/client_state.safetensors": "state",
        "models/run-1/own.safetensors": "model",
        "outbox/update.safetensors": "old answer",
        "images/a.png": "image",
    }.items():
        file = hospital.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    SiteSettings(data=hospital.path / "images").save(hospital.path)
    (hospital.path / "elsewhere").symlink_to("/etc")
    return hospital


@pytest.fixture
def backup_file(hospital, tmp_path):
    backup_home(hospital.path, tmp_path / "copy.tar")
    return tmp_path / "copy.tar"


def append_entry(hospital, units=7):
    hospital.home.ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=units, num_examples=9))


def ledger_bytes(folder):
    return (folder / "ledger.jsonl").read_bytes()


def test_backup_contents(hospital, backup_file, tmp_path):
    metadata = unpack_archive(backup_file, tmp_path / "out", None)
    names = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert names == {
        "agent.pem",
        "salt",
        "ledger.jsonl",
        "membership.json",
        "site.toml",
        "kit/startup/client.key",
        "kit/local/resources.json",
        "runs/run-1/client_state.safetensors",
        "models/run-1/own.safetensors",
        "outbox/update.safetensors",
    }
    assert (metadata["kind"], metadata["site"], metadata["dataset_id"]) == ("site", "st-anne", "smears-2024")
    assert backup_file.stat().st_mode & 0o777 == 0o600


def test_restore_on_a_new_machine(hospital, tmp_path):
    offer = hospital.make_offer()
    hospital.approve(offer)
    file = tmp_path / "copy.tar"
    backup_home(hospital.path, file, "horse")
    new = tmp_path / "machine" / "home"
    result = restore_home(file, new, "horse")
    assert (result.kept_own_ledger, result.last_entry_index, result.problems) == (False, 1, ())
    home = SiteHome.open(new)
    assert check_approval(home, offer).is_approved
    assert (new / "agent.pem").stat().st_mode & 0o777 == 0o600
    assert home.salt == hospital.home.salt
    assert [p.name for p in new.parent.iterdir()] == ["home"]
    with pytest.raises(RunFolderError, match="the passphrase is wrong"):
        restore_home(file, tmp_path / "third", "cow")
    assert not (tmp_path / "third").exists()


def test_an_older_backup_does_not_replace_the_ledger(hospital, backup_file):
    append_entry(hospital)
    (hospital.path / "outbox" / "update.safetensors").write_text("new answer")
    (hospital.path / "site.toml").unlink()
    hospital.home.record_unmasked_round("study", 9)
    content_before = ledger_bytes(hospital.path)
    result = restore_home(backup_file, hospital.path)
    assert (result.kept_own_ledger, result.last_entry_index) == (True, 1)
    assert ledger_bytes(hospital.path) == content_before
    assert (hospital.path / "outbox" / "update.safetensors").read_text() == "new answer"
    assert hospital.home.last_unmasked_round("study") == 9
    assert (hospital.path / "site.toml").exists()


def test_a_newer_backup_replaces_the_ledger(hospital, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "older", symlinks=True)
    append_entry(hospital)
    hospital.home.record_unmasked_round("study", 3)
    backup_home(hospital.path, tmp_path / "newer.tar")
    SiteHome.open(tmp_path / "older").record_unmasked_round("study", 5)
    result = restore_home(tmp_path / "newer.tar", tmp_path / "older")
    assert (result.kept_own_ledger, result.last_entry_index) == (False, 1)
    assert ledger_bytes(tmp_path / "older") == ledger_bytes(hospital.path)
    assert SiteHome.open(tmp_path / "older").last_unmasked_round("study") == 5


def test_diverged_ledgers_are_refused(hospital, backup_file, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "other", symlinks=True)
    append_entry(hospital, 1)
    backup_home(hospital.path, tmp_path / "one.tar")
    SiteHome.open(tmp_path / "other").ledger.append(
        DatasetSnapshot(fingerprint="sha256:2", num_units=2, num_examples=2)
    )
    content_before = ledger_bytes(tmp_path / "other")
    with pytest.raises(LedgerError, match="diverge at entry 1, so neither has all charges"):
        restore_home(tmp_path / "one.tar", tmp_path / "other")
    assert ledger_bytes(tmp_path / "other") == content_before
    other_hospital = Hospital(tmp_path / "foreign")
    with pytest.raises(RunFolderError, match="has another ledger than"):
        restore_home(backup_file, other_hospital.path)
    assert other_hospital.home.ledger.last_index == 0
    assert not list(tmp_path.rglob("*restoring*"))


def test_a_backup_with_a_forged_ledger_is_refused(hospital, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "older", symlinks=True)
    append_entry(hospital)
    content = ledger_bytes(hospital.path)
    (hospital.path / "ledger.jsonl").write_bytes(content.replace(b'"num_units":7', b'"num_units":8'))
    backup_home(hospital.path, tmp_path / "forged.tar")
    with pytest.raises(LedgerError, match="is not valid"):
        restore_home(tmp_path / "forged.tar", tmp_path / "older")


def test_withdrawn_units_are_merged(hospital, backup_file, tmp_path):
    hospital.home.withdraw_unit("patient 1")
    backup_home(hospital.path, tmp_path / "two.tar")
    (hospital.path / WITHDRAWN_UNITS_FILE).write_text(json.dumps(["ab" * 32]))
    restore_home(tmp_path / "two.tar", hospital.path)
    assert len(json.loads((hospital.path / WITHDRAWN_UNITS_FILE).read_text())) == 2
    restore_home(backup_file, hospital.path)
    assert len(json.loads((hospital.path / WITHDRAWN_UNITS_FILE).read_text())) == 2


def test_a_rotated_agent_key_is_kept(hospital, backup_file):
    home, new_key = hospital.home, generate_key()
    home.ledger.rotate_agent_key(new_key)
    (hospital.path / "agent.pem").unlink()
    save_key(new_key, hospital.path / "agent.pem")
    restore_home(backup_file, hospital.path)
    assert public_hex(load_key(hospital.path / "agent.pem")) == public_hex(new_key)
    assert hospital.home.ledger.last_index == 1


def test_a_lost_agent_key_is_restored(hospital, backup_file):
    append_entry(hospital)
    (hospital.path / "agent.pem").unlink()
    assert restore_home(backup_file, hospital.path).kept_own_ledger
    append_entry(hospital)
    assert verify_ledger(hospital.path / "ledger.jsonl").is_valid


def test_a_recovered_ledger_is_newer_than_the_one_it_continues(hospital, backup_file, tmp_path):
    shutil.copytree(hospital.path, tmp_path / "older", symlinks=True)
    recover_ledger(hospital.path, hospital.officer)
    content_before = ledger_bytes(hospital.path)
    assert restore_home(backup_file, hospital.path).kept_own_ledger
    assert ledger_bytes(hospital.path) == content_before
    backup_home(hospital.path, tmp_path / "newer.tar")
    assert not restore_home(tmp_path / "newer.tar", tmp_path / "older").kept_own_ledger
    assert ledger_bytes(tmp_path / "older") == content_before


def test_a_torn_last_line_is_ignored(hospital, backup_file, tmp_path):
    with (hospital.path / "ledger.jsonl").open("ab") as file:
        file.write(b'{"half": ')
    assert restore_home(backup_file, hospital.path).kept_own_ledger
    backup_home(hospital.path, tmp_path / "torn.tar")
    assert restore_home(tmp_path / "torn.tar", tmp_path / "new").problems == ()


def test_restore_is_refused_while_the_agent_runs(hospital, backup_file):
    with exclusive_lock(hospital.path), pytest.raises(RunFolderError, match="another process is using"):
        restore_home(backup_file, hospital.path)


def test_refused_backups_and_restores(hospital, backup_file, tmp_path):
    with pytest.raises(RunFolderError, match="is not a site's home"):
        backup_home(tmp_path, tmp_path / "x.tar")
    with pytest.raises(RunFolderError, match="is inside the home"):
        backup_home(hospital.path, hospital.path / "x.tar")
    SiteSettings(data=hospital.path).save(hospital.path)
    with pytest.raises(RunFolderError, match="backups contain no images"):
        backup_home(hospital.path, tmp_path / "x.tar")
    assert not (tmp_path / "x.tar").exists()
    (tmp_path / "cut.tar").write_bytes(backup_file.read_bytes()[:3000])
    with pytest.raises(RunFolderError, match="use another copy"):
        restore_home(tmp_path / "cut.tar", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_backup_and_restore_on_a_full_disk(hospital, tmp_path):
    (hospital.path / "models" / "large").write_bytes(os.urandom(200_000))
    with mount_small_disk(tmp_path / "disk") as disk:
        with pytest.raises(NoSpaceError):
            backup_home(hospital.path, disk / "copy.tar")
        assert list(disk.iterdir()) == []
        backup_home(hospital.path, tmp_path / "copy.tar")
        with pytest.raises(NoSpaceError):
            restore_home(tmp_path / "copy.tar", disk / "home")
        assert list(disk.iterdir()) == []
