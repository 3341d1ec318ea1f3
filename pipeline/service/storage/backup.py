"""Backup of a coordinator's home to one file, and restore: keys, database, runs, receipts. Logs and startup kits are left out.

A backup may be taken while the coordinator is served. The order of reading keeps it consistent: the database before the
runs, so that the archive has every run that the database names; a run's checkpoint before its rounds, so that the run
can resume; receipts last, so that no other file is newer than they are.

A restore never replaces newer data: for the database, each run and each receipt the newer copy stays. On a new machine
this brings back old receipts. A site whose ledger is ahead of them sends the missing entries, a site whose ledger is
behind them is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from sqlalchemy import delete

from pipeline.core.errors import KeyFileError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.ops.encrypted_archive import pack_archive, unpack_archive
from pipeline.records.attempt_outcome import AttemptOutcome
from pipeline.records.attempt_record import AttemptRecord
from pipeline.records.live_status import LiveStatus
from pipeline.records.round_record import load_round_records
from pipeline.records.run_results import RunResults
from pipeline.service.storage.database import Database, EventRow, InvitationRow, LoginRow
from pipeline.service.storage.home import CoordinatorHome
from privacy.ledger import keys
from privacy.ledger.countersigner import CountersignedState
from privacy.ledger.ledger import utc_now

DATABASE_FILE, RUNS_FOLDER, RECEIPTS_FOLDER, SETTINGS_FILE = "hemofed.db", "runs", "receipts", "coordinator.toml"
# logs, the startup kits that every start provisions, and the database, which is copied in another way
EXCLUDED_NAMES = frozenset(
    {"log", "kit", "admin", "flare", DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm"}
)
TRANSIENT_NAMES = frozenset({LiveStatus.FILE_NAME, AttemptOutcome.FILE_NAME, ".lock"})
MAX_CHECKPOINT_TRIES = 20  # the run may delete a checkpoint while it is being read

ArchiveEntry = tuple[str, bytes, int]  # name, content, mode


@dataclass(frozen=True)
class RestoredHome:
    """What a restore took from the backup."""

    name: str
    backup_time: str  # ISO 8601
    num_files: int
    is_database_restored: bool  # False if the home's database is newer
    restored_runs: tuple[str, ...]
    num_receipts: int
    num_newer_receipts: int  # receipts of the home that stayed because the backup's are older


def backup_home(home_path: Path, out: Path, passphrase: str | None = None) -> dict[str, Any]:
    """Returns the archive's manifest, with its path and size."""
    home = CoordinatorHome.open(home_path)
    if out.resolve().is_relative_to(home_path.resolve()):
        raise RunFolderError(f"{out} is inside the home; write the backup to another disk")
    manifest = {
        "kind": "coordinator",
        "name": home.name,
        "key": keys.public_hex(home.signing_key),
        "created": utc_now().isoformat(timespec="seconds"),
        "version": version("hemofed"),
    }
    pack_archive(out, _iter_home_entries(home_path), manifest, passphrase)
    return manifest | {"file": str(out), "bytes": out.stat().st_size}


def _iter_home_entries(home: Path) -> Iterator[ArchiveEntry]:
    for path in sorted(home.iterdir()):
        if path.is_file() and not path.is_symlink() and not _is_transient(path) and path.name not in EXCLUDED_NAMES:
            yield from _read_entry(home, path)
    yield DATABASE_FILE, _copy_database(home / DATABASE_FILE), 0o600
    for run in sorted((home / RUNS_FOLDER).iterdir()):
        if run.is_dir() and not run.is_symlink():
            yield from _iter_run_entries(home, run)
    for receipt in sorted((home / RECEIPTS_FOLDER).glob("*.json")):
        yield from _read_entry(home, receipt)


def _iter_run_entries(home: Path, run: Path) -> Iterator[ArchiveEntry]:
    """The checkpoint first: all rounds up to it were written before it was."""
    yield from _iter_checkpoint_entries(home, run)
    for folder, subfolders, names in os.walk(run):
        subfolders[:] = sorted(d for d in subfolders if Path(folder, d) != run / "checkpoint")
        for name in sorted(names):
            file = Path(folder, name)
            if not _is_transient(file) and not file.is_symlink():
                yield from _read_entry(home, file)


