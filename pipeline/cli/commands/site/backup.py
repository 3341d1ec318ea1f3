"""`hemofed site backup | restore`, `site ledger recover` and `site key new | officer`."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.output import console, print_json
from pipeline.cli.passphrases import load_private_key, read_passphrase
from pipeline.core.errors import HemofedError, RunFolderError
from pipeline.ops.encrypted_archive import is_encrypted
from pipeline.reports.document.formatting import format_bytes, format_count
from privacy.ledger import keys
from privacy.ledger.entry import LedgerPosition
from privacy.ledger.signatures import fingerprint_of, officer_key_rotation
from sites.governance.backup import backup_home, restore_home
from sites.governance.home import SiteHome
from sites.governance.ledger_recovery import recover_ledger


def backup_command(home: Path, file: Path, encrypt: bool, json: bool) -> None:
    backup_info = backup_home(home, file, read_passphrase("the backup", confirm=True) if encrypt else None)
    if json:
        print_json(backup_info | {"encrypted": encrypt})
        return
    console.print(f"wrote {file} ({format_bytes(backup_info['bytes'])}), without images", soft_wrap=True)
    if not encrypt:
        console.print(
            "It contains this site's private keys unencrypted: store it where only its owner can read it, or use --encrypt."
        )


def restore_command(file: Path, home: Path, json: bool) -> None:
    if not file.is_file():
        raise RunFolderError(f"{file} does not exist; name a file that `hemofed site backup` wrote")
    result = restore_home(file, home, read_passphrase(str(file), confirm=False) if is_encrypted(file) else None)
    if json:
        print_json(
            {
                "kept_ledger": result.kept_own_ledger,
                "index": result.last_entry_index,
                "files": result.num_files,
                "problems": list(result.problems),
            }
        )
        return
    ledger_text = (
        "the existing ledger is newer and is kept" if result.kept_own_ledger else "the ledger is that of the backup"
    )
    console.print(
        f"{format_count(result.num_files, 'file')} restored to {home}; {ledger_text}, with {result.last_entry_index + 1} entries",
        soft_wrap=True,
    )
    for problem in result.problems:
        console.print(problem, style="red")
    if not result.kept_own_ledger:
        console.print(
            "If the site trained after this backup, the coordinator refuses its ledger and reports the last entry: then the "
            "officer continues it with `hemofed site ledger recover`. Exclude patients who withdrew after the backup again."
        )


def recover_ledger_command(
    home: Path,
    officer_key_path: Path,
    ledger_id: str | None,
    last_index: int | None,
    last_hash: str | None,
    lost_charges: int | None,
    lost_epsilon: float,
    drop_cosigner: bool,
    json: bool,
) -> None:
    """`ledger_id`, `last_index` and `last_hash` are those of the coordinator's message."""
    if (last_index is None) != (last_hash is None):
        raise RunFolderError("--index and --head go together; the coordinator's message contains both")
    end_position = LedgerPosition(last_index, last_hash) if last_index is not None and last_hash is not None else None
    recovery = recover_ledger(
        home=home,
        officer_key=load_private_key(officer_key_path),
        end_position=end_position,
        ledger_id=ledger_id,
        num_lost_charges=lost_charges,
        lost_epsilon=lost_epsilon,
        drop_cosigner=drop_cosigner,
    )
    if json:
        print_json(
            {
                "ledger": recovery.ledger.id,
                "aside": str(recovery.old_ledger_path),
                "missing": recovery.num_missing_entries,
                "reckoned": len(recovery.lost_charges),
                "spent": recovery.lost_charges[-1].total_epsilon if recovery.lost_charges else None,
            }
        )
        return
    console.print(
        f"the new ledger {recovery.ledger.id[:16]}… continues the old one, which is now {recovery.old_ledger_path}",
        soft_wrap=True,
    )
    if recovery.num_missing_entries or recovery.lost_charges:
        spent_text = (
            f"; total spent epsilon: {recovery.lost_charges[-1].total_epsilon:.4g}" if recovery.lost_charges else ""
        )
        console.print(
            f"missing entries: {recovery.num_missing_entries}; charges estimated for them: {len(recovery.lost_charges)}{spent_text}"
        )
    active_keys = recovery.ledger.state.keys
    console.print(
        f"the site's key: {fingerprint_of(active_keys.agent_key)}; the officer's: {fingerprint_of(active_keys.officer_key)}"
    )
    console.print(
        "Approvals are not carried over: the officer has to approve again. Exclude patients again whose withdrawal was lost: "
        "hemofed site exclude-patient"
    )


def replace_officer_key_command(home: Path, old_key_path: Path, new_key_path: Path) -> None:
    """The new key is read from its file, or generated if there is no file."""
    site_home, old_key = SiteHome.open(home), load_private_key(old_key_path)
    is_generated = not new_key_path.exists()
    new_key = keys.generate_key() if is_generated else load_private_key(new_key_path)
    if is_generated:
        keys.save_key(new_key, new_key_path)  # before the ledger entry: an unsaved key in force could never be replaced
    try:
        site_home.ledger.append(officer_key_rotation(site_home.ledger.state.keys, new_key), old_key)
    except HemofedError:
        if is_generated:
            new_key_path.unlink()
        raise
    console.print(
        f"the officer's new key: {fingerprint_of(keys.public_hex(new_key))}; read it to the coordinator by telephone"
    )


def create_key_command(file: Path, should_encrypt: bool, json: bool) -> None:
    private_key = keys.generate_key()
    keys.save_key(private_key, file, read_passphrase(str(file), confirm=True) if should_encrypt else None)
    public_key = keys.public_hex(private_key)
    if json:
        print_json({"file": str(file), "public": public_key, "fingerprint": fingerprint_of(public_key)})
    else:
        console.print(
            f"wrote {file}\npublic key: {public_key}\nfingerprint: {fingerprint_of(public_key)}", soft_wrap=True
        )
