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

from pipeline.core.errors import BadKey, BadLedger, BadRun
from pipeline.core.files import alone_in, write_atomically
from pipeline.ops.encrypted_archive import pack, unpack
from privacy.ledger import keys
from privacy.ledger.entry import Entry, read_line
from privacy.ledger.ledger import utc_now
from privacy.ledger.records import Open
from privacy.ledger.verify import read_shared, verify
from sites.governance.settings import Settings

LEDGER = "ledger.jsonl"
LEFT_OUT = ("log", ".lock", "officer.pem")  # an officer's key is his own, wherever it lies
OF_THE_KIT = ("startup", "local")  # the rest of it is caches and logs
FORWARD = ("outbox", "unmasked.json", "runs")  # with the ledger they only go on


@dataclass(frozen=True)
class Restored:
    kept: bool  # whether the home's own ledger, being newer, was
    index: int  # the ledger's last entry
    files: int
    problems: tuple[str, ...]  # of the ledger


def backup(home: Path, out: Path, passphrase: str | None = None) -> dict[str, Any]:
    """What is in it."""
    if not (home / LEDGER).is_file():
        raise BadRun(f"{home} is no site's home: it has no ledger; name the folder that `hemofed site init` made")
    if out.resolve().is_relative_to(home.resolve()):
        raise BadRun(f"{out} lies in the home itself; a backup belongs on another disk")
    verdict = verify(home / LEDGER)
    if verdict.standing is None:
        raise BadLedger(f"{home / LEDGER} cannot be read; restore the newest copy before it is backed up")
    about = {
        "kind": "site",
        "site": verdict.standing.opening.site,
        "dataset_id": verdict.standing.opening.dataset_id,
        "made": utc_now().isoformat(timespec="seconds"),
        "version": version("hemofed"),
    }
    pack(out, _contents(home), about, passphrase)
    return about | {"file": str(out), "bytes": out.stat().st_size}


def _contents(home: Path) -> Iterator[tuple[str, bytes, int]]:
    images = Settings.load(home).data
    if images is not None and images.resolve() == home.resolve():
        raise BadRun(f"the images lie in {home} itself; give them a folder of their own, for backups hold no image")
    for folder, below, names in os.walk(home):
        here = Path(folder)
        inside = here.relative_to(home).parts
        below[:] = sorted(d for d in below if not _skipped((*inside, d), here / d, images))
        for name in sorted(names):
            file = here / name
            if _skipped((*inside, name), file, images) or not file.is_file() or (*inside, name) == (LEDGER,):
                continue
            try:
                yield file.relative_to(home).as_posix(), file.read_bytes(), file.stat().st_mode
            except FileNotFoundError:  # gone meanwhile: the agent works on
                continue
    yield LEDGER, _whole_lines(read_shared(home / LEDGER)), (home / LEDGER).stat().st_mode


def _skipped(parts: tuple[str, ...], path: Path, images: Path | None) -> bool:
    if path.is_symlink() or parts[0] in LEFT_OUT or path.name.endswith(".tmp"):
        return True
    if parts[0] == "kit" and len(parts) > 1 and parts[1] not in OF_THE_KIT:
        return True
    return images is not None and path.resolve().is_relative_to(images.resolve())


def restore(file: Path, home: Path, passphrase: str | None = None) -> Restored:
    home.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(dir=home.parent, prefix=f".{home.name}.restoring-"))
    try:
        about = unpack(file, staging, passphrase)
        if about.get("kind") != "site" or not (staging / LEDGER).is_file():
            raise BadRun(f"{file} is no backup of a site's home")
        home.mkdir(exist_ok=True, mode=0o700)
        with alone_in(home):
            kept = (home / LEDGER).is_file() and not _backup_is_newer(file, staging, home)
            _merge_lists(staging, home)
            count = _move(staging, home, _staying(staging, home) if kept else ())
        verdict = verify(home / LEDGER)
        return Restored(kept, len(verdict.entries) - 1, count, verdict.problems)
    finally:
        shutil.rmtree(staging)


def _backup_is_newer(file: Path, staging: Path, home: Path) -> bool:
    mine, theirs = (_whole_lines(read_shared(folder / LEDGER)) for folder in (home, staging))
    if mine.startswith(theirs) or _first(theirs) in _earlier(home):
        return False
    if not theirs.startswith(mine) and _first(mine) not in _earlier(staging):
        if _first(mine) != _first(theirs):
            raise BadRun(f"{home} is the home of another ledger than the one in {file}; restore into a new folder")
        parted = next(n for n, (a, b) in enumerate(zip(mine.split(b"\n"), theirs.split(b"\n"), strict=False)) if a != b)
        raise BadLedger(
            f"the ledgers of {home} and of {file} part at entry {parted}, so neither knows all that was spent. Keep this "
            "home, or restore into a new folder, and let the officer continue the ledger: `hemofed site ledger continue`"
        )
    if problems := verify(staging / LEDGER).problems:
        raise BadLedger(f"the ledger in {file} cannot be believed: {problems[0]}; the one in {home} stays")
    return True


def _whole_lines(data: bytes) -> bytes:
    return data[: data.rfind(b"\n") + 1]


def _first(lines: bytes) -> str:
    """A ledger's identity."""
    return _opening(lines).hash


def _opening(lines: bytes) -> Entry:
    return read_line(lines.partition(b"\n")[0])


def _earlier(folder: Path) -> set[str]:
    """The ledgers that the folder's ledger continues."""
    found = {_first(file.read_bytes()) for file in folder.glob("ledger-*.jsonl")}
    body = _opening((folder / LEDGER).read_bytes()).what
    return found | ({body.continues.ledger} if isinstance(body, Open) and body.continues else set())


def _staying(staging: Path, home: Path) -> tuple[str, ...]:
    """What a home whose ledger is the newer one keeps, if it has it."""
    stays = [LEDGER, *FORWARD, "salt", *(aside.name for aside in home.glob("ledger-*.jsonl"))]
    standing = verify(home / LEDGER).standing
    try:
        own = keys.public_hex(keys.load(home / "agent.pem"))
    except BadKey:
        own = None
    if standing is not None and own == standing.keys.agent:  # else the backup's is tried
        stays.append("agent.pem")
    return tuple(name for name in stays if (home / name).exists())


def _merge_lists(staging: Path, home: Path) -> None:
    """Whoever withdrew stays withdrawn, and a sum that was unmasked stays unmasked."""
    gone = [set(json.loads(f.read_text("utf-8"))) for d in (staging, home) if (f := d / "forgotten.json").exists()]
    if gone:
        write_atomically(staging / "forgotten.json", json.dumps(sorted(set.union(*gone))).encode())
    turns = [json.loads(f.read_text("utf-8")) for d in (staging, home) if (f := d / "unmasked.json").exists()]
    if len(turns) == 2 and turns[0]["study"] == turns[1]["study"]:
        last = max(turns, key=lambda turn: int(turn["turn"]))
        for folder in (staging, home):
            write_atomically(folder / "unmasked.json", json.dumps(last).encode())


def _move(staging: Path, home: Path, staying: tuple[str, ...]) -> int:
    """The ledger last: without it the home is none yet, and to restore once more does it all again."""
    names = [p.relative_to(staging) for p in sorted(staging.rglob("*")) if p.is_file()]
    moving = [name for name in names if name.parts[0] not in staying or not (home / name).exists()]
    for name in sorted(moving, key=lambda name: name == Path(LEDGER)):
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (staging / name).replace(home / name)
    return len(moving)
