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
from tests.pipeline.service.conftest import STUDY, World
from tests.support.ledger_factory import charge


def grown(home, rounds):
    """A run of so many rounds, as its process writes it."""
    folder = RunFolder(home.runs / "run-1")
    if not folder.path.exists():
        folder = RunFolder.create(folder.path, parse_study(STUDY, "study", {}))
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
        public = keys.public_hex(home.key)
        receipt = LedgerCountersigner(home.receipts, home.key).countersign(
            create_receipt_request(made.ledger, made.agent_key, public, since)
        )
        made.ledger.append(receipt)
        return receipt

    return SimpleNamespace(spend=spend, ask=ask, home=made, path=tmp_path / "site")


def copied(world, tmp_path, name="copy.tar", passphrase=None):
    backup_home(world.home.path, tmp_path / name, passphrase)
    return tmp_path / name


def rows(home, query):
    with contextlib.closing(sqlite3.connect(home / "hemofed.db")) as database:
        return database.execute(query).fetchall()


def test_what_is_in_it(world: World, site, tmp_path):
    world.enrol("north")
    run = grown(world.home, 5)
    site.spend(world.home)
    for name in ("live.json", "ended.json", ".lock", ".x.tmp"):
        (run.path / name).write_text("{}")
    for name in ("kit/startup/server.key", "admin/startup/client.key", "flare/jobs/x", "log/coordinator.jsonl"):
        (world.home.path / name).parent.mkdir(parents=True, exist_ok=True)
        (world.home.path / name).write_text("not this")
    copy = copied(world, tmp_path)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    about = unpack_archive(copy, tmp_path / "out", None)
    assert (about["kind"], about["name"], about["key"]) == (
        "coordinator",
        "Test Trust",
        keys.public_hex(world.home.signing_key),
    )
    found = {p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*") if p.is_file()}
    (receipt,) = world.home.receipts_folder.glob("*.json")
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


def test_a_new_machine_serves_it_and_runs_go_on(world: World, tmp_path):
    credential = world.enrol("north").token
    open_one = world.store.accounts.create_invitation("south", 1, "lead")[0]
    grown(world.home, 3)
    made = restore_home(copied(world, tmp_path), tmp_path / "new" / "home")
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


def test_beside_a_run_and_a_service_that_go_on(world: World, tmp_path):
    """Rounds are written, old checkpoints cleared away, transactions made: each copy is of one moment and can go on."""
    grown(world.home, 1)
    over = threading.Event()

    def work() -> None:
        for count in range(2, 2000):
            if not over.is_set():
                grown(world.home, count)
                world.store.record_event("somebody", "something")

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for nth in range(12):
            restore_home(copied(world, tmp_path, f"{nth}.tar"), tmp_path / f"home-{nth}")
            run = RunFolder.open(tmp_path / f"home-{nth}" / "runs" / "run-1")
            last = run.load_checkpoint()[0]["round"]
            assert {r["round"] for r in run.load_rounds()} >= set(range(last + 1))
            assert rows(tmp_path / f"home-{nth}", "PRAGMA integrity_check") == [("ok",)]
    finally:
        over.set()
        worker.join()
    assert last > 0


def test_what_is_newer_in_the_home_stays(world: World, site, tmp_path):
    grown(world.home, 2)
    site.spend(world.home)
    copy = copied(world, tmp_path)
    grown(world.home, 4)
    last = site.spend(world.home)
    world.store.accounts.add_user("later", "viewer", "lead")
    (world.home.path / "coordinator.toml").write_text('name = "Test Trust"\nhost = "new.example"\nport = 8443\n')
    made = restore_home(copy, world.home.path)
    assert (
        made.is_database_restored,
        made.restored_runs,
        made.num_receipts,
        made.num_newer_receipts,
        made.num_files,
    ) == (False, (), 0, 1, 0)
    assert (
        LedgerCountersigner(world.home.receipts_folder, world.home.signing_key).last_receipt("st-anne", "smears")
        == last
    )
    assert RunFolder(world.home.runs_folder / "run-1").load_checkpoint()[0] == {"round": 3}
    assert "later" in [user.name for user in world.store.accounts.list_users()]
    assert CoordinatorHome.open(world.home.path).host == "new.example"


def test_what_is_lost_or_damaged_comes_back(world: World, site, tmp_path):
    grown(world.home, 2)
    site.spend(world.home)
    copy = copied(world, tmp_path)
    world.store.close()
    shutil.rmtree(world.home.runs_folder / "run-1" / "checkpoint")
    (world.home.path / "hemofed.db").write_bytes(b"not a database at all" * 100)
    (world.home.path / "web.key").unlink()
    (receipt,) = world.home.receipts_folder.glob("*.json")
    receipt.write_text("{")
    made = restore_home(copy, world.home.path)
    assert (made.is_database_restored, made.restored_runs, made.num_receipts) == (True, ("run-1",), 1)
    assert RunFolder(world.home.runs_folder / "run-1").load_checkpoint()[0] == {"round": 1}
    CoordinatorStore(CoordinatorHome.open(world.home.path).database_url).close()


def test_a_site_that_moved_on_extends_and_one_that_is_behind_is_refused(world: World, site, tmp_path):
    site.spend(world.home)
    shutil.copytree(site.path, tmp_path / "behind")
    known = site.spend(world.home)
    copy = copied(world, tmp_path)
    ahead = site.spend(world.home)
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


def test_it_does_so_by_itself_before_it_trains(world: World, site, tmp_path):
    site.spend(world.home)
    copy = copied(world, tmp_path)
    site.spend(world.home)
    restore_home(copy, tmp_path / "new")
    home = CoordinatorHome.open(tmp_path / "new")
    site.home.ledger.append(charge(1, 0.5))
    signer = LedgerCountersigner(home.receipts_folder, home.signing_key)
    BudgetGuard(
        site.home, None, "moons", "0" * 64, signer.countersign, keys.public_hex(home.signing_key)
    )._ensure_receipt()
    assert signer.last_receipt("st-anne", "smears").index == site.home.ledger.index - 1


def test_never_while_it_is_served_nor_over_another(world: World, tmp_path):
    copy = copied(world, tmp_path)
    with exclusive_lock(world.home.path), pytest.raises(RunFolderError, match="stop it first"):
        restore_home(copy, world.home.path)
    keys.save_key(keys.generate_key(), tmp_path / "other.pem")
    (tmp_path / "other").mkdir()
    (tmp_path / "other.pem").replace(tmp_path / "other" / "key.pem")
    with pytest.raises(RunFolderError, match="another coordinator"):
        restore_home(copy, tmp_path / "other")
    with pytest.raises(RunFolderError, match="lies in the home"):
        backup_home(world.home.path, world.home.path / "copy.tar")
    assert not [p for p in tmp_path.iterdir() if "restoring" in p.name]


def test_commands(world: World, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEMOFED_PASSPHRASE", "correct horse")
    backup_command(world.home.path, tmp_path / "sealed", encrypt=True, json=True)
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
