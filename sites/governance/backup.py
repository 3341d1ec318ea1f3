"""Backup and restore of a site's home: keys, ledger, settings, client state and models; no images, logs or caches.

A backup can be taken while the agent runs. The ledger is read last, so nothing in the file is newer than the ledger.
A restore never replaces a ledger by an older one: the longer ledger stays, and ledgers that have diverged are refused.
On a new machine, an old ledger can come back. The coordinator remembers the newer head and refuses the old ledger until
the officer recovers it (sites/governance/ledger_recovery.py).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.core.errors import KeyFileError, LedgerError, RunFolderError
from pipeline.core.files import exclusive_lock
from pipeline.ops.encrypted_archive import pack_archive, unpack_archive
from privacy.ledger import keys
from privacy.ledger.entry import LedgerEntry, parse_entry_line
from privacy.ledger.ledger import utc_now
from privacy.ledger.records import LedgerOpened
from privacy.ledger.verify import read_locked, verify_ledger
from sites.governance.home import OUTBOX_FOLDER
from sites.governance.settings import SiteSettings
from sites.governance.unmasked_rounds import UNMASKED_ROUNDS_FILE, read_unmasked_rounds, write_unmasked_rounds
from sites.governance.withdrawn_units import read_withdrawn_units, write_withdrawn_units

LEDGER_FILE = "ledger.jsonl"
EXCLUDED_NAMES = ("log", ".lock", "officer.pem")  # the officer keeps a copy of the officer's key
BACKED_UP_KIT_FOLDERS = ("startup", "local")  # the rest of the kit is caches and logs
FORWARD_ONLY_NAMES = (OUTBOX_FOLDER, UNMASKED_ROUNDS_FILE, "runs")  # as old or as new as the ledger


@dataclass(frozen=True)
class RestoreResult:
    kept_own_ledger: bool  # the home's ledger is newer than the backup's
    last_entry_index: int  # of the ledger
    num_files: int
    problems: tuple[str, ...]  # of the ledger


def backup_home(home: Path, out: Path, passphrase: str | None = None) -> dict[str, Any]:
    """Writes the backup and returns its metadata."""
    if not (home / LEDGER_FILE).is_file():
        raise RunFolderError(
            f"{home} is not a site's home: it has no ledger; name the folder that `hemofed site init` created"
        )
    if out.resolve().is_relative_to(home.resolve()):
        raise RunFolderError(f"{out} is inside the home; write the backup to another disk")
    verification = verify_ledger(home / LEDGER_FILE)
    if verification.state is None:
        raise LedgerError(f"{home / LEDGER_FILE} cannot be read; restore the newest copy first")
    metadata = {
        "kind": "site",
        "site": verification.state.opening.site,
        "dataset_id": verification.state.opening.dataset_id,
        "created": utc_now().isoformat(timespec="seconds"),
        "version": version("hemofed"),
    }
    pack_archive(out, _iter_contents(home), metadata, passphrase)
    return metadata | {"file": str(out), "bytes": out.stat().st_size}


def _iter_contents(home: Path) -> Iterator[tuple[str, bytes, int]]:
    image_folder = SiteSettings.load(home).data
    if image_folder is not None and image_folder.resolve() == home.resolve():
        raise RunFolderError(
            f"the images are in {home} itself; move them to a separate folder, because backups contain no images"
        )
    for folder, subfolders, names in os.walk(home):
        folder_path = Path(folder)
        relative_parts = folder_path.relative_to(home).parts
        subfolders[:] = sorted(
            d for d in subfolders if not _is_excluded((*relative_parts, d), folder_path / d, image_folder)
        )
        for name in sorted(names):
            file = folder_path / name
            if (
                _is_excluded((*relative_parts, name), file, image_folder)
                or not file.is_file()
                or (*relative_parts, name) == (LEDGER_FILE,)
            ):
                continue
            try:
                yield file.relative_to(home).as_posix(), file.read_bytes(), file.stat().st_mode
            except FileNotFoundError:  # deleted meanwhile by the running agent
                continue
    yield LEDGER_FILE, _complete_lines(read_locked(home / LEDGER_FILE)), (home / LEDGER_FILE).stat().st_mode


def _is_excluded(parts: tuple[str, ...], path: Path, image_folder: Path | None) -> bool:
    if path.is_symlink() or parts[0] in EXCLUDED_NAMES or path.name.endswith(".tmp"):
        return True
    if parts[0] == "kit" and len(parts) > 1 and parts[1] not in BACKED_UP_KIT_FOLDERS:
        return True
    return image_folder is not None and path.resolve().is_relative_to(image_folder.resolve())


def restore_home(file: Path, home: Path, passphrase: str | None = None) -> RestoreResult:
    """Restores a backup into a new or an existing home; unpacks it next to the home first, so an error changes nothing."""
    home.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}.restoring-"))
    try:
        metadata = unpack_archive(file, staging, passphrase)
        if metadata.get("kind") != "site" or not (staging / LEDGER_FILE).is_file():
            raise RunFolderError(f"{file} is not a backup of a site's home")
        home.mkdir(exist_ok=True, mode=0o700)
        with exclusive_lock(home):
            keep_own_ledger = (home / LEDGER_FILE).is_file() and not _is_backup_newer(file, staging, home)
            _merge_withdrawn_and_unmasked(staging, home)
            num_moved = _move_files(staging, home, _names_to_keep(staging, home) if keep_own_ledger else ())
        verification = verify_ledger(home / LEDGER_FILE)
        return RestoreResult(keep_own_ledger, len(verification.entries) - 1, num_moved, verification.problems)
    finally:
        shutil.rmtree(staging)


def _is_backup_newer(file: Path, staging: Path, home: Path) -> bool:
    """Whether the backup's ledger extends or continues the home's. Raises if they have diverged."""
    own_lines, backup_lines = (_complete_lines(read_locked(folder / LEDGER_FILE)) for folder in (home, staging))
    if own_lines.startswith(backup_lines) or _ledger_id(backup_lines) in _previous_ledger_ids(home):
        return False
    if not backup_lines.startswith(own_lines) and _ledger_id(own_lines) not in _previous_ledger_ids(staging):
        if _ledger_id(own_lines) != _ledger_id(backup_lines):
            raise RunFolderError(f"{home} has another ledger than {file}; restore into a new folder")
        divergence_index = next(
            index
            for index, (own_line, backup_line) in enumerate(
                zip(own_lines.split(b"\n"), backup_lines.split(b"\n"), strict=False)
            )
            if own_line != backup_line
        )
        raise LedgerError(
            f"the ledgers of {home} and of {file} diverge at entry {divergence_index}, so neither has all charges. Keep this "
            "home, or restore into a new folder, and ask the officer to run `hemofed site ledger recover`"
        )
    if problems := verify_ledger(staging / LEDGER_FILE).problems:
        raise LedgerError(f"the ledger in {file} is not valid: {problems[0]}; {home} keeps its ledger")
    return True


def _complete_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _ledger_id(lines: bytes) -> str:
    return _opening_entry(lines).hash


def _opening_entry(lines: bytes) -> LedgerEntry:
    return parse_entry_line(lines.partition(b"\n")[0])


def _previous_ledger_ids(folder: Path) -> set[str]:
    """Ids of the ledgers that the folder's ledger continues."""
    ledger_ids = {_ledger_id(file.read_bytes()) for file in folder.glob("ledger-*.jsonl")}
    opening = _opening_entry((folder / LEDGER_FILE).read_bytes()).record
    if isinstance(opening, LedgerOpened) and opening.previous_ledger:
        ledger_ids.add(opening.previous_ledger.ledger_id)
    return ledger_ids