def _iter_checkpoint_entries(home: Path, run: Path) -> Iterator[ArchiveEntry]:
    """The newest checkpoint, then the attempt number: read before, it could be lower than the one in use."""
    folder = run / "checkpoint"
    for _ in range(MAX_CHECKPOINT_TRIES):
        checkpoints = sorted(folder.glob("round-*.safetensors"))
        if not checkpoints:
            return
        if entries := list(_read_entry(home, checkpoints[-1])):
            yield from entries
            yield from _read_entry(home, folder / AttemptRecord.FILE_NAME)
            return
    raise RunFolderError(f"{folder} changes faster than it can be read; try again, or pause the run")


def _read_entry(home: Path, file: Path) -> Iterator[ArchiveEntry]:
    """Nothing if the coordinator deleted the file meanwhile."""
    with contextlib.suppress(FileNotFoundError):
        yield file.relative_to(home).as_posix(), file.read_bytes(), file.stat().st_mode


def _is_transient(file: Path) -> bool:
    return file.name in TRANSIENT_NAMES or file.name.endswith(".tmp")


def _copy_database(file: Path) -> bytes:
    """A consistent snapshot, also while others write."""
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        copy = Path(folder, DATABASE_FILE)
        with (
            contextlib.closing(sqlite3.connect(file)) as source_database,
            contextlib.closing(sqlite3.connect(copy)) as target_database,
        ):
            source_database.backup(target_database)
            target_database.execute("PRAGMA journal_mode=DELETE")  # everything in one file, no -wal
        return copy.read_bytes()


def restore_home(file: Path, home: Path, passphrase: str | None = None) -> RestoredHome:
    """Restores a backup into a new folder, or into a home of the same coordinator that is not being served."""
    home.absolute().parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.absolute().parent, prefix=f".{home.name}.restoring-"))  # mode 0700
    try:
        manifest = unpack_archive(file, staging, passphrase)
        if manifest.get("kind") != "coordinator" or not (staging / SETTINGS_FILE).is_file():
            raise RunFolderError(
                f"{file} is not a backup of a coordinator; name a file of `hemofed coordinator backup`"
            )
        home.mkdir(exist_ok=True, mode=0o700)
        with exclusive_lock(home):
            _check_owner(file, staging, home)
            return _merge_backup(staging, home, manifest)
    finally:
        shutil.rmtree(staging)


def _check_owner(file: Path, staging: Path, home: Path) -> None:
    if not (home / "key.pem").exists():
        return
    try:
        home_key = keys.public_hex(keys.load_key(home / "key.pem"))
    except KeyFileError as error:
        raise RunFolderError(f"{error}; move it away, and the backup's key is restored") from error
    if home_key != keys.public_hex(keys.load_key(staging / "key.pem")):
        raise RunFolderError(
            f"{home} is the home of a different coordinator than the backup {file}; restore into a new folder"
        )


