"""A coordinator's home in one file, and back: keys, database, runs and receipts, but no log and nothing made anew at start.

A backup may be taken while the coordinator serves. The database comes before the runs, so that every run it names is
there; a run's checkpoint before its rounds, so that it can go on; receipts last, so that nothing is newer than they are.
To restore never takes anything back that the home still has: of the database, of each run and of each receipt the newer
one stays. On a new machine old receipts can come back, of course: a site that has moved on since shows the entries that
are missing here, and one that is behind them is refused.
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
from pipeline.core.files import exclusive_lock, load_round_records
from pipeline.ops.encrypted_archive import pack_archive, unpack_archive
from pipeline.service.storage.database import Database, EventRow, InvitationRow, LoginRow
from pipeline.service.storage.home import CoordinatorHome
from privacy.ledger import keys
from privacy.ledger.countersigner import CountersignedState
from privacy.ledger.ledger import utc_now

DATABASE_FILE, RUNS_FOLDER, RECEIPTS_FOLDER, SETTINGS_FILE = "hemofed.db", "runs", "receipts", "coordinator.toml"
# logs; and what the service lays out itself whenever it starts
EXCLUDED_NAMES = frozenset(
    {"log", "kit", "admin", "flare", DATABASE_FILE, f"{DATABASE_FILE}-wal", f"{DATABASE_FILE}-shm"}
)
TRANSIENT_NAMES = frozenset({"live.json", "ended.json", ".lock"})
MAX_CHECKPOINT_TRIES = 20  # checkpoints are cleared away while they are read

ArchiveEntry = tuple[str, bytes, int]  # name, content, mode


@dataclass(frozen=True)
class RestoredHome:
    name: str
    backup_time: str  # when the backup was
    num_files: int
    is_database_restored: bool  # whether the backup's is in force; else the home's, being newer, stayed
    restored_runs: tuple[str, ...]  # that came from the backup
    num_receipts: int  # that came from the backup
    num_newer_receipts: int  # receipts of the home that stayed because the backup's were older


def backup_home(home_path: Path, out: Path, passphrase: str | None = None) -> dict[str, Any]:
    """What is in it."""
    home = CoordinatorHome.open(home_path)
    if out.resolve().is_relative_to(home_path.resolve()):
        raise RunFolderError(f"{out} lies in the home itself; a backup belongs on another disk")
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
    """The checkpoint first: whatever rounds it knows of were written down before it was."""
    yield from _iter_checkpoint_entries(home, run)
    for folder, subfolders, names in os.walk(run):
        subfolders[:] = sorted(d for d in subfolders if Path(folder, d) != run / "checkpoint")
        for name in sorted(names):
            file = Path(folder, name)
            if not _is_transient(file) and not file.is_symlink():
                yield from _read_entry(home, file)


def _iter_checkpoint_entries(home: Path, run: Path) -> Iterator[ArchiveEntry]:
    """The newest one, then the number of the attempt: read before it, it could be one that is given again."""
    folder = run / "checkpoint"
    for _ in range(MAX_CHECKPOINT_TRIES):
        checkpoints = sorted(folder.glob("round-*.safetensors"))
        if not checkpoints:
            return
        if entries := list(_read_entry(home, checkpoints[-1])):
            yield from entries
            yield from _read_entry(home, folder / "attempt.json")
            return
    raise RunFolderError(f"{folder} changes faster than it can be read; try again, or pause the run first")


def _read_entry(home: Path, file: Path) -> Iterator[ArchiveEntry]:
    with contextlib.suppress(FileNotFoundError):  # gone meanwhile: the coordinator works on
        yield file.relative_to(home).as_posix(), file.read_bytes(), file.stat().st_mode


def _is_transient(file: Path) -> bool:
    return file.name in TRANSIENT_NAMES or file.name.endswith(".tmp")


def _copy_database(file: Path) -> bytes:
    """As of one moment, whoever writes meanwhile."""
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        copy = Path(folder, DATABASE_FILE)
        with (
            contextlib.closing(sqlite3.connect(file)) as source_database,
            contextlib.closing(sqlite3.connect(copy)) as target_database,
        ):
            source_database.backup(target_database)
            target_database.execute("PRAGMA journal_mode=DELETE")  # all of it in the one file
        return copy.read_bytes()


def restore_home(file: Path, home: Path, passphrase: str | None = None) -> RestoredHome:
    home.absolute().parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.absolute().parent, prefix=f".{home.name}.restoring-"))  # mode 0700
    try:
        manifest = unpack_archive(file, staging, passphrase)
        if manifest.get("kind") != "coordinator" or not (staging / SETTINGS_FILE).is_file():
            raise RunFolderError(f"{file} is no backup of a coordinator's home")
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
        raise RunFolderError(f"{error}; move it away, and the backup's is restored") from error
    if home_key != keys.public_hex(keys.load_key(staging / "key.pem")):
        raise RunFolderError(
            f"{home} is the home of another coordinator than the one in {file}; restore into a new folder"
        )


def _merge_backup(staging: Path, home: Path, manifest: dict[str, Any]) -> RestoredHome:
    """Receipts first and the settings last: a home that is half restored is none, and to restore once more does it all."""
    names = sorted(receipt.name for receipt in (staging / RECEIPTS_FOLDER).glob("*.json"))
    names_to_restore = [name for name in names if _is_home_receipt_older(home, staging, name)]
    num_kept = len(names) - len(names_to_restore)
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
        for suffix in ("-wal", "-shm"):  # of the one that goes: they would be taken for the new one's
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
        num_newer_receipts=num_kept,
    )


def _is_home_receipt_older(home: Path, staging: Path, name: str) -> bool:
    """Whether the home's receipt is: of one ledger by index, of two by time, for the second continues the first."""
    home_state, backup_state = (
        _read_countersigned_state(home / RECEIPTS_FOLDER / name),
        _read_countersigned_state(staging / RECEIPTS_FOLDER / name),
    )
    if backup_state is None or home_state is None:
        return backup_state is not None
    if home_state.keys.ledger_id == backup_state.keys.ledger_id:
        return home_state.receipt.index < backup_state.receipt.index
    return home_state.receipt.time < backup_state.receipt.time


