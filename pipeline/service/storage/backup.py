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

from pipeline.core.errors import BadKey, BadRun
from pipeline.core.files import alone_in, read_rounds
from pipeline.ops.encrypted_archive import pack, unpack
from pipeline.service.storage.database import Database, Event, Invitation, Login
from pipeline.service.storage.home import CoordinatorHome
from privacy.ledger import keys
from privacy.ledger.countersigner import Known
from privacy.ledger.ledger import utc_now

DATABASE, RUNS, RECEIPTS, LAST = "hemofed.db", "runs", "receipts", "coordinator.toml"
# logs; and what the service lays out itself whenever it starts
LEFT_OUT = frozenset({"log", "kit", "admin", "flare", DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm"})
OF_A_MOMENT = frozenset({"live.json", "ended.json", ".lock"})
TRIES = 20  # checkpoints are cleared away while they are read

Piece = tuple[str, bytes, int]  # name, content, mode


@dataclass(frozen=True)
class Restored:
    name: str
    made: str  # when the backup was
    files: int
    database: bool  # whether the backup's is in force; else the home's, being newer, stayed
    runs: tuple[str, ...]  # that came from the backup
    receipts: int  # that came from the backup
    newer: int  # receipts of the home that stayed because the backup's were older


def backup(path: Path, out: Path, passphrase: str | None = None) -> dict[str, Any]:
    """What is in it."""
    home = CoordinatorHome.open(path)
    if out.resolve().is_relative_to(path.resolve()):
        raise BadRun(f"{out} lies in the home itself; a backup belongs on another disk")
    about = {
        "kind": "coordinator",
        "name": home.name,
        "key": keys.public_hex(home.key),
        "made": utc_now().isoformat(timespec="seconds"),
        "version": version("hemofed"),
    }
    pack(out, _contents(path), about, passphrase)
    return about | {"file": str(out), "bytes": out.stat().st_size}


def _contents(home: Path) -> Iterator[Piece]:
    for place in sorted(home.iterdir()):
        if place.is_file() and not place.is_symlink() and not _passing(place) and place.name not in LEFT_OUT:
            yield from _piece(home, place)
    yield DATABASE, _snapshot(home / DATABASE), 0o600
    for run in sorted((home / RUNS).iterdir()):
        if run.is_dir() and not run.is_symlink():
            yield from _run(home, run)
    for receipt in sorted((home / RECEIPTS).glob("*.json")):
        yield from _piece(home, receipt)


def _run(home: Path, run: Path) -> Iterator[Piece]:
    """The checkpoint first: whatever rounds it knows of were written down before it was."""
    yield from _checkpoint(home, run)
    for folder, below, names in os.walk(run):
        below[:] = sorted(d for d in below if Path(folder, d) != run / "checkpoint")
        for name in sorted(names):
            file = Path(folder, name)
            if not _passing(file) and not file.is_symlink():
                yield from _piece(home, file)


def _checkpoint(home: Path, run: Path) -> Iterator[Piece]:
    """The newest one, then the number of the attempt: read before it, it could be one that is given again."""
    folder = run / "checkpoint"
    for _ in range(TRIES):
        found = sorted(folder.glob("round-*.safetensors"))
        if not found:
            return
        if piece := list(_piece(home, found[-1])):
            yield from piece
            yield from _piece(home, folder / "attempt.json")
            return
    raise BadRun(f"{folder} changes faster than it can be read; try again, or pause the run first")


def _piece(home: Path, file: Path) -> Iterator[Piece]:
    with contextlib.suppress(FileNotFoundError):  # gone meanwhile: the coordinator works on
        yield file.relative_to(home).as_posix(), file.read_bytes(), file.stat().st_mode


def _passing(file: Path) -> bool:
    return file.name in OF_A_MOMENT or file.name.endswith(".tmp")


def _snapshot(file: Path) -> bytes:
    """As of one moment, whoever writes meanwhile."""
    with tempfile.TemporaryDirectory() as folder:  # mode 0700
        copy = Path(folder, DATABASE)
        with contextlib.closing(sqlite3.connect(file)) as source, contextlib.closing(sqlite3.connect(copy)) as sink:
            source.backup(sink)
            sink.execute("PRAGMA journal_mode=DELETE")  # all of it in the one file
        return copy.read_bytes()


def restore(file: Path, home: Path, passphrase: str | None = None) -> Restored:
    home.absolute().parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.absolute().parent, prefix=f".{home.name}.restoring-"))  # mode 0700
    try:
        about = unpack(file, staging, passphrase)
        if about.get("kind") != "coordinator" or not (staging / LAST).is_file():
            raise BadRun(f"{file} is no backup of a coordinator's home")
        home.mkdir(exist_ok=True, mode=0o700)
        with alone_in(home):
            _check_owner(file, staging, home)
            return _merge(staging, home, about)
    finally:
        shutil.rmtree(staging)


