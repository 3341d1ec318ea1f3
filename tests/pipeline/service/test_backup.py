"""A coordinator's backups, and what comes back: never an older receipt, run or database over a newer one."""

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
from tests.support.service_factory import STUDY_TOML, CoordinatorService


def grown(home, rounds):
    """A run of so many rounds, as its process writes it."""
    folder = RunFolder(home.runs_folder / "run-1")
    if not folder.path.exists():
        folder = RunFolder.create(folder.path, parse_study(STUDY_TOML, "study", {}))
    for turn in range(len(folder.load_rounds()), rounds):
        folder.next_attempt(turn)
        folder.append_round({"round": turn})
        folder.write_checkpoint(turn, {"round": turn}, {"w": torch.full((4,), float(turn))})
    return folder


@pytest.fixture
def site(tmp_path):
    """A hospital that asks for receipts of its ledger."""
    made = SiteHome.create(tmp_path / "site", "st-anne", "smears", "patient", LedgerBudget(epsilon=8.0, delta=1e-5))

    def spend(home):
        made.ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=7, num_examples=9))
        return ask(home)

    def ask(home, since=None):
        public = keys.public_hex(home.signing_key)
        receipt = LedgerCountersigner(home.receipts_folder, home.signing_key).countersign(
            create_receipt_request(made.ledger, made.agent_key, public, since)
        )
        made.ledger.append(receipt)
        return receipt

    return SimpleNamespace(spend=spend, ask=ask, home=made, path=tmp_path / "site")


def copied(service, tmp_path, name="copy.tar", passphrase=None):
    backup_home(service.home.path, tmp_path / name, passphrase)
    return tmp_path / name


def rows(home, query):
    with contextlib.closing(sqlite3.connect(home / "hemofed.db")) as database:
        return database.execute(query).fetchall()


def test_what_is_in_it(service: CoordinatorService, site, tmp_path):
    service.enrol_site("north")
    run = grown(service.home, 5)
    site.spend(service.home)
    for name in ("live.json", "ended.json", ".lock", ".x.tmp"):
        (run.path / name).write_text("{}")
    for name in ("kit/startup/server.key", "admin/startup/client.key", "flare/jobs/x", "log/coordinator.jsonl"):
        (service.home.path / name).parent.mkdir(parents=True, exist_ok=True)
        (service.home.path / name).write_text("not this")
    copy = copied(service, tmp_path)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    about = unpack_archive(copy, tmp_path / "out", None)
    assert (about["kind"], about["name"], about["key"]) == (
        "coordinator",
        "Test Trust",
        keys.public_hex(service.home.signing_key),
    )
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    (receipt,) = service.home.receipts_folder.glob("*.json")
    assert found == {
        "coordinator.toml",
        "key.pem",
        "ca.pem",
        "ca.key",
        "web.crt",
        "web.key",
        "lead.token",
        "hemofed.db",
        "runs/run-1/study.toml",
        "runs/run-1/rounds.jsonl",
        "runs/run-1/checkpoint/attempt.json",
        "runs/run-1/checkpoint/round-000004.safetensors",
        f"receipts/{receipt.name}",
    }
    assert rows(tmp_path / "out", "SELECT name FROM sites") == [("north",)]


def test_a_new_machine_serves_it_and_runs_go_on(service: CoordinatorService, tmp_path):
    credential = service.enrol_site("north").token
    open_one = service.store.accounts.create_invitation("south", 1, "lead")[0]
    grown(service.home, 3)
    made = restore_home(copied(service, tmp_path), tmp_path / "new" / "home")
    assert made.is_database_restored
    assert made.restored_runs == ("run-1",)
    home = CoordinatorHome.open(tmp_path / "new" / "home")
    modes = {n: stat.S_IMODE((home.path / n).stat().st_mode) for n in ("key.pem", "ca.key", "hemofed.db", "lead.token")}
    assert set(modes.values()) == {0o600}
    assert stat.S_IMODE(home.path.stat().st_mode) == 0o700
    run = RunFolder.open(home.runs_folder / "run-1")
    header, tensors = run.load_checkpoint()
    assert header == {"round": 2}
    assert [r["round"] for r in run.load_rounds()] == [0, 1, 2]
    assert tensors["w"].tolist() == [2.0] * 4
    store = CoordinatorStore(home.database_url)
    try:
        found = store.accounts.find_site(credential)
        assert found is not None
        assert found.name == "north"
        assert store.accounts.find_user(home.token_path.read_text().strip()) is not None
        assert not store.accounts.is_invited(open_one, "south")  # it may have been used since
        assert store.list_events()[-1].action == "restored"
    finally:
        store.close()


def test_beside_a_run_and_a_service_that_go_on(service: CoordinatorService, tmp_path):
    """Rounds are written, old checkpoints cleared away, transactions made: each copy is of one moment and can go on."""
    grown(service.home, 1)
    over = threading.Event()

    def work() -> None:
        for count in range(2, 2000):
            if not over.is_set():
                grown(service.home, count)
                service.store.record_event("somebody", "something")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for nth in range(12):
            restore_home(copied(service, tmp_path, f"{nth}.tar"), tmp_path / f"home-{nth}")
            run = RunFolder.open(tmp_path / f"home-{nth}" / "runs" / "run-1")
            last = run.load_checkpoint()[0]["round"]
            assert {r["round"] for r in run.load_rounds()} >= set(range(last + 1))
            assert rows(tmp_path / f"home-{nth}", "PRAGMA integrity_check") == [("ok",)]
    finally:
        over.set()
        worker.join()
    assert last > 0


