"""Backup and restore of a coordinator's home: a restore never replaces newer data."""

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import threading
from types import SimpleNamespace

import pytest
import torch

from pipeline.cli.commands.coordinator import backup_command, restore_command
from pipeline.coordinator.run_folder import RunFolder
from pipeline.core.errors import LedgerError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.ops.encrypted_archive import is_encrypted, unpack_archive
from pipeline.service.runtime.receipts import countersign_request
from pipeline.service.storage.backup import backup_home, restore_home
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore
from pipeline.study.toml_file import parse_study
from privacy.ledger import keys
from privacy.ledger.countersigner import LedgerCountersigner
from privacy.ledger.receipts import create_receipt_request
from privacy.ledger.records import DatasetSnapshot, LedgerBudget
from sites.governance.home import SiteHome
from sites.privacy.budget_guard import BudgetGuard
from tests.support.ledger_factory import make_charge
from tests.support.run_folder_factory import make_record
from tests.support.service_factory import STUDY_TOML, CoordinatorService


def write_run(home, num_rounds):
    """Writes a run, or continues it, to this number of rounds."""
    folder = RunFolder(home.runs_folder / "run-1")
    if not folder.path.exists():
        folder = RunFolder.create(folder.path, parse_study(STUDY_TOML, "study", {}))
    for round_number in range(len(folder.load_rounds()), num_rounds):
        folder.next_attempt(round_number)
        folder.append_round(make_record(round_number))
        folder.write_checkpoint(round_number, {"round": round_number}, {"w": torch.full((4,), float(round_number))})
    return folder


@pytest.fixture
def site(tmp_path):
    """A hospital that requests receipts for its ledger."""
    site_home = SiteHome.create(
        tmp_path / "site", "st-anne", "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5)
    )

    def extend_ledger(home):
        site_home.ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=7, num_examples=9))
        return request_receipt(home)

    def request_receipt(home, since=None):
        public = keys.public_hex(home.signing_key)
        receipt = LedgerCountersigner(home.receipts_folder, home.signing_key).countersign(
            create_receipt_request(site_home.ledger, site_home.agent_key, public, since)
        )
        site_home.ledger.append(receipt)
        return receipt

    return SimpleNamespace(
        extend_ledger=extend_ledger, request_receipt=request_receipt, home=site_home, path=tmp_path / "site"
    )


def make_backup(service, tmp_path, name="backup.tar", passphrase=None):
    backup_home(service.home.path, tmp_path / name, passphrase)
    return tmp_path / name


def query_database(home, query):
    with contextlib.closing(sqlite3.connect(home / "hemofed.db")) as database:
        return database.execute(query).fetchall()


def test_content_of_a_backup(service: CoordinatorService, site, tmp_path):
    service.enrol_site("north")
    run = write_run(service.home, 5)
    site.extend_ledger(service.home)
    for name in ("live.json", "ended.json", ".lock", ".x.tmp"):
        (run.path / name).write_text("{}")
    for name in ("kit/startup/server.key", "admin/startup/client.key", "flare/jobs/x", "log/coordinator.jsonl"):
        (service.home.path / name).parent.mkdir(parents=True, exist_ok=True)
        (service.home.path / name).write_text("excluded")
    backup_file = make_backup(service, tmp_path)
    assert stat.S_IMODE(backup_file.stat().st_mode) == 0o600
    manifest = unpack_archive(backup_file, tmp_path / "out", None)
    assert (manifest["kind"], manifest["name"], manifest["key"]) == (
        "coordinator",
        "Test Trust",
        keys.public_hex(service.home.signing_key),
    )
    files = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    (receipt,) = service.home.receipts_folder.glob("*.json")
    assert files == {
        "coordinator.toml",
        "key.pem",
        "ca.pem",
        "ca.key",
        "web.crt",
        "web.key",
        "lead.token",
        "hemofed.db",
        "runs/run-1/run.json",
        "runs/run-1/study.toml",
        "runs/run-1/rounds.jsonl",
        "runs/run-1/checkpoint/attempt.json",
        "runs/run-1/checkpoint/round-000004.safetensors",
        f"receipts/{receipt.name}",
    }
    assert query_database(tmp_path / "out", "SELECT name FROM sites") == [("north",)]


