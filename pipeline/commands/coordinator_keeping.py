"""`hemofed coordinator backup` and `coordinator restore`."""

from __future__ import annotations

from pathlib import Path

from pipeline.archives import is_sealed
from pipeline.commands.output import console, print_json
from pipeline.commands.unlocking import passphrase
from pipeline.errors import BadRun
from pipeline.reports.words import count_of, size
from pipeline.service.backup import backup, restore


def backup_command(home: Path, file: Path, encrypt: bool, json: bool) -> None:
    made = backup(home, file, passphrase("the backup", new=True) if encrypt else None)
    if json:
        print_json(made | {"encrypted": encrypt})
        return
    console.print(f"written: {file} ({size(made['bytes'])})", soft_wrap=True)
    if not encrypt:
        console.print("It holds the federation's private keys and the lead's token in the clear: keep it where only its owner reads it, or use --encrypt.")  # fmt: skip


def restore_command(file: Path, home: Path, json: bool) -> None:
    if not file.is_file():
        raise BadRun(f"there is no backup {file}; name the file that `hemofed coordinator backup` wrote")
    made = restore(file, home, passphrase(str(file), new=False) if is_sealed(file) else None)
    if json:
        print_json(
            {"name": made.name, "made": made.made, "files": made.files, "database": made.database,
             "runs": list(made.runs), "receipts": made.receipts, "newer_receipts": made.newer}
        )  # fmt: skip
        return
    console.print(f"{made.name}: {count_of(made.files, 'file')} restored to {home}, as of {made.made[:19].replace('T', ' ')} UTC", soft_wrap=True)  # fmt: skip
    console.print(
        f"{count_of(len(made.runs), 'run')} and {count_of(made.receipts, 'receipt')} came from it; "
        + (
            f"{count_of(made.newer, 'receipt')} here were as new or newer, and stayed"
            if made.newer
            else "none was here"
        )
    )
    if not made.database:
        console.print("The database that was here is as new or newer, and stays.")
        return
    console.print(
        "Users revoked and sites removed since then count again: look at `hemofed coordinator users` and `coordinator "
        "status` before sites are let in. Open invitations are void; invite again."
    )
