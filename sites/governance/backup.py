"""A site's home in one file, and back: keys, ledger, settings, memories and models, but no image, log or cache.

A backup may be taken while the agent works. The ledger is read last, so that nothing in the file is newer than it. To
restore never takes a ledger back: the longer one stays, and two that have parted ways are refused. On a new machine an
old ledger can come back, of course; the coordinator, which remembers how far it was, then refuses it until the officer
continues it in a new one (sites/governance/ledger_recovery.py).
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline.core.errors import KeyFileError, LedgerError, RunFolderError
from pipeline.core.files import exclusive_lock, write_atomically
from pipeline.ops.encrypted_archive import pack_archive, unpack_archive
from privacy.ledger import keys
from privacy.ledger.entry import LedgerEntry, parse_entry_line
from privacy.ledger.ledger import utc_now
from privacy.ledger.records import LedgerOpened
from privacy.ledger.verify import read_locked, verify_ledger
from sites.governance.settings import SiteSettings

LEDGER_FILE = "ledger.jsonl"
EXCLUDED_NAMES = ("log", ".lock", "officer.pem")  # an officer's key is his own, wherever it lies
BACKED_UP_KIT_FOLDERS = ("startup", "local")  # the rest of it is caches and logs
FORWARD_ONLY_NAMES = ("outbox", "unmasked.json", "runs")  # with the ledger they only go on


@dataclass(frozen=True)
class RestoreResult:
    kept_own_ledger: bool  # whether the home's own ledger, being newer, was
    last_entry_index: int  # the ledger's last entry
    num_files: int
    problems: tuple[str, ...]  # of the ledger


def backup_home(home: Path, out: Path, passphrase: str | None = None) -> dict[str, Any]:
    """What is in it."""
    if not (home / LEDGER_FILE).is_file():
        raise RunFolderError(
            f"{home} is no site's home: it has no ledger; name the folder that `hemofed site init` made"
        )
    if out.resolve().is_relative_to(home.resolve()):
        raise RunFolderError(f"{out} lies in the home itself; a backup belongs on another disk")
    verification = verify_ledger(home / LEDGER_FILE)
    if verification.state is None:
        raise LedgerError(f"{home / LEDGER_FILE} cannot be read; restore the newest copy before it is backed up")
    metadata = {
        "kind": "site",
        "site": verification.state.opening.site,
        "dataset_id": verification.state.opening.dataset_id,
        "made": utc_now().isoformat(timespec="seconds"),
        "version": version("hemofed"),
    }
    pack_archive(out, _iter_contents(home), metadata, passphrase)
    return metadata | {"file": str(out), "bytes": out.stat().st_size}


def _iter_contents(home: Path) -> Iterator[tuple[str, bytes, int]]:
    image_folder = SiteSettings.load(home).data
    if image_folder is not None and image_folder.resolve() == home.resolve():
        raise RunFolderError(
            f"the images lie in {home} itself; give them a folder of their own, for backups hold no image"
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
            except FileNotFoundError:  # gone meanwhile: the agent works on
                continue
    yield LEDGER_FILE, _complete_lines(read_locked(home / LEDGER_FILE)), (home / LEDGER_FILE).stat().st_mode


def _is_excluded(parts: tuple[str, ...], path: Path, image_folder: Path | None) -> bool:
    if path.is_symlink() or parts[0] in EXCLUDED_NAMES or path.name.endswith(".tmp"):
        return True
    if parts[0] == "kit" and len(parts) > 1 and parts[1] not in BACKED_UP_KIT_FOLDERS:
        return True
    return image_folder is not None and path.resolve().is_relative_to(image_folder.resolve())


def restore_home(file: Path, home: Path, passphrase: str | None = None) -> RestoreResult:
    home.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}.restoring-"))
    try:
        metadata = unpack_archive(file, staging, passphrase)
        if metadata.get("kind") != "site" or not (staging / LEDGER_FILE).is_file():
            raise RunFolderError(f"{file} is no backup of a site's home")
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
    own_lines, backup_lines = (_complete_lines(read_locked(folder / LEDGER_FILE)) for folder in (home, staging))
    if own_lines.startswith(backup_lines) or _ledger_id(backup_lines) in _previous_ledger_ids(home):
        return False
    if not backup_lines.startswith(own_lines) and _ledger_id(own_lines) not in _previous_ledger_ids(staging):
        if _ledger_id(own_lines) != _ledger_id(backup_lines):
            raise RunFolderError(
                f"{home} is the home of another ledger than the one in {file}; restore into a new folder"
            )
        divergence_index = next(
            n for n, (a, b) in enumerate(zip(own_lines.split(b"\n"), backup_lines.split(b"\n"), strict=False)) if a != b
        )
        raise LedgerError(
            f"the ledgers of {home} and of {file} part at entry {divergence_index}, so neither knows all that was spent. Keep this "
            "home, or restore into a new folder, and let the officer continue the ledger: `hemofed site ledger recover`"
        )
    if problems := verify_ledger(staging / LEDGER_FILE).problems:
        raise LedgerError(f"the ledger in {file} cannot be believed: {problems[0]}; the one in {home} stays")
    return True


def _complete_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _ledger_id(lines: bytes) -> str:
    """A ledger's identity."""
    return _opening_entry(lines).hash


def _opening_entry(lines: bytes) -> LedgerEntry:
    return parse_entry_line(lines.partition(b"\n")[0])


def _previous_ledger_ids(folder: Path) -> set[str]:
    """The ledgers that the folder's ledger continues."""
    ledger_ids = {_ledger_id(file.read_bytes()) for file in folder.glob("ledger-*.jsonl")}
    body = _opening_entry((folder / LEDGER_FILE).read_bytes()).record
    return ledger_ids | (
        {body.previous_ledger.ledger_id} if isinstance(body, LedgerOpened) and body.previous_ledger else set()
    )


def _names_to_keep(staging: Path, home: Path) -> tuple[str, ...]:
    """What a home whose ledger is the newer one keeps, if it has it."""
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
    if ledger_state is not None and public_key == ledger_state.keys.agent_key:  # else the backup's is tried
        kept_names.append("agent.pem")
    return tuple(name for name in kept_names if (home / name).exists())


def _merge_withdrawn_and_unmasked(staging: Path, home: Path) -> None:
    """Whoever withdrew stays withdrawn, and a sum that was unmasked stays unmasked."""
    withdrawn = [set(json.loads(f.read_text("utf-8"))) for d in (staging, home) if (f := d / "forgotten.json").exists()]
    if withdrawn:
        write_atomically(staging / "forgotten.json", json.dumps(sorted(set.union(*withdrawn))).encode())
    unmasked = [json.loads(f.read_text("utf-8")) for d in (staging, home) if (f := d / "unmasked.json").exists()]
    if len(unmasked) == 2 and unmasked[0]["study"] == unmasked[1]["study"]:
        latest = max(unmasked, key=lambda record: int(record["turn"]))
        for folder in (staging, home):
            write_atomically(folder / "unmasked.json", json.dumps(latest).encode())


def _move_files(staging: Path, home: Path, kept_names: tuple[str, ...]) -> int:
    """The ledger last: without it the home is none yet, and to restore once more does it all again."""
    names = [p.relative_to(staging) for p in sorted(staging.rglob("*")) if p.is_file()]
    names_to_move = [name for name in names if name.parts[0] not in kept_names or not (home / name).exists()]
    for name in sorted(names_to_move, key=lambda name: name == Path(LEDGER_FILE)):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(home / name)
    return len(names_to_move)