def test_what_is_newer_in_the_home_stays(service: CoordinatorService, site, tmp_path):
    grown(service.home, 2)
    site.spend(service.home)
    copy = copied(service, tmp_path)
    grown(service.home, 4)
    last = site.spend(service.home)
    service.store.accounts.add_user("later", "viewer", "lead")
    (service.home.path / "coordinator.toml").write_text('name = "Test Trust"\nhost = "new.example"\nport = 8443\n')
    made = restore_home(copy, service.home.path)
    assert (
        made.is_database_restored,
        made.restored_runs,
        made.num_receipts,
        made.num_newer_receipts,
        made.num_files,
    ) == (False, (), 0, 1, 0)
    assert (
        LedgerCountersigner(service.home.receipts_folder, service.home.signing_key).last_receipt("st-anne", "smears")
        == last
    )
    assert RunFolder(service.home.runs_folder / "run-1").load_checkpoint()[0] == {"round": 3}
    assert "later" in [user.name for user in service.store.accounts.list_users()]
    assert CoordinatorHome.open(service.home.path).host == "new.example"


def test_what_is_lost_or_damaged_comes_back(service: CoordinatorService, site, tmp_path):
    grown(service.home, 2)
    site.spend(service.home)
    copy = copied(service, tmp_path)
    service.store.close()
    shutil.rmtree(service.home.runs_folder / "run-1" / "checkpoint")
    (service.home.path / "hemofed.db").write_bytes(b"not a database at all" * 100)
    (service.home.path / "web.key").unlink()
    (receipt,) = service.home.receipts_folder.glob("*.json")
    receipt.write_text("{")
    made = restore_home(copy, service.home.path)
    assert (made.is_database_restored, made.restored_runs, made.num_receipts) == (True, ("run-1",), 1)
    assert RunFolder(service.home.runs_folder / "run-1").load_checkpoint()[0] == {"round": 1}
    CoordinatorStore(CoordinatorHome.open(service.home.path).database_url).close()


def test_a_site_that_moved_on_extends_and_one_that_is_behind_is_refused(service: CoordinatorService, site, tmp_path):
    site.spend(service.home)
    shutil.copytree(site.path, tmp_path / "behind")
    known = site.spend(service.home)
    copy = copied(service, tmp_path)
    ahead = site.spend(service.home)
    restore_home(copy, tmp_path / "new")
    home = CoordinatorHome.open(tmp_path / "new")
    with pytest.raises(LedgerError, match=f"needs the digests since entry {known.index + 1}"):
        site.spend(home)
    assert site.ask(home, since=known.index + 1).index > ahead.index  # shows what is missing here
    behind = SiteHome.open(tmp_path / "behind")
    behind.ledger.append(DatasetSnapshot(fingerprint="sha256:1", num_units=7, num_examples=9))
    asked = create_receipt_request(behind.ledger, behind.agent_key, keys.public_hex(home.signing_key))
    refused = json.loads(countersign_request(home.path, "st-anne", asked.model_dump_json()))
    assert "older than" in refused["refused"]


def test_it_does_so_by_itself_before_it_trains(service: CoordinatorService, site, tmp_path):
    site.spend(service.home)
    copy = copied(service, tmp_path)
    site.spend(service.home)
    restore_home(copy, tmp_path / "new")
    home = CoordinatorHome.open(tmp_path / "new")
    site.home.ledger.append(make_charge(1, 0.5))
    signer = LedgerCountersigner(home.receipts_folder, home.signing_key)
    BudgetGuard(
        site.home, None, "moons", "0" * 64, signer.countersign, keys.public_hex(home.signing_key)
    )._ensure_receipt()
    assert signer.last_receipt("st-anne", "smears").index == site.home.ledger.last_index - 1


def test_never_while_it_is_served_nor_over_another(service: CoordinatorService, tmp_path):
    copy = copied(service, tmp_path)
    with exclusive_lock(service.home.path), pytest.raises(RunFolderError, match="stop it first"):
        restore_home(copy, service.home.path)
    keys.save_key(keys.generate_key(), tmp_path / "other.pem")
    (tmp_path / "other").mkdir()
    (tmp_path / "other.pem").replace(tmp_path / "other" / "key.pem")
    with pytest.raises(RunFolderError, match="another coordinator"):
        restore_home(copy, tmp_path / "other")
    with pytest.raises(RunFolderError, match="lies in the home"):
        backup_home(service.home.path, service.home.path / "copy.tar")
    assert not [p for p in tmp_path.iterdir() if "restoring" in p.name]


def test_commands(service: CoordinatorService, tmp_path, monkeypatch, capsys):
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
    with pytest.raises(RunFolderError, match="there is no backup"):
        restore_command(tmp_path / "nothing", tmp_path / "newer", json=True)