def _merge_backup(staging: Path, home: Path, manifest: dict[str, Any]) -> RestoredHome:
    """Receipts first, settings last: an interrupted restore leaves no valid home, and can be repeated."""
    names = sorted(receipt.name for receipt in (staging / RECEIPTS_FOLDER).glob("*.json"))
    names_to_restore = [name for name in names if _is_home_receipt_older(home, staging, name)]
    files = [_move_file(staging, home, Path(RECEIPTS_FOLDER, name)) for name in names_to_restore]
    runs = [
        run.name
        for run in sorted((staging / RUNS_FOLDER).glob("*"))
        if _is_further_along(run, home / RUNS_FOLDER / run.name)
    ]
    for run in runs:
        files += _move_run(staging, home, run)
    should_restore_database = _last_event_time(staging / DATABASE_FILE) > _last_event_time(home / DATABASE_FILE)
    if should_restore_database:
        _void_logins_and_invitations(staging / DATABASE_FILE, manifest)
        for suffix in ("-wal", "-shm"):  # SQLite would apply the old database's log to the new one
            (home / f"{DATABASE_FILE}{suffix}").unlink(missing_ok=True)
        files.append(_move_file(staging, home, Path(DATABASE_FILE)))
    other_files = [p.relative_to(staging) for p in staging.iterdir() if p.is_file() and p.name != DATABASE_FILE]
    for name in sorted(other_files, key=lambda name: name.name == SETTINGS_FILE):
        if not (home / name).exists():
            files.append(_move_file(staging, home, name))
    for folder in (RUNS_FOLDER, RECEIPTS_FOLDER, "log"):
        (home / folder).mkdir(exist_ok=True)
    return RestoredHome(
        name=str(manifest["name"]),
        backup_time=str(manifest["created"]),
        num_files=len(files),
        is_database_restored=should_restore_database,
        restored_runs=tuple(runs),
        num_receipts=len(names_to_restore),
        num_newer_receipts=len(names) - len(names_to_restore),
    )


def _is_home_receipt_older(home: Path, staging: Path, name: str) -> bool:
    """Compares by index within one ledger, by time between two ledgers, because the second continues the first."""
    home_state = _read_countersigned_state(home / RECEIPTS_FOLDER / name)
    backup_state = _read_countersigned_state(staging / RECEIPTS_FOLDER / name)
    if backup_state is None or home_state is None:
        return backup_state is not None
    if home_state.keys.ledger_id == backup_state.keys.ledger_id:
        return home_state.receipt.index < backup_state.receipt.index
    return home_state.receipt.time < backup_state.receipt.time


def _read_countersigned_state(file: Path) -> CountersignedState | None:
    """None if the file is missing or damaged."""
    try:
        return CountersignedState.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _is_further_along(run: Path, home_run: Path) -> bool:
    return _run_progress(run) > _run_progress(home_run)


def _run_progress(run: Path) -> tuple[bool, bool, int, int]:
    """Whether the run exists, whether it finished, the round of its last checkpoint, its number of recorded rounds."""
    checkpoints = sorted((run / "checkpoint").glob("round-*.safetensors"))
    try:
        rounds = len(load_round_records(run))
    except RunFolderError:
        rounds = 0
    last_round = int(checkpoints[-1].stem.partition("-")[2]) if checkpoints else -1
    return (run / "study.toml").is_file(), (run / RunResults.FILE_NAME).is_file(), last_round, rounds


def _last_event_time(file: Path) -> str:
    """Time of the database's last event; empty if the file is missing or damaged."""
    if not file.is_file():
        return ""
    try:
        with contextlib.closing(sqlite3.connect(file)) as database:
            if database.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                return ""
            return str(database.execute("SELECT max(time) FROM events").fetchone()[0] or " ")
    except sqlite3.DatabaseError:
        return ""


def _void_logins_and_invitations(file: Path, manifest: dict[str, Any]) -> None:
    """Since the backup, invitations may have been used and users may have logged out."""
    database = Database(f"sqlite:///{file}")
    try:
        with database.write_session() as session:
            session.execute(delete(LoginRow))
            session.execute(delete(InvitationRow).where(InvitationRow.used.is_(None)))
            session.add(
                EventRow(time=utc_now(), actor="restore", action="restored", details={"created": manifest["created"]})
            )
    finally:
        database.close()


def _move_file(staging: Path, home: Path, name: Path) -> Path:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    return (staging / name).replace(home / name)


def _move_run(staging: Path, home: Path, run: str) -> list[Path]:
    """Replaces the whole run folder, because a mixture of two could not resume. The old one is put back on failure."""
    source, target = staging / RUNS_FOLDER / run, home / RUNS_FOLDER / run
    replaced = staging / f"replaced-{run}"
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [p for p in source.rglob("*") if p.is_file()]
    if target.exists():
        target.replace(replaced)
    try:
        source.replace(target)
    except OSError:
        if replaced.exists():
            replaced.replace(target)
        raise
    return files