def _read_countersigned_state(file: Path) -> CountersignedState | None:
    """None as well if it is damaged: then the backup's is better than nothing."""
    try:
        return CountersignedState.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _is_further_along(run: Path, home_run: Path) -> bool:
    return _run_progress(run) > _run_progress(home_run)


def _run_progress(run: Path) -> tuple[bool, bool, int, int]:
    """There, finished, the last checkpoint's round, rounds written down."""
    checkpoints = sorted((run / "checkpoint").glob("round-*.safetensors"))
    try:
        rounds = len(load_round_records(run / "rounds.jsonl"))
    except RunFolderError:
        rounds = 0
    last_round = int(checkpoints[-1].stem.partition("-")[2]) if checkpoints else -1
    return (run / "study.toml").is_file(), (run / "results.json").is_file(), last_round, rounds


def _last_event_time(file: Path) -> str:
    """When something was last written into its journal; empty if it is not there, or damaged."""
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
    """Invitations may have been used since, and browsers logged out: neither counts any more."""
    database = Database(f"sqlite:///{file}")
    try:
        with database.write_session() as session:
            session.execute(delete(LoginRow))
            session.execute(delete(InvitationRow).where(InvitationRow.used.is_(None)))
            session.add(EventRow(time=utc_now(), actor="restore", action="restored", details={"created": manifest["created"]}))
    finally:
        database.close()


def _move_file(staging: Path, home: Path, name: Path) -> Path:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    return (staging / name).replace(home / name)


def _move_run(staging: Path, home: Path, run: str) -> list[Path]:
    """As a whole: half of one and half of another could not go on. What was there is put back if that fails."""
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