def _check_owner(file: Path, staging: Path, home: Path) -> None:
    if not (home / "key.pem").exists():
        return
    try:
        own = keys.public_hex(keys.load(home / "key.pem"))
    except BadKey as error:
        raise BadRun(f"{error}; move it away, and the backup's is restored") from error
    if own != keys.public_hex(keys.load(staging / "key.pem")):
        raise BadRun(f"{home} is the home of another coordinator than the one in {file}; restore into a new folder")


def _merge(staging: Path, home: Path, about: dict[str, Any]) -> Restored:
    """Receipts first and the settings last: a home that is half restored is none, and to restore once more does it all."""
    names = sorted(receipt.name for receipt in (staging / RECEIPTS).glob("*.json"))
    ours = [name for name in names if _older(home, staging, name)]
    stayed = len(names) - len(ours)
    files = [_move(staging, home, Path(RECEIPTS, name)) for name in ours]
    runs = [run.name for run in sorted((staging / RUNS).glob("*")) if _further(run, home / RUNS / run.name)]
    for run in runs:
        files += _move_run(staging, home, run)
    database = _last_event(staging / DATABASE) > _last_event(home / DATABASE)
    if database:
        _tidy(staging / DATABASE, about)
        for beside in ("-wal", "-shm"):  # of the one that goes: they would be taken for the new one's
            (home / f"{DATABASE}{beside}").unlink(missing_ok=True)
        files.append(_move(staging, home, Path(DATABASE)))
    rest = [p.relative_to(staging) for p in staging.iterdir() if p.is_file() and p.name != DATABASE]
    for name in sorted(rest, key=lambda name: name.name == LAST):
        if not (home / name).exists():
            files.append(_move(staging, home, name))
    for folder in (RUNS, RECEIPTS, "log"):
        (home / folder).mkdir(exist_ok=True)
    return Restored(str(about["name"]), str(about["made"]), len(files), database, tuple(runs), len(ours), stayed)


def _older(home: Path, staging: Path, name: str) -> bool:
    """Whether the home's receipt is: of one ledger by index, of two by time, for the second continues the first."""
    mine, theirs = _known(home / RECEIPTS / name), _known(staging / RECEIPTS / name)
    if theirs is None or mine is None:
        return theirs is not None
    if mine.keys.ledger == theirs.keys.ledger:
        return mine.receipt.index < theirs.receipt.index
    return mine.receipt.time < theirs.receipt.time


def _known(file: Path) -> Known | None:
    """None as well if it is damaged: then the backup's is better than nothing."""
    try:
        return Known.model_validate_json(file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def _further(run: Path, own: Path) -> bool:
    return _progress(run) > _progress(own)


def _progress(run: Path) -> tuple[bool, bool, int, int]:
    """There, finished, the last checkpoint's round, rounds written down."""
    points = sorted((run / "checkpoint").glob("round-*.safetensors"))
    try:
        rounds = len(read_rounds(run / "rounds.jsonl"))
    except BadRun:
        rounds = 0
    last = int(points[-1].stem.partition("-")[2]) if points else -1
    return (run / "study.toml").is_file(), (run / "results.json").is_file(), last, rounds


def _last_event(file: Path) -> str:
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


def _tidy(file: Path, about: dict[str, Any]) -> None:
    """Invitations may have been used since, and browsers logged out: neither counts any more."""
    database = Database(f"sqlite:///{file}")
    try:
        with database.writing() as session:
            session.execute(delete(Login))
            session.execute(delete(Invitation).where(Invitation.used.is_(None)))
            session.add(Event(time=utc_now(), who="restore", what="restored", about={"made": about["made"]}))
    finally:
        database.close()


def _move(staging: Path, home: Path, name: Path) -> Path:
    (home / name).parent.mkdir(parents=True, exist_ok=True)
    return (staging / name).replace(home / name)


def _move_run(staging: Path, home: Path, run: str) -> list[Path]:
    """As a whole: half of one and half of another could not go on. What was there is put back if that fails."""
    source, target = staging / RUNS / run, home / RUNS / run
    aside = staging / f"replaced-{run}"
    target.parent.mkdir(parents=True, exist_ok=True)
    files = [p for p in source.rglob("*") if p.is_file()]
    if target.exists():
        target.replace(aside)
    try:
        source.replace(target)
    except OSError:
        if aside.exists():
            aside.replace(target)
        raise
    return files
