"""`hemofed site backup`, `site restore`, `site ledger continue`, `site key new` and `site key officer`."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.output import console, print_json
from pipeline.cli.passphrases import passphrase, unlocked
from pipeline.core.errors import BadRun, HemofedError
from pipeline.ops.encrypted_archive import is_sealed
from pipeline.reports.document.formatting import count_of, size
from privacy.ledger import keys
from privacy.ledger.entry import Mark
from privacy.ledger.signatures import new_officer, show
from sites.governance.backup import backup, restore
from sites.governance.home import Home
from sites.governance.ledger_recovery import continue_ledger


def backup_command(home: Path, file: Path, encrypt: bool, json: bool) -> None:
    made = backup(home, file, passphrase("the backup", new=True) if encrypt else None)
    if json:
        print_json(made | {"encrypted": encrypt})
        return
    console.print(f"written: {file} ({size(made['bytes'])}), no images", soft_wrap=True)
    if not encrypt:
        console.print("It holds this site's private keys in the clear: keep it where only its owner reads it, or use --encrypt.")  # fmt: skip


def restore_command(file: Path, home: Path, json: bool) -> None:
    if not file.is_file():
        raise BadRun(f"there is no backup {file}; name the file that `hemofed site backup` wrote")
    made = restore(file, home, passphrase(str(file), new=False) if is_sealed(file) else None)
    if json:
        print_json(
            {"kept_ledger": made.kept, "index": made.index, "files": made.files, "problems": list(made.problems)}
        )
        return
    ledger = "the ledger that was here is newer, and stays" if made.kept else "the ledger is the backup's"
    console.print(f"{count_of(made.files, 'file')} restored to {home}; {ledger}, with {made.index + 1} entries", soft_wrap=True)  # fmt: skip
    for problem in made.problems:
        console.print(problem, style="red")
    if not made.kept:
        console.print(
            "If work was done after this backup, the coordinator refuses its ledger, and says where it ended: then the "
            "officer continues it with `hemofed site ledger continue`. Patients who withdrew since must be named again."
        )


def continue_command(
    home: Path,
    officer: Path,
    ledger: str | None,
    index: int | None,
    head: str | None,
    lost: int | None,
    lost_epsilon: float,
    drop_second: bool,
    json: bool,
) -> None:
    """`ledger`, `index` and `head` as the coordinator's refusal names them."""
    if (index is None) != (head is None):
        raise BadRun("--index and --head go together; the coordinator's refusal names both")
    end = Mark(index, head) if index is not None and head is not None else None
    made = continue_ledger(home, unlocked(officer), end, ledger, lost, lost_epsilon, drop_second)
    if json:
        print_json({"ledger": made.ledger.id, "aside": str(made.aside), "missing": made.missing, "reckoned": len(made.lost),
                    "spent": made.lost[-1].epsilon if made.lost else None})  # fmt: skip
        return
    console.print(f"a new ledger, {made.ledger.id[:16]}…, continues the old one, which is now {made.aside}", soft_wrap=True)  # fmt: skip
    if made.missing or made.lost:
        spent = f"; spent in all now epsilon {made.lost[-1].epsilon:.4g}" if made.lost else ""
        console.print(
            f"{count_of(made.missing, 'entry').replace('entrys', 'entries')} cannot be read; {count_of(len(made.lost), 'charge')} "
            f"{'is' if len(made.lost) == 1 else 'are'} reckoned for what may be in them{spent}"
        )
    now = made.ledger.standing.keys
    console.print(f"the site's key: {show(now.agent)}; the officer's: {show(now.officer)}")
    console.print(
        "Approvals are not carried over: the officer approves again. Patients who withdrew in what is lost must be named "
        "again: hemofed site forget"
    )


def officer_command(home: Path, old: Path, new: Path) -> None:
    """The new key is read from its file, or made there."""
    own, before, made = Home.open(home), unlocked(old), not new.exists()
    after = keys.generate() if made else unlocked(new)
    if made:
        keys.save(after, new)  # first: a key in force that is nowhere could not be replaced
    try:
        own.ledger.append(new_officer(own.ledger.standing.keys, after), before)
    except HemofedError:
        if made:
            new.unlink()
        raise
    console.print(f"the officer's new key: {show(keys.public_hex(after))}; tell the coordinator by telephone")


def new_key_command(file: Path, protect: bool, json: bool) -> None:
    made = keys.generate()
    keys.save(made, file, passphrase(str(file), new=True) if protect else None)
    public = keys.public_hex(made)
    if json:
        print_json({"file": str(file), "public": public, "fingerprint": show(public)})
    else:
        console.print(f"written: {file}\npublic key: {public}\nfingerprint: {show(public)}", soft_wrap=True)