def _names_to_keep(staging: Path, home: Path) -> tuple[str, ...]:
    """Files that a home with the newer ledger keeps, as far as it has them."""
    kept_names = [
        LEDGER_FILE,
        *FORWARD_ONLY_NAMES,
        "salt",
        *(old_ledger.name for old_ledger in home.glob("ledger-*.jsonl")),
    ]
    ledger_state = verify_ledger(home / LEDGER_FILE).state
    try:
        public_key = keys.public_hex(keys.load_key(home / "agent.pem"))
    except KeyFileError:
        public_key = None
    if ledger_state is not None and public_key == ledger_state.keys.agent_key:  # otherwise the backup's key may fit
        kept_names.append("agent.pem")
    return tuple(name for name in kept_names if (home / name).exists())


def _merge_withdrawn_and_unmasked(staging: Path, home: Path) -> None:
    """Withdrawn patients stay withdrawn, and an unmasked round stays unmasked, whichever copy recorded it."""
    if withdrawn := read_withdrawn_units(staging) | read_withdrawn_units(home):
        write_withdrawn_units(staging, withdrawn)
    restored, own = read_unmasked_rounds(staging), read_unmasked_rounds(home)
    if merged := {study: max(restored.get(study, -1), own.get(study, -1)) for study in restored | own}:
        for folder in (staging, home):
            write_unmasked_rounds(folder, merged)


def _move_files(staging: Path, home: Path, kept_names: tuple[str, ...]) -> int:
    """Moves the ledger last: a folder without a ledger is not a home, so an interrupted restore can be repeated."""
    names = [p.relative_to(staging) for p in sorted(staging.rglob("*")) if p.is_file()]
    names_to_move = [name for name in names if name.parts[0] not in kept_names or not (home / name).exists()]
    for name in sorted(names_to_move, key=lambda name: name == Path(LEDGER_FILE)):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(home / name)
    return len(names_to_move)