def test_restore_on_a_new_machine_keeps_runs_sites_and_users(service: CoordinatorService, tmp_path):
    credential = service.enrol_site("north").token
    invitation = service.store.accounts.create_invitation("south", 1, "lead")[0]
    write_run(service.home, 3)
    restored = restore_home(make_backup(service, tmp_path), tmp_path / "new" / "home")
    assert restored.is_database_restored
    assert restored.restored_runs == ("run-1",)
    home = CoordinatorHome.open(tmp_path / "new" / "home")
    modes = {n: stat.S_IMODE((home.path / n).stat().st_mode) for n in ("key.pem", "ca.key", "hemofed.db", "lead.token")}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    run = RunFolder.open(home.runs_folder / "run-1")
    header, tensors = run.load_checkpoint()
    assert header == {"round": 2}
    assert [r.round for r in run.load_rounds()] == [0, 1, 2]
    assert tensors["w"].tolist() == [2.0] * 4
    store = CoordinatorStore(home.database_url)
    try:
        site = store.accounts.find_site(credential)
        assert site is not None
        assert site.name == "north"
        assert store.accounts.find_user(home.token_path.read_text().strip()) is not None
        assert not store.accounts.is_invited(invitation, "south")  # it may have been used after the backup
        assert store.list_events()[-1].action == "restored"
    finally:
        store.close()


def test_backup_during_a_run_is_consistent(service: CoordinatorService, tmp_path):
    """While rounds, checkpoints and transactions are written, every backup can be restored and the run resumed."""
    write_run(service.home, 1)
    stop = threading.Event()

    def write_rounds() -> None:
        for count in range(2, 2000):
            if not stop.is_set():
                write_run(service.home, count)
                service.store.record_event("somebody", "something")

    worker = threading.Thread(target=write_rounds)
    worker.start()
    try:
        for index in range(12):
            restore_home(make_backup(service, tmp_path, f"{index}.tar"), tmp_path / f"home-{index}")
            run = RunFolder.open(tmp_path / f"home-{index}" / "runs" / "run-1")
            last = run.load_checkpoint()[0]["round"]
            assert {r.round for r in run.load_rounds()} >= set(range(last + 1))
            assert query_database(tmp_path / f"home-{index}", "PRAGMA integrity_check") == [("ok",)]
    finally:
        stop.set()
        worker.join()
    assert last > 0


def test_restore_keeps_newer_data(service: CoordinatorService, site, tmp_path):
    write_run(service.home, 2)
    site.extend_ledger(service.home)
    backup_file = make_backup(service, tmp_path)
    write_run(service.home, 4)
    last = site.extend_ledger(service.home)
    service.store.accounts.add_user("later", "viewer", "lead")
    (service.home.path / "coordinator.toml").write_text(
        'format = 2\nname = "Test Trust"\nhost = "new.example"\nport = 8443\n'
    )
    restored = restore_home(backup_file, service.home.path)
    assert (
        restored.is_database_restored,
        restored.restored_runs,
        restored.num_receipts,
        restored.num_newer_receipts,
        restored.num_files,
    ) == (False, (), 0, 1, 0)
    assert (
        LedgerCountersigner(service.home.receipts_folder, service.home.signing_key).last_receipt("st-anne", "smears")
        == last
    )
    assert RunFolder(service.home.runs_folder / "run-1").load_checkpoint()[0] == {"round": 3}
    assert "later" in [user.name for user in service.store.accounts.list_users()]
    assert CoordinatorHome.open(service.home.path).host == "new.example"


