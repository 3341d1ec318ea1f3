"""HOME/officers.json: site -> fingerprint of its officer's key, as the hospital told it over another channel.

A site without an entry is trusted at its first receipt, and may not change its officer's key by a new ledger.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from pipeline.core.errors import KeyFileError, LedgerError, ServiceError
from pipeline.core.files import exclusive_lock, write_atomically
from pipeline.service.storage.home import CoordinatorHome
from pipeline.service.storage.store import CoordinatorStore

OFFICERS_FILE = "officers.json"
FINGERPRINT_PATTERN = re.compile(r"[0-9a-f]{4}(-[0-9a-f]{4}){7}")


def expected_officer(home: Path, site: str) -> Mapping[str, str] | None:
    """For LedgerCountersigner: None if the hospital has told nothing."""
    fingerprint = _load(home).get(site)
    return None if fingerprint is None else {site: fingerprint}


def expect_officer(home: CoordinatorHome, site: str, fingerprint: str) -> str:
    """Records the fingerprint, also in the log of events, and returns it."""
    fingerprint = fingerprint.strip().lower()
    if not FINGERPRINT_PATTERN.fullmatch(fingerprint):
        raise KeyFileError(
            f"{fingerprint!r} is not a fingerprint; have the officer read it out as `hemofed site init` or `hemofed site key "
            "new` prints it: eight groups of four digits 0 to f"
        )
    store = CoordinatorStore(home.database_url)
    try:
        enrolled = [row.name for row in store.list_sites() if row.left is None]
        if site not in enrolled:
            raise ServiceError(f"{site} is not enrolled; enrolled sites: {', '.join(enrolled) or 'none'}")
        with exclusive_lock(home.receipts_folder, wait=True):  # the service holds the home's own lock
            content = json.dumps({**_load(home.path), site: fingerprint}, indent=1)
            write_atomically(home.path / OFFICERS_FILE, content.encode())
        store.record_event("command line", "officer's key expected", site=site, fingerprint=fingerprint)
    finally:
        store.close()
    return fingerprint


def _load(home: Path) -> dict[str, str]:
    file = home / OFFICERS_FILE
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text("utf-8"))
        return {str(site): str(fingerprint) for site, fingerprint in content.items()}
    except (ValueError, AttributeError) as error:  # the officers of all sites would be forgotten
        raise LedgerError(f"{file} is damaged; restore it from a backup") from error
