"""HOME/withdrawn_units.json: pseudonyms of patients who withdrew, a copy of the ledger's that outlives a ledger recovery."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from pipeline.core.errors import RunFolderError
from pipeline.core.files import write_atomically

WITHDRAWN_UNITS_FILE = "withdrawn_units.json"
_FORMAT = TypeAdapter(frozenset[str])


def read_withdrawn_units(home: Path) -> frozenset[str]:
    file = home / WITHDRAWN_UNITS_FILE
    try:
        return _FORMAT.validate_json(file.read_bytes()) if file.exists() else frozenset()
    except ValidationError as error:
        raise RunFolderError(f"{file} is damaged; restore it from a backup (`hemofed site restore`)") from error


def write_withdrawn_units(home: Path, pseudonyms: Iterable[str]) -> None:
    write_atomically(home / WITHDRAWN_UNITS_FILE, json.dumps(sorted(set(pseudonyms))).encode())