def test_restore_replaces_lost_and_damaged_files(service: CoordinatorService, site, tmp_path):
    write_run(service.home, 2)
    site.extend_ledger(service.home)
    backup_file = make_backup(service, tmp_path)
    service.store.close()
    shutil.rmtree(service.home.runs_folder / "run-1" / "checkpoint")
    (service.home.path / "hemofed.db").write_bytes(b"not a database at all" * 100)
    (service.home.path / "web.key").unlink()
    (receipt,) = service.home.receipts_folder.glob("*.json")
    receipt.write_text("{")
    restored = restore_home(backup_file, service.home.path)
    assert (restored.is_database_restored, restored.restored_runs, restored.num_receipts) == (True, ("run-1",), 1)
    assert RunFolder(service.home.runs_folder / "run-1").load_checkpoint()[0] == {"round": 1}
    CoordinatorStore(CoordinatorHome.open(service.home.path).database_url).close()


def test_after_restore_a_ledger_ahead_is_extended_and_one_behind_refused(service: CoordinatorService, site, tmp_path):
    site.extend_ledger(service.home)
    shutil.copytree(site.path, tmp_path / "behind")
    known_receipt = site.extend_ledger(service.home)
    backup_file = make_backup(service, tmp_path)
    newer_receipt = site.extend_ledger(service.home)
    restore_home(backup_file, tmp_path / "new")
    home = CoordinatorHome.open(tmp_path / "new")
    with pytest.raises(LedgerError, match=f"needs the digests since entry {known_receipt.index + 1}"):
        site.extend_ledger(home)
    assert (
        site.request_receipt(home, since=known_receipt.index + 1).index > newer_receipt.index
    )  # sends the missing digests
    behind = SiteHome.open(tmp_path / "behind")
    behind.ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=7, num_examples=9))
    request = create_receipt_request(behind.ledger, behind.agent_key, keys.public_hex(home.signing_key))
    answer = json.loads(countersign_request(home.path, "st-anne", request.model_dump_json()))
    assert "older than" in answer["refused"]


def test_budget_guard_sends_missing_digests_after_a_restore(service: CoordinatorService, site, tmp_path):
    site.extend_ledger(service.home)
    backup_file = make_backup(service, tmp_path)
    site.extend_ledger(service.home)
    restore_home(backup_file, tmp_path / "new")
    home = CoordinatorHome.open(tmp_path / "new")
    site.home.ledger.append(make_charge(1, 0.5))
    signer = LedgerCountersigner(home.receipts_folder, home.signing_key)
    BudgetGuard(
        site.home, None, "moons", "0" * 64, signer.countersign, keys.public_hex(home.signing_key)
    )._ensure_receipt()
    assert signer.last_receipt("st-anne", "smears").index == site.home.ledger.last_index - 1


def test_restore_refuses_a_served_home_and_another_coordinators_home(service: CoordinatorService, tmp_path):
    backup_file = make_backup(service, tmp_path)
    with exclusive_lock(service.home.path), pytest.raises(RunFolderError, match="stop it first"):
        restore_home(backup_file, service.home.path)
    keys.save_key(keys.generate_key(), tmp_path / "other.pem")
    (tmp_path / "other").mkdir()
    (tmp_path / "other.pem").replace(tmp_path / "other" / "key.pem")
    with pytest.raises(RunFolderError, match="different coordinator"):
        restore_home(backup_file, tmp_path / "other")
    with pytest.raises(RunFolderError, match="is inside the home"):
        backup_home(service.home.path, service.home.path / "copy.tar")
    assert not [p for p in tmp_path.iterdir() if "restoring" in p.name]


def test_backup_and_restore_commands(service: CoordinatorService, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "correct horse")
    backup_command(service.home.path, tmp_path / "sealed", encrypt=True, json=True)
    assert json.loads(capsys.readouterr().out)["encrypted"] is True
    assert is_encrypted(tmp_path / "sealed")
    assert b"PRIVATE KEY" not in (tmp_path / "sealed").read_bytes()
    restore_command(tmp_path / "sealed", tmp_path / "new", json=False)
    assert "invite again" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setitem(os.environ, "HEMOFED_PASSPHRASE", "wrong")
    with pytest.raises(RunFolderError, match="passphrase is wrong"):
        restore_command(tmp_path / "sealed", tmp_path / "newer", json=False)
    assert not (tmp_path / "newer").exists()
    with pytest.raises(RunFolderError, match="does not exist; name a file that"):
        restore_command(tmp_path / "nothing", tmp_path / "newer", json=True)
